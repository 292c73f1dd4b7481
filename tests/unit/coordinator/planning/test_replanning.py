"""Keep the plan or move: what the present one is worth, what moving costs, and when that pays."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from atoll.coordinator.planning.costs import Constraints
from atoll.coordinator.planning.plan import Plan
from atoll.coordinator.planning.planner import PlanRequest, as_plan, plan_placement
from atoll.coordinator.planning.replanning import MoveCost, replan
from atoll.coordinator.planning.segments import state_copies
from atoll.protocol.errors import PlacementError
from atoll.protocol.ids import PeerId
from atoll.protocol.quantities import format_seconds
from support.planning import equal_segments, network_of, peers_of

SEGMENTS = equal_segments(12, flops=1e9, crossing=1e4, weights=2e6)
COST = MoveCost(state_copies=3, restart_seconds=2.0)


def request_for(speeds: list[float], *, memory: list[float] | None = None, rate: float = 1e8) -> PlanRequest:
    peers = peers_of(speeds, memory)
    network = network_of([peer.name for peer in peers], rate)
    return PlanRequest(segments=SEGMENTS, peers=peers, network=network, constraints=Constraints(num_microbatches=16))


def plan_for(request: PlanRequest) -> Plan:
    return as_plan(plan_placement(request), SEGMENTS)


def test_a_plan_that_is_still_good_is_kept() -> None:
    request = request_for([1e9] * 3)
    current = plan_for(request)
    answer = replan(request, current, cost=COST, steps_left=1000)
    assert not answer.move
    assert (answer.moves, answer.move_seconds) == ((), 0.0)
    assert answer.planned.step_seconds == pytest.approx(current.step_seconds, rel=0.005)
    assert as_plan(answer.planned, SEGMENTS).stages == current.stages
    assert "no other plan is noticeably faster" in answer.reason


def test_work_moves_away_from_a_peer_that_became_slow() -> None:
    """Row 28: ten times slower in the middle of a run."""
    current = plan_for(request_for([1e9] * 3))
    slow = request_for([1e9, 0.1e9, 1e9])
    answer = replan(slow, current, cost=COST, steps_left=100)
    assert answer.move
    assert answer.planned.step_seconds < 2.0 * current.step_seconds, "as it is, it would be ten times as long"
    assert f"{format_seconds(answer.planned.step_seconds)} a step instead of" in answer.reason
    assert f"after a move of {format_seconds(answer.move_seconds)}; 100 steps are left" in answer.reason
    assert all(move.target != "peer-01" for move in answer.moves)
    held = {stage.leader: stage.end - stage.first for stage in current.stages}
    assert sum(move.num_bytes for move in answer.moves if move.source == "peer-01") <= held[PeerId("peer-01")] // 10 * 3 * 2e6


def test_near_the_end_a_move_does_not_pay() -> None:
    current = plan_for(request_for([1e9] * 3))
    slow = request_for([1e9, 0.5e9, 1e9])
    costly = dataclasses.replace(COST, restart_seconds=1000.0)
    answer = replan(slow, current, cost=costly, steps_left=2)
    assert not answer.move
    assert (answer.moves, answer.move_seconds) == ((), 0.0)
    assert [stage.peer for stage in answer.planned.seats] == list(current.peers)
    assert replan(slow, current, cost=costly, steps_left=1000).move


def test_moving_takes_the_time_of_the_slowest_transfer() -> None:
    """Two megabytes of weights a segment, three copies of state, over links of 1 MB/s that do not disturb one another."""
    current = plan_for(request_for([1e9, 1e9]))
    answer = replan(request_for([1e9, 0.6e9], rate=1e6), current, cost=COST, steps_left=10_000)
    assert answer.move
    assert all(move.num_bytes % 6e6 == 0.0 for move in answer.moves)
    assert answer.move_seconds == pytest.approx(2.0 + max(move.num_bytes for move in answer.moves) / 1e6)


def test_transfers_of_one_peer_share_its_line() -> None:
    current = plan_for(request_for([1e9]))
    request = request_for([0.1e9, 1e9, 1e9], rate=1e8)
    request = dataclasses.replace(
        request, network=network_of([peer.name for peer in request.peers], 1e8, upload=np.array([2e6, np.inf, np.inf]))
    )
    answer = replan(request, current, cost=COST, steps_left=10_000)
    assert {move.source for move in answer.moves} == {"peer-00"}
    assert len(answer.moves) == 2
    assert answer.move_seconds == pytest.approx(2.0 + sum(move.num_bytes for move in answer.moves) / 2e6)


def test_of_plans_of_equal_speed_the_one_that_moves_nothing_wins() -> None:
    """All peers are alike, so any order is as good; the present one is kept whatever the search would have found."""
    request = request_for([1e9] * 4)
    current = plan_for(request)
    turned = dataclasses.replace(
        current,
        stages=tuple(
            dataclasses.replace(stage, replicas=other.replicas)
            for stage, other in zip(current.stages, reversed(current.stages), strict=True)
        ),
    )
    answer = replan(request, turned, cost=COST, steps_left=10**6)
    assert not answer.move
    assert [stage.peer for stage in answer.planned.seats] == list(turned.peers)


def test_a_peer_whose_memory_became_smaller_makes_the_run_move() -> None:
    """Row 27: after an out-of-memory the peer may use less, and the plan must go, whatever it costs."""
    current = plan_for(request_for([1e9] * 3))
    need = max(stage.memory_bytes for stage in current.stages)
    less = request_for([1e9] * 3, memory=[0.8 * need, 1e12, 1e12])
    answer = replan(less, current, cost=COST, steps_left=1)
    assert answer.move
    assert "the present plan is not possible any more: stage" in answer.reason
    assert "peer-00 can give" in answer.reason


def test_a_peer_that_left_has_nothing_to_give() -> None:
    current = plan_for(request_for([1e9] * 3))
    rest = dataclasses.replace(request_for([1e9] * 3), peers=peers_of([1e9, 1e9]))
    answer = replan(rest, current, cost=COST, steps_left=5)
    assert answer.move
    assert answer.reason == "the present plan is not possible any more: peer-02 left"
    assert {move.source for move in answer.moves} >= {None}


def test_nothing_fits_any_more() -> None:
    current = plan_for(request_for([1e9] * 2))
    with pytest.raises(PlacementError, match="the model does not fit"):
        replan(request_for([1e9] * 2, memory=[1e7, 1e7]), current, cost=COST, steps_left=5)


def test_the_order_of_the_peers_changes_nothing() -> None:
    current = plan_for(request_for([1e9] * 4))
    request = request_for([1e9, 0.2e9, 1e9, 1e9])
    turned = dataclasses.replace(request, peers=tuple(reversed(request.peers)))
    one, other = (replan(each, current, cost=COST, steps_left=50) for each in (request, turned))
    assert (one.move, one.planned.seats, one.moves, one.move_seconds, one.reason) == (
        other.move,
        other.planned.seats,
        other.moves,
        other.move_seconds,
        other.reason,
    )


def test_state_is_weights_and_moments() -> None:
    assert [state_copies("adamw", 0.0), state_copies("sgd", 0.9), state_copies("sgd", 0.0)] == [3, 2, 1]
