"""Who takes the place of a lost peer: nobody else moves, and the newcomer is the one with which the run goes on soonest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.coordinator.planning.costs import Constraints
from atoll.coordinator.planning.plan import Plan
from atoll.coordinator.planning.planner import PlanRequest, as_plan, plan_placement
from atoll.coordinator.planning.standing_in import TIMES_LONGER, stand_in
from atoll.protocol.errors import PlacementError
from atoll.protocol.ids import PeerId, StageIndex
from support.planning import equal_segments, network_of, peers_of, random_request

SEGMENTS = equal_segments(12, flops=1e9, crossing=1e4, weights=2e6)


def request_for(speeds: list[float], *, stages: int = 3, memory: list[float] | None = None) -> PlanRequest:
    peers = peers_of(speeds, memory)
    network = network_of([peer.name for peer in peers], 1e8)
    constraints = Constraints(num_microbatches=16, num_stages=stages)
    return PlanRequest(segments=SEGMENTS, peers=peers, network=network, constraints=constraints)


def without(request: PlanRequest, *gone: str) -> PlanRequest:
    return replace(request, peers=tuple(peer for peer in request.peers if peer.name not in gone))


def nothing_to_fetch(_: StageIndex, __: PeerId) -> float:
    return 0.0


def plan_on(speeds: list[float], *extra: float) -> tuple[PlanRequest, Plan]:
    """A plan on as many peers as there are stages, before ``extra`` peers came."""
    plan = as_plan(plan_placement(request_for(speeds, stages=len(speeds))), SEGMENTS)
    return request_for([*speeds, *extra], stages=len(speeds)), plan


def test_the_fastest_peer_that_is_left_over_gets_the_empty_stage_and_nobody_else_moves() -> None:
    request, before = plan_on([1e9] * 3, 0.8e9, 1e9, 0.9e9)
    lost = before.peers[1]
    found = stand_in(without(request, lost), before, nothing_to_fetch)
    assert found is not None
    after = as_plan(found, SEGMENTS)
    assert after.peers == (before.peers[0], PeerId("peer-04"), before.peers[2])
    assert after.cuts == before.cuts
    assert set(after.spares) == {"peer-03", "peer-05"}
    assert after.step_seconds == pytest.approx(before.step_seconds, rel=0.01)


def test_of_two_that_are_equally_fast_the_one_that_has_the_state_already() -> None:
    request, before = plan_on([1e9] * 3, 1e9, 1e9)
    asked: list[tuple[StageIndex, PeerId]] = []

    def fetching(stage: StageIndex, peer: PeerId) -> float:
        asked.append((stage, peer))
        return 0.0 if peer == "peer-04" else 5.0

    found = stand_in(without(request, before.peers[2]), before, fetching)
    assert found is not None
    assert found.seats[2].peer == "peer-04"
    assert {stage for stage, _ in asked} == {2}, "whoever keeps its stage has it"


def test_two_lost_peers_are_replaced_at_once_and_a_third_is_one_too_many() -> None:
    request, before = plan_on([1e9] * 3, 1e9, 1e9)
    found = stand_in(without(request, before.peers[0], before.peers[2]), before, nothing_to_fetch)
    assert found is not None
    assert {stage.peer for stage in found.seats} == {before.peers[1], "peer-03", "peer-04"}
    assert found.seats[1].peer == before.peers[1]
    assert stand_in(without(request, *before.peers), before, nothing_to_fetch) is None


def test_whoever_has_too_little_memory_is_passed_over() -> None:
    _, before = plan_on([1e9] * 3)
    request = request_for([1e9] * 5, memory=[1e12, 1e12, 1e12, 1e5, 1e12])
    found = stand_in(without(request, before.peers[0]), before, nothing_to_fetch)
    assert found is not None
    assert found.seats[0].peer == "peer-04"
    nobody = request_for([1e9] * 4, memory=[1e12, 1e12, 1e12, 1e5])
    assert stand_in(without(nobody, before.peers[0]), before, nothing_to_fetch) is None


def test_with_nobody_missing_the_plan_stays_as_it_is() -> None:
    request, before = plan_on([1e9] * 3, 1e9)
    found = stand_in(request, before, nothing_to_fetch)
    assert found is not None
    assert as_plan(found, SEGMENTS).peers == before.peers


def test_one_that_is_far_too_slow_is_worth_a_search() -> None:
    request, before = plan_on([1e9] * 3, 0.05e9)
    assert before.step_seconds > 1.0
    assert stand_in(without(request, before.peers[1]), before, nothing_to_fetch) is None


def replicated(*extra: float) -> tuple[PlanRequest, Plan]:
    """Two stages of two replicas each, before ``extra`` peers came."""
    request = request_for([1e9] * 4, stages=2)
    request = replace(request, constraints=replace(request.constraints, num_replicas=2))
    plan = as_plan(plan_placement(request), SEGMENTS)
    assert [len(stage.replicas) for stage in plan.stages] == [2, 2]
    more = request_for([1e9] * 4 + list(extra), stages=2)
    return replace(more, constraints=request.constraints), plan


def test_a_stage_that_has_a_replica_left_needs_nobody() -> None:
    request, before = replicated(1e9)
    gone, stays = before.stages[0].replicas
    found = stand_in(without(request, gone), before, nothing_to_fetch)
    assert found is not None
    after = as_plan(found, SEGMENTS)
    assert [stage.replicas for stage in after.stages] == [(stays,), before.stages[1].replicas]
    assert after.spares == ("peer-04",)


def test_a_stage_that_lost_all_replicas_goes_to_a_spare_or_else_to_the_replica_of_another() -> None:
    request, before = replicated(1e9)
    gone, kept = before.stages[1].replicas, before.stages[0].replicas
    found = stand_in(without(request, *gone), before, nothing_to_fetch)
    assert found is not None
    assert [stage.replicas for stage in as_plan(found, SEGMENTS).stages] == [kept, ("peer-04",)]
    found = stand_in(without(request, *gone, "peer-04"), before, nothing_to_fetch)
    assert found is not None
    assert [stage.replicas for stage in as_plan(found, SEGMENTS).stages] == [kept[:1], kept[1:]]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_it_keeps_every_limit_and_is_the_same_in_any_order(seed: int) -> None:
    request = random_request(seed, num_peers=5, num_segments=5)
    try:
        before = as_plan(plan_placement(request), request.segments)
    except PlacementError:  # nothing fits: there is no plan to lose
        return
    rest = without(request, before.peers[0])
    found = stand_in(rest, before, nothing_to_fetch)
    mirrored = replace(rest, peers=rest.peers[::-1])
    again = stand_in(mirrored, before, nothing_to_fetch)
    assert (found is None) == (again is None)
    if found is None or again is None:
        return
    assert found.seats == again.seats
    memory = {peer.name: peer.memory_bytes for peer in rest.peers}
    assert all(stage.memory_bytes <= memory[stage.peer] for stage in found.seats)
    assert [stage.peer for stage in found.seats[1:]] == list(before.peers[1:])
    assert found.step_seconds <= max(TIMES_LONGER * before.step_seconds, 2.0)
