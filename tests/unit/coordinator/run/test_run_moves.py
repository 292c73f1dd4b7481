"""The state machine when a plan changes in the middle of a run: why, when not, and from whom state comes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import pytest

from atoll.coordinator.events import MovedEvent, PausedEvent, PlanEvent, VoidEvent
from atoll.coordinator.run.events import (
    BatchPrepared,
    FaultKind,
    FaultReported,
    MoveJudged,
    PeerGone,
    PeerJoined,
    PeerReady,
    PeersCompared,
    PlanMade,
    ReplanAsked,
    StageReported,
)
from atoll.coordinator.run.instructions import Assign, ConsiderMove, ReleaseState, SendCommit, SendVoid, StartStep
from atoll.coordinator.run.schedule import LearningRateSchedule
from atoll.coordinator.run.states import RunSettings, RunState
from atoll.protocol.ids import PeerId
from support.simulated_peers import SimulatedSwarm, make_offer

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def training(*names: str, steps: int = 60, evaluate_every: int | None = None) -> SimulatedSwarm:
    """A run that has committed its first step."""
    schedule = LearningRateSchedule(highest=0.1, steps=steps)
    settings = RunSettings(steps=steps, schedule=schedule, min_peers=len(names), evaluate_every=evaluate_every)
    swarm = SimulatedSwarm(settings)
    swarm.start(*names)
    commit(swarm)
    return swarm


def commit(swarm: SimulatedSwarm, count: int = 1, slowdowns: Mapping[PeerId, float] | None = None) -> None:
    """So many more steps, after each of which the peers' speeds are told."""
    wanted = (StageReported, BatchPrepared, PeerReady, PlanMade)
    for _ in range(count):
        before = len(swarm.commits)
        while len(swarm.commits) == before:
            swarm.now += 0.1
            swarm.answer(next(index for index, event in enumerate(swarm.answers) if isinstance(event, wanted)))
        if slowdowns is not None:
            swarm.give(PeersCompared(slowdowns=slowdowns))


def asked(swarm: SimulatedSwarm, kind: type) -> list:  # type: ignore[type-arg]
    return [item for item in swarm.done if isinstance(item, kind)]


def told(swarm: SimulatedSwarm, kind: type) -> list:  # type: ignore[type-arg]
    return [event for event in swarm.told if isinstance(event, kind)]


def out_of_memory(swarm: SimulatedSwarm, peer: PeerId) -> None:
    context = swarm.machine.context
    step = context.committed
    swarm.give(
        FaultReported(peer=peer, generation=context.generation, step=step, fault=FaultKind.MEMORY, reason="out of memory")
    )


def judge(swarm: SimulatedSwarm) -> None:
    swarm.answer_all(lambda event: isinstance(event, MoveJudged))


def finish(swarm: SimulatedSwarm) -> None:
    swarm.answer_all()
    assert swarm.machine.context.state is RunState.FINISHED
    assert [item.step for item in swarm.commits] == list(range(1, swarm.machine.context.settings.steps + 1))


def test_a_better_plan_is_looked_for_beside_training_and_taken_between_two_steps() -> None:
    swarm = training("a", "b")
    swarm.give(ReplanAsked())
    assert len(asked(swarm, ConsiderMove)) == 1
    commit(swarm, 2)
    judge(swarm)
    assert len(asked(swarm, Assign)) == 1, "not in the middle of a step"
    before = len(swarm.done)
    commit(swarm)
    following = [item for item in swarm.done[before:] if isinstance(item, SendCommit | Assign | StartStep)]
    assert [type(item) for item in following] == [SendCommit, Assign]
    assign = asked(swarm, Assign)[-1]
    assert assign.plan.peers == (B, A)
    assert assign.committed == 4
    assert assign.holders == {"embedding": (A,), "middle": (B,), "head": (B,)}
    finish(swarm)
    (moved,) = told(swarm, MovedEvent)
    assert (moved.step, moved.bytes, moved.fetch_seconds) == (4, 200, 0.5)
    assert moved.reason == "the operator asked: it pays"
    assert len(told(swarm, PlanEvent)) == 2


def test_a_plan_that_is_judged_as_good_is_kept_and_nobody_is_disturbed() -> None:
    swarm = training("a", "b")
    swarm.moves_pay = False
    swarm.give(ReplanAsked())
    judge(swarm)
    finish(swarm)
    assert len(told(swarm, PlanEvent)) == 1


def test_a_judgement_of_a_plan_that_is_over_is_nothing() -> None:
    swarm = training("a", "b")
    swarm.give(ReplanAsked())
    (late,) = [event for event in swarm.answers if isinstance(event, MoveJudged)]
    swarm.answers.remove(late)
    out_of_memory(swarm, A)
    commit(swarm)
    swarm.give(late)
    finish(swarm)
    assert len(told(swarm, PlanEvent)) == 2


def test_a_peer_that_is_slow_for_three_steps_is_a_reason_and_one_slow_step_is_not() -> None:
    swarm = training("a", "b")
    commit(swarm, 2, {A: 4.0, B: 1.0})
    commit(swarm, 1, {A: 1.0, B: 1.0})
    commit(swarm, 2, {A: 4.0, B: 1.0})
    assert not asked(swarm, ConsiderMove)
    commit(swarm, 1, {A: 4.0, B: 1.0})
    assert len(asked(swarm, ConsiderMove)) == 1
    judge(swarm)
    commit(swarm, 2)
    assert told(swarm, MovedEvent)[0].reason == "a computes 4.0 times longer than planned: it pays"


def test_slowness_that_was_found_not_to_be_worth_a_move_is_a_reason_again_when_it_grows() -> None:
    swarm = training("a", "b")
    swarm.moves_pay = False
    commit(swarm, 3, {A: 2.0})
    judge(swarm)
    commit(swarm, 20, {A: 2.5})
    assert len(asked(swarm, ConsiderMove)) == 1
    commit(swarm, 3, {A: 3.5})
    assert len(asked(swarm, ConsiderMove)) == 2


def test_no_second_move_follows_soon_even_if_somebody_is_slow_again() -> None:
    swarm = training("a", "b")
    for _ in range(10):
        commit(swarm, 5, {A: 9.0, B: 1.0})
        judge(swarm)
    moves = [event.step for event in told(swarm, MovedEvent)]
    assert len(moves) >= 2
    assert all(later - earlier >= 10 for earlier, later in pairwise(moves))


def test_a_move_that_took_long_is_not_repeated_before_its_cost_is_a_small_part() -> None:
    swarm = training("a", "b")
    swarm.give(ReplanAsked())
    judge(swarm)
    commit(swarm)
    swarm.now += 10.0  # all the time that loading took
    commit(swarm)
    end_of_move = swarm.now
    commit(swarm, 30, {A: 9.0, B: 1.0})
    assert len(asked(swarm, ConsiderMove)) == 1
    swarm.now = end_of_move + 10.0 / 0.05 + 10.0
    swarm.give(PeersCompared(slowdowns={A: 9.0}))
    assert len(asked(swarm, ConsiderMove)) == 2


def test_who_joins_later_is_a_reason_once() -> None:
    swarm = training("a", "b")
    swarm.moves_pay = False
    swarm.give(PeerJoined(offer=make_offer("c")))
    commit(swarm, 1, {})
    (look,) = asked(swarm, ConsiderMove)
    assert [offer.name for offer in look.peers] == ["a", "b", "c"]
    judge(swarm)
    commit(swarm, 30, {})
    assert len(asked(swarm, ConsiderMove)) == 1


def test_a_peer_out_of_memory_is_planned_with_less_and_the_run_lives() -> None:
    swarm = training("a", "b")
    out_of_memory(swarm, B)
    assert told(swarm, VoidEvent) == [VoidEvent(step=2, reason="out of memory", peer="b", stage=1)]
    assert asked(swarm, SendVoid)[0].peers == (A, B)
    assert swarm.machine.context.roster[B].offer.memory_bytes == 800
    finish(swarm)
    second = asked(swarm, Assign)[1]
    assert second.committed == 1
    assert second.holders == {"embedding": (A,), "middle": (B,), "head": (B,)}
    assert told(swarm, MovedEvent)[0].reason.startswith("b (stage 1) ran out of memory and is planned with")


def test_a_peer_that_runs_out_of_memory_again_and_again_is_left_out_in_the_end() -> None:
    swarm = training("a", "b", "c")
    for _ in range(6):
        if swarm.machine.context.stage_of(B) is None:
            break
        out_of_memory(swarm, B)
        commit(swarm)
    assert swarm.machine.context.plan is not None
    assert swarm.machine.context.plan.peers == (A, C)
    finish(swarm)


def test_without_memory_for_any_plan_the_run_pauses_and_a_newcomer_frees_it() -> None:
    swarm = training("a", "b")
    for peer in (A, B):
        swarm.machine.context.roster.lower_memory(peer, 0, 5)
    out_of_memory(swarm, B)
    swarm.answer_all(lambda event: not isinstance(event, StageReported))
    assert told(swarm, PausedEvent)
    assert swarm.machine.context.state is RunState.WAITING
    for name in "cd":
        swarm.give(PeerJoined(offer=make_offer(name)))
    swarm.pass_time(1.0)
    finish(swarm)
    assert asked(swarm, ReleaseState)[0].peers == (A, B)


def test_an_evaluation_that_a_lack_of_memory_interrupts_is_done_under_the_next_plan() -> None:
    swarm = training("a", "b", steps=4, evaluate_every=1)
    assert swarm.machine.cycle.open is not None
    assert swarm.machine.cycle.open.evaluation
    out_of_memory(swarm, B)
    finish(swarm)
    evaluations = [item.step for item in asked(swarm, StartStep) if item.evaluation]
    assert evaluations == [1, 1, 2, 3, 4]


def test_a_new_plan_that_leaves_the_stages_where_they_are_makes_no_copies() -> None:
    swarm = training("a", "b")
    out_of_memory(swarm, B)
    swarm.answer_all(lambda event: isinstance(event, PlanMade | PeerReady))
    assert swarm.machine.context.state is RunState.TRAINING
    swarm.give(PeerGone(peer=A, reason="its connection ended"))
    assert swarm.machine.context.committed == 0


def moving_to(swarm: SimulatedSwarm) -> None:
    """The stages of a and b change places; everybody is ready, and nothing is committed since."""
    swarm.give(ReplanAsked())
    judge(swarm)
    commit(swarm)
    swarm.answer_all(lambda event: isinstance(event, PeerReady))
    assert swarm.machine.context.state is RunState.TRAINING
    assert swarm.machine.context.plan is not None
    assert swarm.machine.context.plan.peers == (B, A)


def test_a_loss_right_after_a_move_is_survived_where_the_old_holder_still_has_the_state() -> None:
    swarm = training("a", "b")
    moving_to(swarm)
    swarm.give(PeerGone(peer=B, reason="its connection ended"))
    swarm.forget(B)
    finish(swarm)
    last = asked(swarm, Assign)[-1]
    assert last.plan.peers == (A,)
    assert set(last.holders) == {"embedding", "middle", "head"}
    assert set(last.holders.values()) == {(A,)}


def test_the_same_loss_one_commit_later_leads_back_to_the_first_values() -> None:
    swarm = training("a", "b")
    moving_to(swarm)
    commit(swarm)
    swarm.give(PeerGone(peer=B, reason="its connection ended"))
    swarm.forget(B)
    assert swarm.machine.context.committed == 0
    finish(swarm)


def test_a_donor_that_is_lost_while_others_load_is_missed_only_if_it_was_the_last_holder() -> None:
    swarm = training("a", "b")
    swarm.give(ReplanAsked())
    judge(swarm)
    commit(swarm)
    assert swarm.machine.context.state is RunState.LOADING
    swarm.answer_all(lambda event: isinstance(event, PeerReady) and event.peer == B)
    swarm.give(PeerGone(peer=A, reason="its connection ended"))
    swarm.forget(A)
    # b has its old stage, and was ready with what was a's.
    finish(swarm)
    assert asked(swarm, Assign)[-1].plan.peers == (B,)


@pytest.mark.parametrize("ready", [(), (A,)])
def test_a_donor_that_is_lost_too_early_leads_back_to_the_first_values(ready: tuple[PeerId, ...]) -> None:
    swarm = training("a", "b")
    swarm.give(ReplanAsked())
    judge(swarm)
    commit(swarm)
    swarm.answer_all(lambda event: isinstance(event, PeerReady) and event.peer in ready)
    swarm.give(PeerGone(peer=A, reason="its connection ended"))
    swarm.forget(A)
    assert swarm.machine.context.committed == 0
    finish(swarm)
