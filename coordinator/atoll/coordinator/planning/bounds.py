"""A time that no simulation of a layout undercuts, so that a search may pass over most layouts without simulating them.

A microbatch that reaches a stage has passed all stages before, and its gradient has to pass them again: the *lead*. Between
the two, the stage computes all microbatches one after another, its links carry them one after another, and at most K of
them are in the loop through the later stages at any time. What the stages of one machine compute takes its cores' time. Many
layouts of the same number of stages are bounded at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from atoll.coordinator.planning.cuts import Indices
from atoll.coordinator.planning.layouts import Layout
from atoll.coordinator.planning.network import Matrix
from atoll.coordinator.planning.prediction import Predictor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Works:
    """A row a layout, a column a stage. ``answer`` is from a gradient's arrival until the next one leaves; ``begin`` is before
    a stage's first forward, ``over`` after its last work, ``once`` what it computes of both."""

    forward: Matrix
    answer: Matrix
    accumulate: Matrix
    begin: Matrix
    over: Matrix
    once: Matrix


class LowerBounds:
    """Lower bounds on the steps of layouts; infinite where a stage does not fit."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._overhead = np.array([peer.overhead_seconds for peer in predictor.peers])
        self._coordinator = np.array([peer.coordinator_round_trip_seconds / 2.0 for peer in predictor.peers])
        self._crowd, self._share = np.array(predictor.table.crowd), np.array(predictor.table.share)
        onward, homeward = predictor.constraints.strongest_ratios
        self._forward_bytes = onward * np.asarray(predictor.segments.forward_bytes)
        self._backward_bytes = homeward * np.asarray(predictor.segments.backward_bytes)
        self._known: dict[Layout, float] = {}

    def of(self, layouts: Iterable[Layout]) -> list[tuple[float, Layout]]:
        """Each layout with its bound, the smallest bound first."""
        layouts = list(layouts)
        by_count: dict[int, list[Layout]] = {}
        for layout in layouts:
            if layout not in self._known:
                by_count.setdefault(layout.num_stages, []).append(layout)
        for group in by_count.values():
            peers = np.array([layout.peers for layout in group], dtype=np.intp)
            bounds = np.array([layout.bounds for layout in group], dtype=np.intp)
            recompute = np.array([layout.recompute for layout in group], dtype=np.intp)
            least = self.least_seconds(peers, bounds, recompute)
            self._known.update(zip(group, least.tolist(), strict=True))
        return sorted((self._known[layout], layout) for layout in layouts)

    def least_seconds(self, peers: Indices, bounds: Indices, recompute: Indices) -> Matrix:
        """One bound a row. ``peers`` and ``recompute`` have a column for each stage, ``bounds`` one more."""
        table, constraints = self._predictor.table, self._predictor.constraints
        first, end = bounds[:, :-1], bounds[:, 1:]
        works = self._works(peers, first, end, recompute)
        forward, answer, accumulate = works.forward, works.answer, works.accumulate
        held = table.held[recompute, peers, first, end]
        fits = ((held >= 1.0) & np.isfinite(table.compute[recompute, peers, first, end])).all(axis=1)
        there, back, wire = self._links(peers, end[:, :-1])
        # The coordinator's word and the first stage's update come before everything, its norms and its report after its last
        # gradient, which is the last to arrive.
        begin, over = works.begin[:, :1], works.over[:, :1]
        reaching = np.concatenate([begin, begin + np.cumsum(forward[:, :-1] + there, axis=1)], axis=1)
        passing = forward + answer
        passing[:, :-1] += there + back
        loop = np.cumsum(passing[:, ::-1], axis=1)[:, ::-1]
        lead = loop[:, :1] - loop + begin + over
        count = constraints.num_microbatches
        rounds = np.floor((count - 1) / np.maximum(held, 1.0))
        waits = count * (forward + answer), rounds * (loop + accumulate) + loop
        least = (lead + np.maximum(*waits)).max(axis=1)
        # Gradients of weights may all wait until the last gradient has left, but then they take their time.
        whole = count * (forward + answer + accumulate)
        least = np.maximum(least, (np.maximum(reaching, works.begin) + whole + works.over).max(axis=1))
        if wire.shape[1]:
            least = np.maximum(least, (begin + over + loop[:, :1] + (count - 1) * wire).max(axis=1))
        least = np.maximum(least, self._machines(peers, whole, works, reaching))
        return np.where(fits, least * (1.0 - 1e-9) + constraints.commit_seconds, np.inf)

    def _works(self, peers: Indices, first: Indices, end: Indices, recompute: Indices) -> _Works:
        predictor = self._predictor
        seconds, overhead = predictor.seconds, self._overhead[peers]

        def between(sums: Matrix) -> Matrix:
            return np.asarray(sums[peers, end] - sums[peers, first])

        forward = between(seconds.forward) + overhead
        answer = between(seconds.backward) + overhead + forward * recompute
        accumulate = between(seconds.accumulate)
        answer[:, 0] += accumulate[:, 0]
        accumulate[:, 0] = 0.0
        finish, update, coordinator = between(seconds.finish), between(seconds.update), self._coordinator[peers]
        return _Works(
            forward=forward,
            answer=answer,
            accumulate=accumulate,
            begin=coordinator + update,
            over=finish + coordinator,
            once=update + finish,
        )

    def _machines(self, peers: Indices, whole: Matrix, works: _Works, reaching: Matrix) -> Matrix:
        """What stages on one machine must compute, over its cores; it begins when the first microbatch reaches the first of
        them, but for their updates."""
        least = np.zeros(len(peers))
        crowd = self._crowd[peers]
        for machine in range(int(self._crowd.max(initial=-1)) + 1):
            share = np.where(crowd == machine, self._share[peers], 0.0)
            reached = np.where(crowd == machine, reaching, np.inf).min(axis=1)
            microbatches = (share * whole).sum(axis=1)
            after = np.where(np.isfinite(reached), reached + microbatches, 0.0)
            least = np.maximum(least, np.maximum(after, microbatches + (share * works.once).sum(axis=1)))
        return least

    def _links(self, peers: Indices, cuts: Indices) -> tuple[Matrix, Matrix, Matrix]:
        """Seconds there and back over each link, and how long one microbatch occupies it."""
        network = self._predictor.network
        one, other = peers[:, :-1], peers[:, 1:]
        there = self._forward_bytes[cuts] / network.rate[one, other]
        back = self._backward_bytes[cuts] / network.rate[other, one]
        return there + network.latency[one, other], back + network.latency[other, one], np.maximum(there, back)
