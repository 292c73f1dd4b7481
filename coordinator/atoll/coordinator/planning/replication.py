"""Which stages get which replicas: a local search over groups of peers, from several kinds of starting points.

Theory. A peer more at a stage makes it faster, lets it take over segments from its neighbours, and costs the summing of
gradients at each step's end. What that is worth follows from speeds and the network alone, so nothing is decided by rule:
groups of peers are cut by the dynamic programme for groups, the most promising are simulated, and small changes follow for as
long as one helps. It starts from the best pipelines without replicas, each filled with spares where it is slowest; from all
peers in few stages, peers with good links side by side; and, where peers are few, from every grouping.

Deterministic; effort is counted in array elements and simulated works.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from atoll.coordinator.planning.group_changes import Groups, changed_groups, chunks, every_grouping
from atoll.coordinator.planning.group_cuts import Estimated, GroupCuts
from atoll.coordinator.planning.in_flight import FACTORS, FEW_FACTORS, Tuned, quickest, refine
from atoll.coordinator.planning.judging import Judge
from atoll.coordinator.planning.layouts import Layout, with_groups
from atoll.coordinator.planning.order import bottleneck_path, pair_seconds
from atoll.coordinator.planning.prediction import Predictor

EVERY_GROUPING_UP_TO = 4
"""So few peers are tried in every grouping."""
CUTTING_ELEMENTS = 2e8
"""Array elements that the dynamic programmes may touch; about a second."""
SIMULATING_WORKS = 3e5
"""Forward and backward passes that may be simulated; about two seconds."""
REFINING_WORKS = 4e4
_COUNTS = 10
_SIMULATED = 40
_IMPROVED = 3
_TRIED = 20
_TUNED = 12
_NEWCOMERS = 6
_FIXED_WORKS = 40


def replicate(
    predictor: Predictor, bases: Sequence[Layout], start: Layout | None, judge: Judge, num_stages: int | None
) -> Tuned | None:
    """The best layout found from ``bases`` on, which have no replicas, and ``start``; None when there is none that is
    possible."""
    return _Replication(predictor, bases, start, judge, num_stages).run()


class _Replication:
    def __init__(
        self, predictor: Predictor, bases: Sequence[Layout], start: Layout | None, judge: Judge, num_stages: int | None
    ) -> None:
        self._predictor = predictor
        self._bases = bases
        self._start = start
        self._judge = judge
        self._num_stages = num_stages
        self._most = predictor.constraints.num_replicas
        self._cuts = GroupCuts(predictor)
        self._cut: dict[Groups, Estimated | None] = {}
        self._considered: dict[Layout, Estimated] = {}
        self._simulated: dict[Layout, Tuned] = {}
        self._tuned: set[Layout] = set()
        self._elements_left = CUTTING_ELEMENTS
        self._works_left = SIMULATING_WORKS
        whole = np.maximum(predictor.seconds.all_works[:, -1], 1e-12)
        self._speed = 1.0 / whole
        self._by_speed = tuple(int(peer) for peer in np.argsort(whole, kind="stable"))
        self._generator = np.random.default_rng(0)

    def run(self) -> Tuned | None:
        for layout in (*self._bases, *([self._start] if self._start is not None else [])):
            self._simulate(layout)
        for groups in self._seeds():
            self._estimated(groups)
        promising = sorted(
            self._considered.values(),
            key=lambda found: (self._judge(found.step_seconds, found.layout), found.layout),
        )
        for found in promising[:_SIMULATED]:
            self._simulate(found.layout)
        self._tune_best()
        starts = self._best(_IMPROVED)
        if self._start in self._simulated:
            starts = [self._simulated[self._start], *starts]
        for tuned in starts:
            self._improve(tuned)
        self._tune_best()
        best = self._best(1)
        if not best:
            return None
        return refine(self._predictor, best[0], int(REFINING_WORKS / self._works(best[0].layout, 0)))

    def _seeds(self) -> Iterable[Groups]:
        peers, segments = len(self._predictor.peers), self._predictor.segments
        most_stages = min(segments.num_segments, peers)
        if peers <= EVERY_GROUPING_UP_TO:
            yield from (groups for groups in every_grouping(tuple(range(peers)), most_stages) if self._wanted(groups))
        for layout in self._bases:
            yield from self._filled(layout)
        inner = slice(1, -1)
        there, back = (
            float(np.median(values[inner] or (0.0,))) for values in (segments.forward_bytes, segments.backward_bytes)
        )
        path = bottleneck_path(pair_seconds(self._predictor.network, there, back))
        counts = range(1, most_stages + 1) if self._num_stages is None else [self._num_stages]
        for count in _some(list(counts), _COUNTS):
            groups = chunks(path, (float(self._speed[peer]) for peer in path), count)
            yield from (turned for turned in (groups, groups[::-1]) if self._wanted(turned))

    def _wanted(self, groups: Groups) -> bool:
        return (self._num_stages in (None, len(groups))) and (
            self._most is None or all(len(group) <= self._most for group in groups)
        )

    def _filled(self, layout: Layout) -> Iterable[Groups]:
        """The layout's groups with one spare after the other, each where the pipeline is slowest and a place is left."""
        groups = layout.groups
        spares = [peer for peer in self._by_speed if peer not in layout.seats]
        bounds, anew = layout.bounds, layout.recompute
        slowness = [
            float(self._predictor.table.compute[int(anew[stage]), group[0], bounds[stage], bounds[stage + 1]])
            for stage, group in enumerate(groups)
        ]
        load = [seconds * float(self._speed[group[0]]) for seconds, group in zip(slowness, groups, strict=True)]
        full: set[int] = set()
        while spares and len(full) < len(groups):
            stage = max(
                (stage for stage in range(len(groups)) if stage not in full),
                key=lambda stage: (load[stage] / sum(float(self._speed[peer]) for peer in groups[stage]), -stage),
            )
            place = layout.bounds[stage], layout.bounds[stage + 1], layout.recompute[stage]
            able = [peer for peer in spares if self._predictor.possible(peer, *place, alone=False)]
            if not able or (self._most is not None and len(groups[stage]) >= self._most):
                full.add(stage)
                continue
            spares.remove(able[0])
            groups = (*groups[:stage], (*groups[stage], able[0]), *groups[stage + 1 :])
            # As it is cut now: where the dynamic programme would have it depends on estimates.
            self._consider(with_groups(groups, layout.bounds, layout.recompute))
            yield groups

    def _consider(self, layout: Layout) -> None:
        seconds = self._cuts.estimate(layout)
        if math.isfinite(seconds):
            self._considered[layout] = Estimated(layout=layout, step_seconds=seconds)

    def _estimated(self, groups: Groups) -> Estimated | None:
        """The groups, cut; None where that is not possible or the effort is spent."""
        if groups not in self._cut:
            positions = self._predictor.table.num_positions
            self._elements_left -= 6.0 * len(groups) * (positions**2 + 200)
            found = self._cut[groups] = self._cuts.cut(groups) if self._elements_left > 0 else None
            if found is not None:
                self._considered[found.layout] = found
        return self._cut[groups]

    def _simulate(self, layout: Layout) -> Tuned | None:
        if layout not in self._simulated:
            if self._works_left <= 0 or not self._predictor.fits(layout):
                return None
            self._works_left -= self._works(layout, len(FEW_FACTORS))
            self._simulated[layout] = quickest(self._predictor, layout, FEW_FACTORS)
        return self._simulated[layout]

    def _works(self, layout: Layout, factors: int) -> float:
        sums = sum(len(group) * (len(group) - 1) for group in layout.groups)
        microbatches = self._predictor.constraints.num_microbatches
        return (2 * layout.num_stages * microbatches + 4 * sums + _FIXED_WORKS) * (factors + 1)

    def _rank(self, tuned: Tuned) -> tuple[float, Layout]:
        return self._judge(tuned.step_seconds, tuned.layout), tuned.layout

    def _best(self, count: int) -> list[Tuned]:
        return sorted(self._simulated.values(), key=self._rank)[:count]

    def _tune_best(self) -> None:
        """More numbers of microbatches in flight for the best layouts."""
        for tuned in self._best(_TUNED):
            if tuned.layout not in self._tuned and self._works_left > 0:
                self._tuned.add(tuned.layout)
                self._works_left -= self._works(tuned.layout, len(FACTORS))
                self._simulated[tuned.layout] = quickest(self._predictor, tuned.layout, FACTORS)

    def _improve(self, found: Tuned) -> None:
        """Small changes for as long as one of them helps."""
        while self._works_left > 0:
            better = self._best_change(found)
            if better is None:
                break
            found = better

    def _best_change(self, found: Tuned) -> Tuned | None:
        limit = self._judge(found.step_seconds, found.layout)
        near = sorted(
            (self._judge(estimated.step_seconds, estimated.layout), estimated.layout) for estimated in self._near(found.layout)
        )
        tried = [tuned for _, layout in near[:_TRIED] if (tuned := self._simulate(layout)) is not None]
        best = min(tried, key=self._rank, default=None)
        return best if best is not None and self._rank(best)[0] < limit * (1.0 - 1e-6) else None

    def _near(self, layout: Layout) -> list[Estimated]:
        groups = layout.groups
        spares = tuple(peer for peer in self._by_speed if peer not in layout.seats)[:_NEWCOMERS]
        fixed = self._num_stages is not None
        positions = self._predictor.table.num_positions
        limit = max(40, int(1e7 / (6.0 * len(groups) * (positions**2 + 200))))
        changes = list(dict.fromkeys(changed_groups(groups, spares, fixed_count=fixed, most=self._most)))
        if len(changes) > limit:
            chosen = np.sort(self._generator.choice(len(changes), size=limit, replace=False))
            changes = [changes[int(index)] for index in chosen]
        found = [self._estimated(changed) for changed in (groups, *changes)]
        return [one for one in found if one is not None] + list(self._shifted(layout))

    def _shifted(self, layout: Layout) -> Iterable[Estimated]:
        """The same groups with one cut moved."""
        bounds = layout.bounds
        for cut in range(1, layout.num_stages):
            for shift in (-2, -1, 1, 2):
                moved = (*bounds[:cut], bounds[cut] + shift, *bounds[cut + 1 :])
                if moved[cut - 1] < moved[cut] < moved[cut + 1]:
                    changed = Layout(layout.peers, moved, layout.recompute, layout.helpers)
                    seconds = self._cuts.estimate(changed)
                    if math.isfinite(seconds):
                        yield Estimated(layout=changed, step_seconds=seconds)


def _some(values: Sequence[int], count: int) -> list[int]:
    """At most ``count``, the small ones closer together."""
    if len(values) <= count:
        return list(values)
    places = np.unique(np.geomspace(1, len(values), count).round().astype(int)) - 1
    return [values[int(place)] for place in places]
