"""A time that no simulation of a layout undercuts, so that a search may pass over most layouts without simulating them.

A microbatch that reaches a stage has passed all stages before, and its gradient has to pass them again: the *lead*. Between
the two, the stage computes all microbatches one after another, its links carry them one after another, and at most K of
them are in the loop through the later stages at any time. Many layouts of the same number of stages are bounded at once.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from atoll.coordinator.planning.cuts import Indices, Layout
from atoll.coordinator.planning.network import Matrix
from atoll.coordinator.planning.prediction import ACCUMULATE_SHARE, Predictor


class LowerBounds:
    """Lower bounds on the steps of layouts; infinite where a stage does not fit."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._overhead = np.array([peer.overhead_seconds for peer in predictor.peers])
        ratio = min(codec.ratio for codec in predictor.constraints.codecs)
        self._forward_bytes = ratio * np.asarray(predictor.segments.forward_bytes)
        self._backward_bytes = ratio * np.asarray(predictor.segments.backward_bytes)
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
        seconds, overhead = self._predictor.seconds, self._overhead[peers]
        forward = seconds.forward[peers, end] - seconds.forward[peers, first] + overhead
        backward = seconds.backward[peers, end] - seconds.backward[peers, first] + overhead
        accumulate = backward * ACCUMULATE_SHARE
        accumulate[:, 0] = 0.0
        answer = backward - accumulate + forward * recompute
        held = table.held[recompute, peers, first, end]
        fits = ((held >= 1.0) & np.isfinite(table.compute[recompute, peers, first, end])).all(axis=1)
        there, back, wire = self._links(peers, end[:, :-1])
        reaching = np.cumsum(forward[:, :-1] + there, axis=1)
        passing = forward + answer
        passing[:, :-1] += there + back
        loop = np.cumsum(passing[:, ::-1], axis=1)[:, ::-1]
        lead = loop[:, :1] - loop
        count = constraints.num_microbatches
        rounds = np.floor((count - 1) / np.maximum(held, 1.0))
        waits = count * (forward + answer), rounds * (loop + accumulate) + loop
        least = (lead + np.maximum(*waits)).max(axis=1)
        # Gradients of weights may all wait until the last gradient has left, but then they take their time.
        whole = count * (forward + answer + accumulate)
        whole[:, 1:] += reaching
        least = np.maximum(least, whole.max(axis=1))
        if wire.shape[1]:
            least = np.maximum(least, (loop[:, :1] + (count - 1) * wire).max(axis=1))
        return np.where(fits, least * (1.0 - 1e-9) + constraints.commit_seconds, np.inf)

    def _links(self, peers: Indices, cuts: Indices) -> tuple[Matrix, Matrix, Matrix]:
        """Seconds there and back over each link, and how long one microbatch occupies it."""
        network = self._predictor.network
        one, other = peers[:, :-1], peers[:, 1:]
        there = self._forward_bytes[cuts] / network.rate[one, other]
        back = self._backward_bytes[cuts] / network.rate[other, one]
        return there + network.latency[one, other], back + network.latency[other, one], np.maximum(there, back)
