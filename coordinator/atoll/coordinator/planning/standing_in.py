"""Who takes the place of a peer that was lost: the plan that changes least, found at once. Pure and deterministic.

Theory of operation. A search for the best plan takes a second and more, and after a loss nobody trains meanwhile. So the stages
stay as they are cut, every peer that is still here keeps its own, and each stage without a peer goes to one that was left over,
or to the replica of another stage: a handful of layouts, of which the most promising are simulated. Each is judged by the steps
to come and by what the newcomers have yet to fetch. What is better beyond that is found later, beside training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, permutations

from atoll.coordinator.planning.bounds import LowerBounds
from atoll.coordinator.planning.in_flight import FEW_FACTORS, quickest
from atoll.coordinator.planning.layouts import Layout, layout_pace, with_groups
from atoll.coordinator.planning.plan import Plan
from atoll.coordinator.planning.planner import Planned, PlanRequest, describe, predictor_of, situation_of
from atoll.coordinator.planning.prediction import Predictor
from atoll.coordinator.planning.replanning import bounds_of
from atoll.protocol.ids import PeerId, StageIndex

CONSIDERED = 200
"""Ways to fill the empty stages that are looked at, those with the fastest peers first."""
SIMULATED = 6
JUDGED_STEPS = 10
"""For how long such a plan is expected to be in force: fetching must pay within so many steps."""
TIMES_LONGER = 3.0
"""A step so many times longer than under the plan before is worth a search instead, which may cut anew."""
SEARCH_SECONDS = 2.0
"""What a search takes, a guess: a step below that is never worth one."""

FetchSeconds = Callable[[StageIndex, PeerId], float]
"""What a peer has yet to fetch before it can take over a stage."""


def stand_in(request: PlanRequest, current: Plan, fetch_seconds: FetchSeconds) -> Planned | None:
    """``current`` with its missing peers replaced; None when nobody can take their place, or only far too slowly. Raises
    PlacementError for names that are wrong."""
    situation = situation_of(request)
    predictor = predictor_of(situation, frozenset(current.peers))
    groups = _groups(predictor, current)
    empty = tuple(stage for stage, group in enumerate(groups) if not group)

    def waiting(layout: Layout) -> float:
        newcomers = ((StageIndex(stage), predictor.peers[layout.peers[stage]].name) for stage in empty)
        return max((fetch_seconds(stage, peer) for stage, peer in newcomers), default=0.0)

    layouts = [layout for layout in islice(_candidates(predictor, current, groups), CONSIDERED) if predictor.fits(layout)]
    estimated = [(JUDGED_STEPS * seconds + waiting(layout), layout) for seconds, layout in _estimated(predictor, layouts)]
    found = [quickest(predictor, layout, FEW_FACTORS) for _, layout in sorted(estimated)[:SIMULATED]]
    if not found:
        return None
    best = min(found, key=lambda tuned: (JUDGED_STEPS * tuned.step_seconds + waiting(tuned.layout), tuned.layout))
    if best.step_seconds > max(TIMES_LONGER * current.step_seconds, SEARCH_SECONDS):
        return None
    return describe(situation, predictor, best.layout, best.in_flight)


def _groups(predictor: Predictor, current: Plan) -> tuple[tuple[int, ...], ...]:
    """Those of each stage's replicas that are here."""
    places = {peer.name: index for index, peer in enumerate(predictor.peers)}
    return tuple(tuple(places[peer] for peer in stage.replicas if peer in places) for stage in current.stages)


def _estimated(predictor: Predictor, layouts: Sequence[Layout]) -> list[tuple[float, Layout]]:
    """About how long a step takes: bounded from below without replicas, with them by the pace of the slowest stage."""
    if not any(layout.helpers for layout in layouts):
        return LowerBounds(predictor).of(layouts)
    count = predictor.constraints.num_microbatches
    return [(count * layout_pace(predictor.table, layout), layout) for layout in layouts]


def _candidates(predictor: Predictor, current: Plan, groups: Sequence[tuple[int, ...]]) -> Iterator[Layout]:
    """Every way to fill the stages whose group is empty, with peers that were left over, and where these are too few with
    replicas that others can do without. Where a peer cannot hold what lies between, it computes that anew."""
    held = {peer for group in groups for peer in group}
    whole = predictor.table.compute[0, :, 0, -1]
    unused = sorted(set(range(len(predictor.peers))) - held, key=lambda one: (whole[one], one))
    empty = [stage for stage, group in enumerate(groups) if not group]
    spared = [peer for group in groups for peer in group[1:]] if len(unused) < len(empty) else []
    bounds = bounds_of(current, predictor.segments)
    for newcomers in permutations((*unused, *spared), len(empty)):
        filled = [tuple(peer for peer in group if peer not in newcomers) for group in groups]
        recompute = [stage.recompute for stage in current.stages]
        for stage, peer in zip(empty, newcomers, strict=True):
            filled[stage] = (peer,)
            recompute[stage] = recompute[stage] or not predictor.possible(peer, bounds[stage], bounds[stage + 1], anew=False)
        yield with_groups(tuple(filled), bounds, tuple(recompute))
