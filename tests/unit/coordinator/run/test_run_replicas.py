"""Several peers hold one stage: what the run makes of their reports, and of the loss of one of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.coordinator.events import MovedEvent, PlanEvent, RecoveredEvent, RestoredEvent, VoidEvent
from atoll.coordinator.run.events import PeerGone, PeersCompared, StageReported
from atoll.coordinator.run.instructions import Assign, MakePlan
from atoll.coordinator.run.schedule import LearningRateSchedule
from atoll.coordinator.run.states import RunSettings, RunState
from atoll.protocol.ids import PeerId
from support.simulated_peers import SimulatedSwarm

NAMES = ("a", "b", "c", "d")
"""Stage 0 is on a and c, stage 1 on b and d."""
A, B, C, D = map(PeerId, NAMES)


def swarm_of(steps: int = 3) -> SimulatedSwarm:
    schedule = LearningRateSchedule(highest=1e-3, steps=steps)
    swarm = SimulatedSwarm(RunSettings(steps=steps, schedule=schedule), replicas=2)
    swarm.start(*NAMES)
    return swarm


def answer(swarm: SimulatedSwarm, count: int) -> None:
    """The first answers that are due, as far as there are any."""
    for _ in range(count):
        if swarm.answers:
            swarm.answer(0)


def lose(swarm: SimulatedSwarm, peer: PeerId) -> None:
    swarm.forget(peer)
    swarm.give(PeerGone(peer=peer, reason="it is silent"))


def plans_made(swarm: SimulatedSwarm) -> int:
    return sum(isinstance(instruction, MakePlan) for instruction in swarm.done)


def test_all_replicas_report_and_each_norm_counts_once() -> None:
    swarm = swarm_of(steps=1)
    swarm.answer_all()
    assert [commit.grad_norm for commit in swarm.commits] == [pytest.approx(12.0**0.5)]
    assert swarm.machine.context.state is RunState.FINISHED


def test_replicas_that_came_to_different_gradients_make_no_step() -> None:
    swarm = swarm_of()
    index = next(i for i, answer in enumerate(swarm.answers) if isinstance(answer, StageReported) and answer.peer == D)
    honest = swarm.answers[index]
    assert isinstance(honest, StageReported)
    swarm.answers[index] = replace(honest, squared_norms=tuple((name, 4.01) for name, _ in honest.squared_norms))
    answer(swarm, 8)
    told = [event for event in swarm.told if isinstance(event, VoidEvent)]
    assert [event.peer for event in told] == [D]
    assert "not those of b" in told[0].reason


@pytest.mark.parametrize("lost", [A, C, D], ids=str)
def test_the_others_go_on_with_the_state_that_they_have(lost: PeerId) -> None:
    swarm = swarm_of()
    answer(swarm, 7)  # into the second step
    committed = swarm.machine.context.committed
    assert committed == 1
    lose(swarm, lost)
    assert swarm.machine.context.state is RunState.LOADING
    (assign,) = [instruction for instruction in swarm.done if isinstance(instruction, Assign)][1:]
    assert set(assign.plan.peers) == set(NAMES) - {lost}
    assert assign.committed == committed
    assert all(holders and lost not in holders for holders in assign.holders.values())
    swarm.answer_all()
    assert [commit.step for commit in swarm.commits] == [1, 2, 3]
    assert plans_made(swarm) == 1
    assert not any(isinstance(event, RestoredEvent) for event in swarm.told)
    assert any(isinstance(event, MovedEvent) for event in swarm.told)
    assert any(isinstance(event, RecoveredEvent) for event in swarm.told)
    (last,) = [event for event in swarm.told if isinstance(event, PlanEvent)][1:]
    assert sum(len(stage.peers) for stage in last.stages) == 3


def test_a_replica_that_falls_behind_is_dealt_fewer_microbatches() -> None:
    schedule = LearningRateSchedule(highest=1e-3, steps=30)
    swarm = SimulatedSwarm(RunSettings(steps=30, schedule=schedule), replicas=2, turns=12)
    swarm.start(*NAMES)
    swarm.moves_pay = False
    compared = 0
    while swarm.answers:
        answer(swarm, 1)
        if len(swarm.commits) > compared:
            compared = len(swarm.commits)
            swarm.give(PeersCompared(slowdowns={C: 2.0}))
    assert swarm.machine.context.state is RunState.FINISHED
    assert [commit.step for commit in swarm.commits] == list(range(1, 31))
    assigned = [instruction.plan.stages for instruction in swarm.done if isinstance(instruction, Assign)]
    assert [[stage.deal.count(1) for stage in stages] for stages in assigned] == [[6, 6], [4, 6]]
    moved = [event for event in swarm.told if isinstance(event, MovedEvent)]
    assert "c takes" in moved[0].reason


def test_when_the_last_replica_is_lost_the_run_plans_anew() -> None:
    swarm = swarm_of()
    lose(swarm, A)
    answer(swarm, 3)
    lose(swarm, C)
    assert swarm.machine.context.plan is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from(NAMES[:3])), max_size=3, unique_by=lambda pair: pair[1]))
def test_losses_at_any_moment_lose_no_step(losses: list[tuple[int, str]]) -> None:
    """Stage 1 keeps a replica, so that there is always one way or the other to go on."""
    swarm = swarm_of(steps=4)
    for answers, name in sorted(losses):
        answer(swarm, answers)
        if swarm.machine.context.state is RunState.FINISHED:
            return
        lose(swarm, PeerId(name))
    for _ in range(50):
        swarm.answer_all()
        if swarm.machine.context.state is RunState.FINISHED:
            break
        swarm.pass_time(5.0)
    assert [commit.step for commit in swarm.commits] == [1, 2, 3, 4]
