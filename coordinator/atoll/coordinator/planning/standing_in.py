"""Who takes the place of a peer that was lost: the plan that changes least, found at once. Pure and deterministic.

Theory of operation. A search for the best plan takes a second and more, and after a loss nobody trains meanwhile. So the stages
stay as they are cut, every peer that is still here keeps its own, and each stage without a peer goes to one that was left over:
a handful of layouts, bounded from below, of which the most promising are simulated. Each is judged by the steps to come and by
what the newcomers have yet to fetch. What is better beyond that is found later, beside training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, permutations

from atoll.coordinator.planning.bounds import LowerBounds
from atoll.coordinator.planning.in_flight import FEW_FACTORS, quickest
from atoll.coordinator.planning.layouts import Layout
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
    if len(current.peers) > len(current.stages):
        return None  # those that share a stage with the lost one have its state: a search finds what to do with them
    situation = situation_of(request)
    predictor = predictor_of(situation, frozenset(current.peers))
    empty = _empty_stages(predictor, current)

    def waiting(layout: Layout) -> float:
        newcomers = ((StageIndex(stage), predictor.peers[layout.peers[stage]].name) for stage in empty)
        return max((fetch_seconds(stage, peer) for stage, peer in newcomers), default=0.0)

    layouts = [layout for layout in islice(_candidates(predictor, current, empty), CONSIDERED) if predictor.fits(layout)]
    bounded = [(JUDGED_STEPS * bound + waiting(layout), layout) for bound, layout in LowerBounds(predictor).of(layouts)]
    found = [quickest(predictor, layout, FEW_FACTORS) for _, layout in sorted(bounded)[:SIMULATED]]
    if not found:
        return None
    best = min(found, key=lambda tuned: (JUDGED_STEPS * tuned.step_seconds + waiting(tuned.layout), tuned.layout))
    if best.step_seconds > max(TIMES_LONGER * current.step_seconds, SEARCH_SECONDS):
        return None
    return describe(situation, predictor, best.layout, best.in_flight)


def _empty_stages(predictor: Predictor, current: Plan) -> tuple[int, ...]:
    here = {peer.name for peer in predictor.peers}
    return tuple(stage for stage, peer in enumerate(current.leaders) if peer not in here)


def _candidates(predictor: Predictor, current: Plan, empty: tuple[int, ...]) -> Iterator[Layout]:
    """Every way to fill the ``empty`` stages; where a peer cannot hold what lies between, it computes that anew."""
    places = {peer.name: index for index, peer in enumerate(predictor.peers)}
    whole = predictor.table.compute[0, :, 0, -1]
    unused = sorted((index for name, index in places.items() if name not in current.peers), key=lambda one: (whole[one], one))
    kept = Layout(
        peers=tuple(places.get(peer, -1) for peer in current.leaders),
        bounds=bounds_of(current, predictor.segments),
        recompute=tuple(stage.recompute for stage in current.stages),
    )
    for newcomers in permutations(unused, len(empty)):
        peers, recompute = list(kept.peers), list(kept.recompute)
        for stage, peer in zip(empty, newcomers, strict=True):
            first, end = kept.bounds[stage], kept.bounds[stage + 1]
            peers[stage] = peer
            recompute[stage] = recompute[stage] or not predictor.possible(peer, first, end, anew=False)
        yield replace(kept, peers=tuple(peers), recompute=tuple(recompute))
