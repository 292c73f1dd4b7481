"""The search for a layout: many orders through the dynamic programme, the best through the simulator, then small changes.

Deterministic: random numbers come from a fixed seed, and effort is counted in evaluations, never in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations

import numpy as np

from atoll.coordinator.planning.bounds import LowerBounds
from atoll.coordinator.planning.changes import changed_cuts, changed_orders, even_layouts
from atoll.coordinator.planning.cuts import UNHURRIED, Indices, PacedCosts, solve, within
from atoll.coordinator.planning.exhaustive import MOST_LAYOUTS, num_layouts, promising_layouts
from atoll.coordinator.planning.in_flight import FACTORS, FEW_FACTORS, Tuned, quickest, refine
from atoll.coordinator.planning.judging import Judge, Penalty, judge_of, without_replicas
from atoll.coordinator.planning.layouts import Layout, layout_loops, layout_pace
from atoll.coordinator.planning.network import Matrix
from atoll.coordinator.planning.order import pair_seconds, starting_orders, variations
from atoll.coordinator.planning.prediction import Predictor
from atoll.coordinator.planning.replication import replicate

ALL_ORDERS_UP_TO = 6
"""So few peers are tried in every order."""
EVALUATED_ELEMENTS = 2e8
"""Array elements that the dynamic programmes over varied orders may touch; about a second."""
SEARCHING_WORKS = 1.5e5
"""Forward and backward passes that may be simulated to find layouts that are worth improving; about a second."""
IMPROVING_WORKS = 3e5
"""The same for improving them."""
REFINING_WORKS = 6e4
"""The same for the numbers of microbatches in flight of each of the best."""
_BOUND_WORKS = 4
_SIMULATION_WORKS = 40
_PACES = 28
_COARSE_PACES = 12
_BOUNDED = 800
_FINALISTS = 120
_EXHAUSTIVE = 1000
_IMPROVED = 6
_IMPROVED_OF_MANY = 4
_REFINED = 4
_ROUND = 32
_ROUNDS = 40
_TRIED = 40
_NEWCOMERS = 12
_RECUT_ELEMENTS = 5e6
_RECUT_PACES = (1.0, 0.93)
_TUNED = 20
_BASES = 8


def search(
    predictor: Predictor, num_stages: int | None = None, *, start: Layout | None = None, penalty: Penalty | None = None
) -> Tuned | None:
    """The best layout found, None when nothing fits. ``start`` and what is near it are always looked at."""
    judge = judge_of(predictor, penalty)
    plain = without_replicas(start) if start is not None else None
    alone = _Search(predictor, num_stages, plain, judge)
    found = alone.run()
    if found is None or predictor.constraints.num_replicas == 1:
        return found
    return replicate(predictor, [found.layout, *alone.best_of_each_count(_BASES)], start, judge, num_stages)


class _Search:
    def __init__(self, predictor: Predictor, num_stages: int | None, start: Layout | None, judge: Judge) -> None:
        self._predictor = predictor
        self._start = start
        self._judge = judge
        self._table = predictor.table
        self._bounds = LowerBounds(predictor)
        self._num_stages = num_stages
        self._estimates: dict[Layout, float] = {}
        self._simulated: dict[Layout, Tuned] = {}
        self._tuned: set[Layout] = set()
        self._works_left = SEARCHING_WORKS
        self._generator = np.random.default_rng(0)
        whole = self._table.compute[0, :, 0, -1]
        self._by_speed = tuple(int(peer) for peer in np.lexsort((np.arange(len(whole)), whole)))

    def run(self) -> Tuned | None:
        num_peers, num_segments = self._table.num_peers, self._table.num_positions - 1
        evens = even_layouts(self._predictor, self._num_stages)
        if num_layouts(num_peers, num_segments, self._num_stages) <= MOST_LAYOUTS:
            self._simulate_all(promising_layouts(self._predictor, self._bounds, self._num_stages, _EXHAUSTIVE))
        else:
            self._sweep()
            self._vary_orders()
            promising = sorted(self._estimates, key=lambda layout: (self._estimates[layout], layout))[:_BOUNDED]
            self._simulate_all(layout for _, layout in self._bounds.of(promising)[:_FINALISTS])
        self._simulate_all(evens)
        present = self._simulate(self._start, np.inf) if self._start is not None else None
        if not self._simulated:
            return None
        self._works_left += IMPROVING_WORKS
        self._tune_best()
        starts = self._best(_IMPROVED if num_peers <= ALL_ORDERS_UP_TO else _IMPROVED_OF_MANY)
        for tuned in [present, *starts] if present is not None else starts:
            self._improve(tuned)
        self._tune_best()
        best = self._best(_REFINED if num_peers <= ALL_ORDERS_UP_TO else 1)
        return min((self._refined(tuned) for tuned in best), key=self._rank)

    def _cost(self, tuned: Tuned) -> float:
        return self._judge(tuned.step_seconds, tuned.layout)

    def best_of_each_count(self, count: int) -> list[Layout]:
        """For some numbers of stages, the best first, the best layout that was simulated."""
        best: dict[int, Tuned] = {}
        for tuned in sorted(self._simulated.values(), key=self._rank):
            best.setdefault(tuned.layout.num_stages, tuned)
        return [tuned.layout for tuned in list(best.values())[:count]]

    def _rank(self, tuned: Tuned) -> tuple[float, Layout]:
        return self._cost(tuned), tuned.layout

    def _best(self, count: int) -> list[Tuned]:
        return sorted(self._simulated.values(), key=self._rank)[:count]

    def _refined(self, tuned: Tuned) -> Tuned:
        return refine(self._predictor, tuned, int(REFINING_WORKS / self._works(tuned.layout, ())))

    def _tune_best(self) -> None:
        """More numbers of microbatches in flight for the best layouts."""
        for tuned in self._best(_TUNED):
            if tuned.layout not in self._tuned and self._works_left > 0:
                self._tuned.add(tuned.layout)
                self._works_left -= self._works(tuned.layout, FACTORS)
                self._simulated[tuned.layout] = quickest(self._predictor, tuned.layout, FACTORS)

    def _starting_orders(self) -> Indices:
        predictor, segments = self._predictor, self._predictor.segments
        inner = slice(1, -1)
        there, back = (
            float(np.median(values[inner] or (0.0,))) for values in (segments.forward_bytes, segments.backward_bytes)
        )
        speed = 1.0 / np.maximum(predictor.seconds.all_works[:, -1], 1e-12)
        memory = np.array([float(peer.memory_bytes) for peer in predictor.peers])
        return starting_orders(pair_seconds(predictor.network, there, back), speed, memory)

    def _paces(self, orders: Indices, count: int) -> Matrix:
        """Paces worth trying, from the one of the shortest loops down to what all peers together could do."""
        shortest = solve(within(self._table, UNHURRIED), orders, self._num_stages)
        some = [int(number) for number in np.argsort(shortest.loop, kind="stable")[:8] if np.isfinite(shortest.loop[number])]
        if not some:
            return np.empty(0)
        slowest = max(layout_pace(self._table, shortest.layout(number)) for number in some)
        fastest = 1.0 / float((1.0 / np.maximum(self._predictor.seconds.all_works[:, -1], 1e-12)).sum())
        return np.geomspace(slowest, min(max(fastest, slowest / 1e4), slowest), count)

    def _sweep(self) -> None:
        """The starting orders, or all where they are few, at a number of paces; the most promising layouts are kept."""
        if self._table.num_peers <= ALL_ORDERS_UP_TO:
            orders, count = np.array(list(permutations(range(self._table.num_peers))), dtype=np.intp), _PACES
        else:
            orders, count = self._starting_orders(), _COARSE_PACES
        followers = self._table.num_microbatches - 1
        paces = self._paces(orders, count)
        solutions = [solve(within(self._table, float(pace)), orders, self._num_stages) for pace in paces]
        if not solutions:
            return
        totals = np.stack([one.loop + followers * pace for one, pace in zip(solutions, paces, strict=True)])
        promising = np.argsort(totals, axis=None, kind="stable")[: 4 * _BOUNDED]
        for index in promising:
            which, number = np.unravel_index(int(index), totals.shape)
            if np.isfinite(totals[which, number]):
                self._consider(solutions[int(which)].layout(int(number)))

    def _consider(self, layout: Layout) -> float:
        """Estimate a layout and remember it."""
        if layout not in self._estimates:
            pace = layout_pace(self._table, layout)
            loop = layout_loops(self._table, layout, pace)[0]
            self._estimates[layout] = loop + (self._table.num_microbatches - 1) * pace
        return self._estimates[layout]

    def _vary_orders(self) -> None:
        """Local search over orders, judged by the dynamic programme around the best pace."""
        if not self._estimates:
            return
        rounds = int(EVALUATED_ELEMENTS / self._elements(self._table.num_peers) / _ROUND)
        best = min(self._estimates, key=lambda layout: (self._estimates[layout], layout))
        order = self._complete(best)
        for number in range(max(1, min(rounds, _ROUNDS))):
            pace = layout_pace(self._table, best) * (0.88, 0.94, 0.97, 1.0)[number % 4]
            orders = variations(order, frozenset(best.peers), _ROUND, self._generator)
            for place, layout in self._solved(orders, within(self._table, pace), 3):
                if self._consider(layout) < self._estimates[best]:
                    best, order = layout, tuple(int(peer) for peer in orders[place])

    def _elements(self, length: int) -> float:
        """How much work the dynamic programme has with one order of that length."""
        positions = self._table.num_positions
        return length * positions * (length / 2.0 + positions) * (self._num_stages or 1)

    def _solved(self, orders: Indices, costs: PacedCosts, count: int) -> list[tuple[int, Layout]]:
        """The best ``count`` layouts for ``orders``, with the number of their order."""
        solutions = solve(costs, orders, self._num_stages)
        best = np.argsort(solutions.loop, kind="stable")[:count]
        return [(int(number), solutions.layout(int(number))) for number in best if np.isfinite(solutions.loop[number])]

    def _complete(self, layout: Layout) -> tuple[int, ...]:
        """All peers: those of the layout in its order, the others after them."""
        return (*layout.peers, *(peer for peer in self._by_speed if peer not in layout.peers))

    def _simulate_all(self, layouts: Iterable[Layout]) -> None:
        best = np.inf
        for layout in layouts:
            tuned = self._simulate(layout, best)
            if tuned is not None:
                best = min(best, self._cost(tuned))

    def _simulate(self, layout: Layout, limit: float) -> Tuned | None:
        """The layout simulated, None where it cannot be below ``limit`` or the effort is spent."""
        known = self._simulated.get(layout)
        if known is not None:
            return known
        self._works_left -= _BOUND_WORKS
        if self._works_left <= 0 and self._simulated:
            return None
        if self._judge(self._bounds.of([layout])[0][0], layout) >= limit:
            return None
        self._works_left -= self._works(layout, FEW_FACTORS)
        tuned = self._simulated[layout] = quickest(self._predictor, layout, FEW_FACTORS)
        return tuned

    def _works(self, layout: Layout, factors: tuple[float, ...]) -> float:
        works = 2 * layout.num_stages * self._table.num_microbatches + _SIMULATION_WORKS
        return works * (len(factors) + 1)

    def _improve(self, found: Tuned) -> None:
        """Small changes for as long as one of them helps, those with the smallest lower bound first."""
        improved = True
        while improved and self._works_left > 0:
            improved = False
            for layout in self._changes(found):
                tuned = self._simulate(layout, self._cost(found))
                if tuned is not None and self._cost(tuned) < self._cost(found) * (1.0 - 1e-6):
                    found, improved = tuned, True
                    break

    def _changes(self, found: Tuned) -> list[Layout]:
        layouts = set(changed_cuts(found.layout, self._predictor, fixed_count=self._num_stages is not None))
        layouts.update(self._changed_orders(found.layout))
        self._works_left -= _BOUND_WORKS * len(layouts)
        bounded = self._bounds.of(layout for layout in layouts if layout not in self._simulated)
        limit = self._cost(found)
        return [layout for bound, layout in bounded if self._judge(bound, layout) < limit][:_TRIED]

    def _changed_orders(self, layout: Layout) -> list[Layout]:
        """Other orders, cut anew around the layout's pace."""
        unused = tuple(peer for peer in self._by_speed if peer not in layout.peers)[:_NEWCOMERS]
        limit = max(8, int(_RECUT_ELEMENTS / self._elements(layout.num_stages + 1)))
        pace = layout_pace(self._table, layout)
        layouts = []
        groups = changed_orders(layout.peers, unused, limit, self._generator)
        for factor in _RECUT_PACES:
            costs = within(self._table, pace * factor)
            for orders in groups:
                layouts += [found for _, found in self._solved(orders, costs, 2 * _TRIED)]
        return layouts
