"""Small problems as a whole: every choice and order of peers with every cut, the most promising first.

Bounded in bulk, so that hundreds of thousands of layouts take a fraction of a second; only those whose bound is small are
ever simulated. Stages recompute only where memory demands it; the search tries other choices afterwards.
"""

from __future__ import annotations

from itertools import combinations, permutations
from math import comb, perm

import numpy as np

from atoll.coordinator.planning.bounds import LowerBounds
from atoll.coordinator.planning.cuts import Indices, Layout
from atoll.coordinator.planning.prediction import Predictor

MOST_LAYOUTS = 250_000
_BLOCK = 50_000


def num_layouts(num_peers: int, num_segments: int, num_stages: int | None) -> int:
    """How many layouts there are, not counting choices of recomputing."""
    return sum(
        perm(num_peers, count) * comb(num_segments - 1, count - 1) for count in _counts(num_peers, num_segments, num_stages)
    )


def promising_layouts(predictor: Predictor, bounds: LowerBounds, num_stages: int | None, most: int) -> list[Layout]:
    """The ``most`` layouts with the smallest bounds, the smallest first."""
    num_peers, num_segments = len(predictor.peers), predictor.segments.num_segments
    plain = (predictor.table.held[0] >= 1.0) & np.isfinite(predictor.table.compute[0])
    found: list[tuple[float, Layout]] = []
    for count in _counts(num_peers, num_segments, num_stages):
        orders = np.array(list(permutations(range(num_peers), count)), dtype=np.intp)
        inner = np.array(list(combinations(range(1, num_segments), count - 1)), dtype=np.intp).reshape(
            comb(num_segments - 1, count - 1), count - 1
        )
        cuts = np.pad(inner, ((0, 0), (1, 1)))
        cuts[:, -1] = num_segments
        per_block = max(1, _BLOCK // len(cuts))
        for start in range(0, len(orders), per_block):
            block = orders[start : start + per_block]
            peers, ends = np.repeat(block, len(cuts), axis=0), np.tile(cuts, (len(block), 1))
            recompute = (~plain[peers, ends[:, :-1], ends[:, 1:]]).astype(np.intp)
            least = bounds.least_seconds(peers, ends, recompute)
            for row in np.argsort(least, kind="stable")[:most]:
                if np.isfinite(least[row]):
                    found.append((float(least[row]), _layout(peers[row], ends[row], recompute[row])))
        found = sorted(found)[:most]
    return [layout for _, layout in found]


def _counts(num_peers: int, num_segments: int, num_stages: int | None) -> range:
    most = min(num_peers, num_segments)
    return range(1, most + 1) if num_stages is None else range(num_stages, min(num_stages, most) + 1)


def _layout(peers: Indices, bounds: Indices, recompute: Indices) -> Layout:
    return Layout(tuple(peers.tolist()), tuple(bounds.tolist()), tuple(bool(anew) for anew in recompute))
