"""The state machine when the trouble lies between peers, or in one that is here all the same; and how it pauses."""

from __future__ import annotations

import pytest

from atoll.coordinator.events import PausedEvent, ResumedEvent, VoidEvent
from atoll.coordinator.run.deadlines import Deadlines
from atoll.coordinator.run.events import (
    BatchPrepared,
    FaultKind,
    FaultReported,
    LinksShown,
    PeerGone,
    PeerJoined,
    PeerProgressed,
    PeerReady,
    PeerVoided,
    PlanMade,
    PlanRefused,
    StageReported,
)
from atoll.coordinator.run.instructions import Assign, MakePlan
from atoll.coordinator.run.schedule import LearningRateSchedule
from atoll.coordinator.run.states import Phase, RunSettings, RunState
from atoll.protocol.ids import PeerId
from support.simulated_peers import SimulatedSwarm, make_offer

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
AB = frozenset((A, B))
LIMIT = 3600.0


def training(*names: str, steps: int = 20) -> SimulatedSwarm:
    """A run that has committed its first step."""
    deadlines = Deadlines(waiting_seconds=LIMIT)
    schedule = LearningRateSchedule(highest=0.1, steps=steps)
    swarm = SimulatedSwarm(RunSettings(steps=steps, schedule=schedule, min_peers=2, deadlines=deadlines))
    swarm.start(*names)
    commit(swarm)
    return swarm


def commit(swarm: SimulatedSwarm) -> None:
    wanted = (StageReported, BatchPrepared, PeerReady, PlanMade, PeerVoided)
    before = len(swarm.commits)
    while len(swarm.commits) == before:
        swarm.now += 0.1
        swarm.answer(next(index for index, event in enumerate(swarm.answers) if isinstance(event, wanted)))


def fault(swarm: SimulatedSwarm, peer: PeerId, kind: FaultKind, accused: PeerId | None = None) -> None:
    context = swarm.machine.context
    step = context.committed
    swarm.give(
        FaultReported(
            peer=peer, generation=context.generation, step=step, fault=kind, reason="nothing was heard", accused=accused
        )
    )


def drop_and_begin_again(swarm: SimulatedSwarm) -> None:
    """Everybody drops the void step."""
    swarm.answers = [event for event in swarm.answers if not isinstance(event, StageReported)]
    swarm.answer_all(lambda event: isinstance(event, PeerVoided))
    assert swarm.machine.context.phase is Phase.STEP


def asked(swarm: SimulatedSwarm, kind: type) -> list:  # type: ignore[type-arg]
    return [item for item in swarm.done if isinstance(item, kind)]


def told(swarm: SimulatedSwarm, kind: type) -> list:  # type: ignore[type-arg]
    return [event for event in swarm.told if isinstance(event, kind)]


def state(swarm: SimulatedSwarm) -> RunState:
    return swarm.machine.context.state


def finish(swarm: SimulatedSwarm) -> None:
    swarm.answer_all()
    assert state(swarm) is RunState.FINISHED
    assert [item.step for item in swarm.commits] == list(range(1, swarm.machine.context.settings.steps + 1))


def break_link(swarm: SimulatedSwarm) -> None:
    """The link between a and b fails twice."""
    fault(swarm, A, FaultKind.LINK, B)
    drop_and_begin_again(swarm)
    fault(swarm, B, FaultKind.LINK, A)


def refuse_plan(swarm: SimulatedSwarm) -> None:
    (made,) = [event for event in swarm.answers if isinstance(event, PlanMade)]
    swarm.answers.remove(made)
    swarm.give(PlanRefused(generation=made.generation, peers=(A, B), reason="no plan does without the link a - b"))


def test_a_link_that_fails_once_voids_the_step_and_the_plan_stays() -> None:
    swarm = training("a", "b", "c")
    fault(swarm, A, FaultKind.LINK, B)
    assert told(swarm, VoidEvent)[0].peer == B
    finish(swarm)
    assert len(asked(swarm, Assign)) == 1


def test_a_link_that_fails_again_is_planned_around() -> None:
    swarm = training("a", "b", "c")
    break_link(swarm)
    assert state(swarm) is RunState.PLANNING
    plan = asked(swarm, MakePlan)[-1]
    assert plan.broken == {AB}
    assert not plan.probed, "it is not waited for while there may be another way"
    assert len(told(swarm, VoidEvent)) == 2
    finish(swarm)


def test_a_run_that_no_plan_helps_pauses_tries_again_later_and_later_and_resumes_by_itself() -> None:
    swarm = training("a", "b")
    break_link(swarm)
    refuse_plan(swarm)
    assert [event.reason for event in told(swarm, PausedEvent)] == ["no plan does without the link a - b"]
    assert "is paused: no plan does without the link a - b" in str(swarm.machine.waiting())
    assert "it tries again in 2 s, gives up in 1.0 h" in str(swarm.machine.waiting())
    pauses, began = [], swarm.now
    for _ in range(4):
        while state(swarm) is RunState.WAITING:
            swarm.pass_time(0.5)
        pauses.append(swarm.now - began)
        began = swarm.now
        assert asked(swarm, MakePlan)[-1].probed
        refuse_plan(swarm)
    assert pauses == [2.0, 4.0, 8.0, 16.0]
    assert len(told(swarm, PausedEvent)) == 1
    while state(swarm) is RunState.WAITING:
        swarm.pass_time(1.0)
    swarm.give(LinksShown(pairs=frozenset({AB})))
    finish(swarm)
    assert len(told(swarm, ResumedEvent)) == 1


def test_a_pause_because_of_a_link_has_an_end_too() -> None:
    swarm = training("a", "b")
    break_link(swarm)
    began = swarm.now
    while swarm.ended is None:
        if state(swarm) is RunState.PLANNING:
            refuse_plan(swarm)
        swarm.pass_time(1.0)
        assert swarm.now - began < 2 * LIMIT
    assert swarm.ended.reason == "no plan does without the link a - b"


def test_a_newcomer_ends_the_pause_at_once() -> None:
    swarm = training("a", "b")
    break_link(swarm)
    refuse_plan(swarm)
    swarm.give(PeerJoined(offer=make_offer("c")))
    swarm.pass_time(1.0)
    assert state(swarm) is RunState.PLANNING
    finish(swarm)


def test_links_never_use_up_the_voids_that_end_a_run() -> None:
    swarm = training("a", "b", "c", "d", "e")
    pairs = [(A, B), (A, C), (A, PeerId("d")), (A, PeerId("e")), (B, A)]
    for one, other in pairs[:4]:
        fault(swarm, one if swarm.machine.context.stage_of(one) is not None else B, FaultKind.LINK, other)
        drop_and_begin_again(swarm)
    assert swarm.ended is None
    finish(swarm)


def test_links_that_fail_for_hours_without_a_step_end_the_run() -> None:
    swarm = training("a", "b", "c")
    while swarm.ended is None:
        swarm.now += 700.0
        fault(swarm, A, FaultKind.LINK, B)
        if swarm.ended is None:
            drop_and_begin_again(swarm)
    assert "because of broken links, at last a - b" in swarm.ended.reason
    assert swarm.now >= LIMIT


def test_a_link_that_fails_while_stages_load_is_no_reason_to_end() -> None:
    swarm = training("a", "b", "c")
    break_link(swarm)
    for _ in range(8):
        swarm.answer_all(lambda event: isinstance(event, PlanMade))
        assert state(swarm) is RunState.LOADING
        swarm.answers.clear()
        fault(swarm, A, FaultKind.LINK, B)
        assert state(swarm) is RunState.WAITING
        while state(swarm) is RunState.WAITING:
            swarm.pass_time(1.0)
    finish(swarm)


def test_a_peer_that_is_gone_was_no_broken_link() -> None:
    swarm = training("a", "b", "c")
    fault(swarm, A, FaultKind.LINK, C)
    swarm.give(PeerGone(peer=C, reason="its connection ended"))
    swarm.give(PeerJoined(offer=make_offer("c")))
    drop_and_begin_again(swarm)
    fault(swarm, A, FaultKind.LINK, C)
    assert state(swarm) is RunState.TRAINING


def test_two_that_wait_for_each_other_have_a_bad_link_and_neither_is_blamed_alone() -> None:
    swarm = training("a", "b", "c")
    swarm.answers.clear()
    for peer, other in ((A, B), (B, A)):
        swarm.give(PeerProgressed(peer=peer, phase="backward", waiting_for=other))
    limit = swarm.machine.context.deadline - swarm.now
    swarm.pass_time(limit)
    assert told(swarm, VoidEvent)[0].reason.startswith("for 60 s each of two peers waited for what the other had sent")
    swarm.machine.context.pending.clear()
    assert swarm.machine.context.links.trouble_since is not None


@pytest.mark.parametrize("kind", ["damaged", "refused", "stuck"])
def test_a_peer_that_spoils_steps_again_and_again_is_left_out(kind: str) -> None:
    swarm = training("a", "b", "c")
    for attempt in range(2):
        if kind == "damaged":
            fault(swarm, A, FaultKind.CORRUPT, B)
        elif kind == "refused":
            fault(swarm, A, FaultKind.OUTLIER, B)
        else:
            swarm.answers = [event for event in swarm.answers if getattr(event, "peer", None) != B]
            swarm.answer_all(lambda event: isinstance(event, StageReported | BatchPrepared))
            swarm.pass_time(swarm.machine.context.deadline - swarm.now)
        if attempt == 0:
            drop_and_begin_again(swarm)
    swarm.pass_time(1.0)
    assert [event.peer for event in told(swarm, VoidEvent)] == [B, B]
    assert [offer.name for offer in asked(swarm, MakePlan)[-1].peers] == [A, C]
    finish(swarm)
    assert asked(swarm, Assign)[-1].plan.peers == (A, C)
    assert set(asked(swarm, Assign)[-1].holders["head"]) == {B}, "what it holds is not lost for that"
    assert "left out of plans" in swarm.machine.context.roster[B].reason


def test_a_plan_that_nobody_who_joins_could_make_possible_ends_the_run_at_once() -> None:
    swarm = SimulatedSwarm(RunSettings(steps=3, schedule=LearningRateSchedule(highest=0.1, steps=3)))
    swarm.start()
    swarm.give(PeerJoined(offer=make_offer("a")))
    swarm.pass_time(1.0)
    generation = swarm.machine.context.generation
    swarm.give(PlanRefused(generation=generation, peers=(A,), reason="lower plan.stages", hopeless=True))
    assert swarm.ended is not None
    assert swarm.ended.reason == "lower plan.stages"


def test_a_lack_of_memory_is_waited_out_for_long_and_tried_only_with_others() -> None:
    swarm = SimulatedSwarm(RunSettings(steps=3, schedule=LearningRateSchedule(highest=0.1, steps=3)), memory_needed=2 * 10**9)
    swarm.start("a")
    assert told(swarm, PausedEvent)
    for _ in range(100):
        swarm.pass_time(600.0)
    assert len(asked(swarm, MakePlan)) == 1
    swarm.give(PeerJoined(offer=make_offer("b")))
    swarm.pass_time(1.0)
    finish(swarm)
    assert len(told(swarm, ResumedEvent)) == 1


def test_where_two_peers_come_to_values_that_are_refused_neither_is_blamed() -> None:
    swarm = training("a", "b", "c")
    fault(swarm, A, FaultKind.OUTLIER, B)
    drop_and_begin_again(swarm)
    fault(swarm, B, FaultKind.OUTLIER, A)
    assert swarm.ended is not None
    assert "the training diverges" in swarm.ended.reason
    assert "learning_rate" in swarm.ended.reason


def test_refusals_of_different_steps_say_nothing_of_each_other() -> None:
    swarm = training("a", "b", "c")
    fault(swarm, A, FaultKind.OUTLIER, B)
    drop_and_begin_again(swarm)
    commit(swarm)
    fault(swarm, B, FaultKind.OUTLIER, A)
    drop_and_begin_again(swarm)
    assert swarm.ended is None
    finish(swarm)
