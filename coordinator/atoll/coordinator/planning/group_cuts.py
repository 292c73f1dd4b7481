"""Where to cut when groups of peers hold the stages: the dynamic programme of ``cuts`` for one order of groups.

Theory. Replicas that get microbatches in proportion to their speeds do one in ``1 / sum(1 / c)`` seconds, where ``c`` is what
each takes. A few microbatches, which cannot be split, take a little more: the least time in which all of a step's are done,
over their number. A group holds as many microbatches in flight as its members do together. What is estimated of a step of m
microbatches at pace T is loop + (m - 1) T, and what replicas take to sum their gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from atoll.coordinator.planning.layouts import Layout, with_groups
from atoll.coordinator.planning.network import Matrix
from atoll.coordinator.planning.prediction import Predictor

Group = tuple[int, ...]

_PACES = (1.0, 1.04, 1.12, 1.3, 1.7, 3.0, 10.0)
"""Multiples of the least pace that are tried: a slower one lets a shorter loop, or one that memory holds."""
_MOST_ELEMENTS = 8e6
"""Array elements that are remembered, of all groups together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """A layout and about how long its step takes."""

    layout: Layout
    step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Together:
    """A group as one: by recomputing, first and end position. ``pace`` is the time for a microbatch when all work, infinite
    where it is not possible, ``passing`` for one to pass, ``held`` how many fit, infinite for all. ``parts`` of the
    microbatches go to its members; a byte of gradients takes ``sum_seconds``, their delays ``sum_latency``."""

    pace: Matrix
    passing: Matrix
    held: Matrix
    parts: tuple[float, ...]
    sum_seconds: float
    sum_latency: float


class GroupCuts:
    """Cuts for groups; remembers what it worked out of each."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        table = predictor.table
        with np.errstate(divide="ignore"):
            self._speed = 1.0 / np.maximum(np.maximum(table.compute, table.line[None]), 1e-12)
        self._whole = np.maximum(predictor.seconds.all_works[:, -1], 1e-12)
        self._together: dict[Group, _Together | None] = {}
        self._edges: dict[tuple[Group, Group], tuple[Matrix, Matrix]] = {}
        self._rows = np.arange(table.num_positions)
        self._parameters = np.asarray(predictor.segments.parameter_bytes)

    def cut(self, groups: tuple[Group, ...]) -> Estimated | None:
        """The best cuts for ``groups`` in that order, None where there are none."""
        together = self._all(groups)
        if together is None:
            return None
        edges = [self._edge(one, other) for one, other in pairwise(groups)]
        least = self._least_pace(together, edges)
        if not math.isfinite(least):
            return None
        best: Estimated | None = None
        for factor in _PACES:
            found = self._at_pace(groups, together, edges, least * factor)
            if found is not None and (best is None or found.step_seconds < best.step_seconds):
                best = found
            elif best is not None:
                break
        return best

    def estimate(self, layout: Layout) -> float:
        """About how long a step of ``layout`` takes, infinite where it is not possible."""
        groups = layout.groups
        stages = self._all(groups)
        if stages is None:
            return math.inf
        count = self._predictor.table.num_microbatches
        pace, loop, summing = 0.0, 0.0, 0.0
        for number, stage in enumerate(stages):
            place = int(layout.recompute[number]), layout.bounds[number], layout.bounds[number + 1]
            pace, loop = max(pace, stage.pace.item(*place)), loop + stage.passing.item(*place)
            summing = max(summing, self._summing(stage, *place[1:]))
            if number + 1 < len(groups):
                seconds, periods = self._edge(groups[number], groups[number + 1])
                pace = max(pace, float(periods[:, place[2]].min()))
                loop += float(seconds[:, place[2]].min())
        return loop + (count - 1) * pace + summing

    def _all(self, groups: tuple[Group, ...]) -> list[_Together] | None:
        """Of each group, None where one of them is not possible."""
        stages = [stage for group in groups if (stage := self._of(group)) is not None]
        return stages if len(stages) == len(groups) else None

    def _summing(self, stage: _Together, first: int, end: int) -> float:
        return stage.sum_seconds * float(self._parameters[end] - self._parameters[first]) + stage.sum_latency

    def _least_pace(self, stages: list[_Together], edges: list[tuple[Matrix, Matrix]]) -> float:
        """The least pace that any cuts allow, whatever is in flight."""
        rest = np.full(len(self._rows), np.inf)
        rest[-1] = 0.0
        for number in range(len(stages) - 1, -1, -1):
            slowest = np.maximum(stages[number].pace.min(axis=0), rest[None, :]).min(axis=1)
            if number:
                rest = np.maximum(slowest, edges[number - 1][1].min(axis=0))
        return float(slowest[0])

    def _at_pace(
        self, groups: tuple[Group, ...], stages: list[_Together], edges: list[tuple[Matrix, Matrix]], pace: float
    ) -> Estimated | None:
        limit = pace * (1.0 + 1e-9)
        rest = np.full(len(self._rows), np.inf)
        rest[-1] = 0.0
        codes = []
        for number in range(len(stages) - 1, -1, -1):
            stage = stages[number]
            total = stage.passing + rest
            total[(stage.pace > limit) | (total > stage.held * limit)] = np.inf
            both = total.transpose(1, 0, 2).reshape(len(self._rows), -1)
            code = both.argmin(axis=1)
            loops = both[self._rows, code]
            codes.append(code)
            if number:
                seconds, periods = edges[number - 1]
                kept = np.where(periods <= limit, seconds, np.inf)
                rest = kept[np.isfinite(kept).argmax(axis=0), self._rows] + loops
        if not math.isfinite(loops[0]):
            return None
        bounds, recompute, summing = [0], [], 0.0
        for stage, code in zip(stages, reversed(codes), strict=True):
            anew, end = divmod(int(code[bounds[-1]]), len(self._rows))
            summing = max(summing, self._summing(stage, bounds[-1], end))
            bounds.append(end)
            recompute.append(bool(anew))
        count = self._predictor.table.num_microbatches
        layout = with_groups(groups, tuple(bounds), tuple(recompute))
        return Estimated(layout=layout, step_seconds=float(loops[0]) + (count - 1) * pace + summing)

    def _of(self, group: Group) -> _Together | None:
        key = tuple(sorted(group)) if len(group) > 1 else group
        if key not in self._together:
            if len(self._together) * 6 * len(self._rows) ** 2 > _MOST_ELEMENTS:
                self._together.clear()
            self._together[key] = self._made(key)
        return self._together[key]

    def _made(self, group: Group) -> _Together | None:
        predictor, table, members = self._predictor, self._predictor.table, list(group)
        all_held = table.held if len(group) == 1 else predictor.replica_held
        count, speed = table.num_microbatches, self._speed[:, members]
        counts, rounding = _dealt(self._whole[members], count)
        if min(counts) == 0:
            return None
        held = all_held[:, members]
        possible = np.asarray(((held >= 1.0) & np.isfinite(table.compute[:, members])).all(axis=1))
        possible[1] &= (all_held[0, members] < count).any(axis=0)
        total = np.where(possible, speed.sum(axis=1), 1.0)
        together = held.sum(axis=1)
        parts = tuple(number / count for number in counts)
        passing = np.tensordot(table.compute[:, members].transpose(0, 2, 3, 1), np.asarray(parts), axes=1)
        return _Together(
            pace=np.where(possible, rounding / total, np.inf),
            passing=np.where(possible, passing, np.inf),
            held=np.where((held >= count).all(axis=1), np.inf, together),
            parts=parts,
            sum_seconds=self._sum_seconds(members),
            sum_latency=2.0 * float(predictor.network.latency[np.ix_(members, members)].max()),
        )

    def _sum_seconds(self, members: list[int]) -> float:
        """For a byte of gradients."""
        count, network = len(members), self._predictor.network
        if count == 1:
            return 0.0
        line = float(np.minimum(network.upload[members], network.download[members]).min())
        pair = float(network.rate[np.ix_(members, members)].min())
        return self._predictor.constraints.averaging.ratio * max(2.0 * (count - 1) / count / line, 2.0 / count / pair)

    def _edge(self, one: Group, other: Group) -> tuple[Matrix, Matrix]:
        """Seconds there and back, and for how long of each microbatch's time the busiest pair's link is occupied."""
        key = one, other
        if key not in self._edges:
            table, first, second = self._predictor.table, self._of(one), self._of(other)
            assert first is not None, "the groups are possible"
            assert second is not None, "the groups are possible"
            # Deals of equal numbers of equal replicas pair them; each pair then shares more than it would by chance.
            paired = math.gcd(len(one), len(other))
            weights = np.outer(self._ordered(one, first), self._ordered(other, second))
            most = np.minimum.outer(self._ordered(one, first), self._ordered(other, second))
            pairs = np.ix_(range(len(table.edge_seconds)), one, other, range(len(self._rows)))
            seconds = (table.edge_seconds[pairs] * weights[:, :, None]).sum(axis=(1, 2))
            periods = (table.edge_period[pairs] * np.minimum(weights * paired, most)[:, :, None]).max(axis=(1, 2))
            self._edges[key] = seconds, periods
        return self._edges[key]

    @staticmethod
    def _ordered(group: Group, together: _Together) -> Matrix:
        by_peer = dict(zip(sorted(group), together.parts, strict=True))
        return np.array([by_peer[peer] for peer in group])


def _dealt(seconds: Matrix, num_microbatches: int) -> tuple[list[int], float]:
    """How many microbatches each gets, and how many times longer all take than if microbatches could be split."""
    counts = [0] * len(seconds)
    for _ in range(num_microbatches):
        soonest = int(np.argmin((np.asarray(counts) + 1) * seconds))
        counts[soonest] += 1
    fluid = num_microbatches / float((1.0 / seconds).sum())
    return counts, max(1.0, float((np.asarray(counts) * seconds).max()) / fluid)
