"""Small changes to a layout: what a local search tries next."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from atoll.coordinator.planning.cuts import Indices
from atoll.coordinator.planning.layouts import Layout
from atoll.coordinator.planning.prediction import Predictor


def settle(peers: tuple[int, ...], bounds: tuple[int, ...], predictor: Predictor) -> Layout | None:
    """A layout that recomputes only where memory demands it, None when a stage does not fit."""
    recompute = []
    for peer, first, end in zip(peers, bounds[:-1], bounds[1:], strict=True):
        anew = next((anew for anew in (False, True) if predictor.possible(peer, first, end, anew)), None)
        if anew is None:
            return None
        recompute.append(anew)
    return Layout(peers, bounds, tuple(recompute))


def even_layouts(predictor: Predictor, num_stages: int | None = None) -> list[Layout]:
    """The segments dealt evenly to the peers in their own order, for every number of stages that fits."""
    num_segments, num_peers = predictor.segments.num_segments, len(predictor.peers)
    most = min(num_segments, num_peers)
    counts = range(1, most + 1) if num_stages is None else range(num_stages, min(num_stages, most) + 1)
    layouts = []
    for count in counts:
        bounds = tuple(stage * num_segments // count for stage in range(count + 1))
        layout = settle(tuple(range(count)), bounds, predictor)
        if layout is not None:
            layouts.append(layout)
    return layouts


def changed_cuts(layout: Layout, predictor: Predictor, *, fixed_count: bool) -> Iterator[Layout]:
    """Every layout with other cuts, two peers swapped, a stage fewer or another choice of recomputing, that fits."""
    for peers, bounds in _changed(layout, fixed_count):
        settled = settle(peers, bounds, predictor)
        if settled is not None:
            yield settled
    for stage, anew in enumerate(layout.recompute):
        toggled = Layout(layout.peers, layout.bounds, (*layout.recompute[:stage], not anew, *layout.recompute[stage + 1 :]))
        if predictor.fits(toggled):
            yield toggled


def _changed(layout: Layout, fixed_count: bool) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    peers, bounds, count = layout.peers, layout.bounds, layout.num_stages
    for first in range(1, count):
        for last in range(first, count):
            for shift in (-2, -1, 1, 2) if first == last else (-1, 1):
                moved = [bound + shift if first <= index <= last else bound for index, bound in enumerate(bounds)]
                if moved[first - 1] < moved[first] and moved[last] < moved[last + 1]:
                    yield peers, tuple(moved)
    for one in range(count):
        for other in range(one + 1, count):
            swapped = list(peers)
            swapped[one], swapped[other] = swapped[other], swapped[one]
            yield tuple(swapped), bounds
    if fixed_count or count == 1:
        return
    for stage in range(count):
        for bound in sorted({max(1, stage), min(count - 1, stage + 1)}):
            yield (*peers[:stage], *peers[stage + 1 :]), (*bounds[:bound], *bounds[bound + 1 :])


def changed_orders(
    peers: tuple[int, ...], unused: tuple[int, ...], limit: int, generator: np.random.Generator
) -> list[Indices]:
    """Orders near ``peers``, to be cut anew: two swapped or one moved; one of ``unused`` put in somewhere.

    At most about ``limit`` rows of each kind, chosen at random when there are more.
    """
    count = len(peers)
    rows = set()
    for one in range(count):
        for other in range(count):
            moved = list(peers)
            moved.insert(other, moved.pop(one))
            rows.add(tuple(moved))
            swapped = list(peers)
            swapped[one], swapped[other] = swapped[other], swapped[one]
            rows.add(tuple(swapped))
    longer = {(*peers[:place], peer, *peers[place:]) for peer in unused for place in range(count + 1)}
    return [_sample(sorted(group), limit, generator) for group in (rows, longer) if group]


def _sample(rows: list[tuple[int, ...]], limit: int, generator: np.random.Generator) -> Indices:
    if len(rows) > limit:
        rows = [rows[int(index)] for index in np.sort(generator.choice(len(rows), size=limit, replace=False))]
    return np.array(rows, dtype=np.intp)
