"""The plan in which the job file says which peers have each stage. Pure.

What is left to decide is where to cut: so that the slowest stage, whose replicas share its microbatches, is as fast as can be.
Replicas get microbatches in turn, whatever their speed: a run whose plan was written down does the same sums every time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from atoll.coordinator.planning.dealing import deal
from atoll.coordinator.planning.layouts import Layout
from atoll.coordinator.planning.plan import Plan, StagePlan
from atoll.coordinator.planning.planner import PlanRequest, as_plan, describe, predictor_of, situation_of
from atoll.coordinator.planning.prediction import Predictor
from atoll.protocol.errors import PlacementError
from atoll.protocol.ids import PeerId


def pinned_plan(request: PlanRequest, stages: Sequence[Sequence[str]]) -> Plan:
    """Each of ``stages`` on those of its peers that are here. Raises PlacementError where one has none or does not fit them."""
    present = {peer.name: peer for peer in request.peers}
    here = [tuple(PeerId(name) for name in replicas if name in present) for replicas in stages]
    for number, (wanted, replicas) in enumerate(zip(stages, here, strict=True)):
        if not replicas:
            raise PlacementError(f"plan.pin gives stage {number} to {', '.join(wanted)}: none of them is here; start one")
        if len(replicas) > request.constraints.num_microbatches:
            few = f"a step has {request.constraints.num_microbatches} microbatches, too few for {len(replicas)} replicas"
            raise PlacementError(f"stage {number}: {few}; make training.microbatch smaller", hopeless=True)
    leaders = tuple(present[replicas[0]] for replicas in here)
    situation = situation_of(dataclasses.replace(request, peers=leaders))
    predictor = predictor_of(situation)
    layout = _cut(predictor, here)
    num_microbatches = request.constraints.num_microbatches
    in_flight = tuple(min(most, num_microbatches) for most in predictor.most_in_flight(layout))
    plan = as_plan(describe(situation, predictor, layout, in_flight), request.segments)
    pinned = tuple(_shared(stage, replicas, num_microbatches) for stage, replicas in zip(plan.stages, here, strict=True))
    taken = {name for replicas in here for name in replicas}
    spares = tuple(peer.name for peer in request.peers if peer.name not in taken)
    why = tuple((name, "plan.pin gives it no stage") for name in spares)
    return dataclasses.replace(plan, stages=pinned, spares=spares, why_spare=why)


def _shared(stage: StagePlan, replicas: tuple[PeerId, ...], num_microbatches: int) -> StagePlan:
    """``stage``, as it is on its leader alone, with all replicas: each computes for its part of the microbatches."""
    dealt = deal([1.0] * len(replicas), num_microbatches)
    part = dealt.count(0) / num_microbatches
    return dataclasses.replace(stage, replicas=replicas, deal=dealt, step_compute_seconds=part * stage.step_compute_seconds)


def _cut(predictor: Predictor, here: Sequence[tuple[PeerId, ...]]) -> Layout:
    """By dynamic programming over stages and positions."""
    places = {peer.name: index for index, peer in enumerate(predictor.peers)}
    owners = [places[replicas[0]] for replicas in here]
    count = predictor.table.num_positions
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for owner, replicas in zip(owners, here, strict=True):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first, (slowest, bounds) in best.items():
            for end in range(first + 1, count):
                if not predictor.possible(owner, first, end, False):
                    continue
                pace = max(slowest, predictor.table.compute.item(0, owner, first, end) / len(replicas))
                if pace < following.get(end, (math.inf, ()))[0]:
                    following[end] = pace, (*bounds, end)
        best = following
    if count - 1 not in best:
        raise PlacementError(f"the model cannot be cut into the {len(here)} stages of plan.pin within its peers' memory")
    return Layout(tuple(owners), best[count - 1][1], (False,) * len(owners))
