"""Small problems as a whole: every choice and order of peers with every cut.

Bounded in bulk, so that hundreds of thousands of layouts take a fraction of a second; only those whose bound is small are
ever simulated. Stages recompute only where memory demands it; the search tries other choices afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, permutations
from math import comb, perm

import numpy as np

from atoll.coordinator.planning.bounds import LowerBounds
from atoll.coordinator.planning.cuts import Indices
from atoll.coordinator.planning.layouts import Layout
from atoll.coordinator.planning.network import Matrix
from atoll.coordinator.planning.prediction import Predictor

MOST_LAYOUTS = 250_000
_BLOCK = 50_000


def num_layouts(num_peers: int, num_segments: int, num_stages: int | None) -> int:
    """How many layouts there are, not counting choices of recomputing."""
    return sum(
        perm(num_peers, count) * comb(num_segments - 1, count - 1) for count in _counts(num_peers, num_segments, num_stages)
    )


def promising_layouts(predictor: Predictor, bounds: LowerBounds, num_stages: int | None, most: int) -> list[Layout]:
    """At most ``most`` layouts: for each way to cut the one with the smallest bound, then the smallest bounds of all others.

    Where peers are much alike, the smallest bounds are those of one way to cut with the peers in every order.
    """
    found: list[_Bounded] = []
    heads: dict[tuple[int, ...], _Bounded] = {}
    for count in _counts(len(predictor.peers), predictor.segments.num_segments, num_stages):
        for block in _blocks(predictor, bounds, count):
            found = sorted([*found, *block.smallest(most)])[:most]
            for head in block.heads():
                cuts = head[1].bounds
                heads[cuts] = min(head, heads.get(cuts, head))
    chosen = [layout for _, layout in (*sorted(heads.values()), *found)]
    return list(dict.fromkeys(chosen))[:most]


_Bounded = tuple[float, Layout]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Block:
    """Some orders of the peers with every way to cut: a row of each matrix for an order and a way, ways changing first."""

    peers: Indices
    ends: Indices
    recompute: Indices
    least: Matrix
    num_ways: int

    def smallest(self, most: int) -> list[_Bounded]:
        """The rows with the smallest bounds."""
        return self._layouts(np.argsort(self.least, kind="stable")[:most])

    def heads(self) -> list[_Bounded]:
        """For each way to cut the row with the smallest bound."""
        best = self.least.reshape(-1, self.num_ways).argmin(axis=0)
        return self._layouts(best * self.num_ways + np.arange(self.num_ways))

    def _layouts(self, rows: Indices) -> list[_Bounded]:
        return [
            (float(self.least[row]), _layout(self.peers[row], self.ends[row], self.recompute[row]))
            for row in rows
            if np.isfinite(self.least[row])
        ]


def _blocks(predictor: Predictor, bounds: LowerBounds, count: int) -> Iterator[_Block]:
    """All layouts of ``count`` stages, in parts of bounded size."""
    num_segments = predictor.segments.num_segments
    plain = (predictor.table.held[0] >= 1.0) & np.isfinite(predictor.table.compute[0])
    orders = np.array(list(permutations(range(len(predictor.peers)), count)), dtype=np.intp)
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
        yield _Block(peers=peers, ends=ends, recompute=recompute, least=least, num_ways=len(cuts))


def _counts(num_peers: int, num_segments: int, num_stages: int | None) -> range:
    most = min(num_peers, num_segments)
    return range(1, most + 1) if num_stages is None else range(num_stages, min(num_stages, most) + 1)


def _layout(peers: Indices, bounds: Indices, recompute: Indices) -> Layout:
    return Layout(tuple(peers.tolist()), tuple(bounds.tolist()), tuple(bool(anew) for anew in recompute))
