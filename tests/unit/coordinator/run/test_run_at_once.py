"""After a loss a plan is made at once: nobody waits for those who come, nothing is measured first; a better one comes later."""

from __future__ import annotations

from dataclasses import replace

from atoll.coordinator.run.events import (
    FaultKind,
    FaultReported,
    PeerGone,
    PeerJoined,
    PeerReady,
    PeersCompared,
    PlanMade,
    SnapshotCopied,
    SnapshotTaken,
)
from atoll.coordinator.run.instructions import ConsiderMove, MakePlan, SurveyPeers
from atoll.coordinator.run.schedule import LearningRateSchedule
from atoll.coordinator.run.states import RunSettings, RunState
from atoll.protocol.ids import PeerId
from support.simulated_peers import SimulatedSwarm, make_offer

A, B, C, D = (PeerId(name) for name in "abcd")


def training(*names: str, until: int = 3, snapshot_every: int | None = 2) -> SimulatedSwarm:
    """A run of two stages that has committed some steps; its first snapshot is complete."""
    schedule = LearningRateSchedule(highest=0.1, steps=200)
    swarm = SimulatedSwarm(RunSettings(steps=200, schedule=schedule, snapshot_every=snapshot_every))
    swarm.moves_pay = False
    swarm.start(*names)
    commit(swarm, until)
    return swarm


def commit(swarm: SimulatedSwarm, step: int) -> None:
    """New steps up to this one; the shell compares speeds after each."""
    while swarm.machine.context.journal_step < step:
        before = swarm.machine.context.journal_step
        while swarm.machine.context.journal_step == before:
            swarm.now += 0.1
            swarm.answer(0)
        swarm.answer_all(lambda event: isinstance(event, SnapshotTaken | SnapshotCopied))
        swarm.give(PeersCompared(slowdowns={}))


def lose(swarm: SimulatedSwarm, peer: PeerId) -> None:
    swarm.give(PeerGone(peer=peer, reason="its connection ended"))
    swarm.forget(peer)


def plans(swarm: SimulatedSwarm) -> list[MakePlan]:
    return [item for item in swarm.done if isinstance(item, MakePlan)]


def done(swarm: SimulatedSwarm, kind: type) -> list:  # type: ignore[type-arg]
    return [item for item in swarm.done if isinstance(item, kind)]


def load(swarm: SimulatedSwarm, *, hasty: bool = True) -> None:
    """The plan that was asked for is made and loaded."""
    (made,) = [event for event in swarm.answers if isinstance(event, PlanMade)]
    swarm.answers.remove(made)
    swarm.give(replace(made, hasty=hasty))
    swarm.answer_all(lambda event: isinstance(event, PeerReady))


def test_a_loss_is_answered_in_the_same_moment_with_what_is_known() -> None:
    swarm = training("a", "b", "c")
    for _ in range(3):  # the spare fetches the snapshot
        swarm.pass_time(0.1)
        swarm.answer_all(lambda event: isinstance(event, SnapshotCopied))
    lose(swarm, B)
    (_, plan) = plans(swarm)
    assert plan.at_once
    assert plan.previous is not None
    assert plan.previous.peers == (A, B)
    assert plan.on_disks["embedding"] == (A, C)
    assert not plans(swarm)[0].at_once, "nobody was lost before the first plan"


def test_who_comes_in_that_moment_delays_nothing() -> None:
    swarm = training("a", "b", "c")
    swarm.give(PeerJoined(offer=make_offer("d")))
    lose(swarm, B)
    assert len(plans(swarm)) == 2, "nobody waits until d has settled"
    swarm.give(PeerJoined(offer=make_offer("b")))
    load(swarm)
    assert swarm.machine.context.state is RunState.TRAINING
    assert len(plans(swarm)) == 2


def test_with_fewer_than_before_the_run_lets_those_who_come_settle() -> None:
    swarm = training("a", "b")
    swarm.give(PeerGone(peer=A, reason="its connection ended"))
    swarm.give(PeerGone(peer=B, reason="its connection ended"))
    for peer in (A, B):
        swarm.forget(peer)
    before = len(plans(swarm))
    swarm.give(PeerJoined(offer=make_offer("a"), snapshots=swarm.held_by(A)))
    assert len(plans(swarm)) == before, "others may be about to come"
    swarm.give(PeerJoined(offer=make_offer("b"), snapshots=swarm.held_by(B)))
    assert len(plans(swarm)) == before + 1, "they are as many as before"


def test_a_plan_that_could_not_be_loaded_is_followed_by_another_only_when_the_sessions_had_time_to_tell() -> None:
    swarm = training("a", "b", "c")
    lose(swarm, B)
    (made,) = [event for event in swarm.answers if isinstance(event, PlanMade)]
    swarm.answers.remove(made)
    swarm.give(made)
    fault = FaultReported(
        peer=C, generation=made.generation, step=swarm.machine.context.committed, fault=FaultKind.INTERNAL, reason="it broke"
    )
    swarm.give(fault)
    assert len(plans(swarm)) == 2
    swarm.pass_time(1.0)
    assert len(plans(swarm)) == 3


def test_whoever_joins_is_measured_while_nothing_depends_on_it() -> None:
    swarm = training("a", "b")
    assert done(swarm, SurveyPeers) == []
    lose(swarm, B)
    swarm.give(PeerJoined(offer=make_offer("b"), snapshots=swarm.held_by(B)))
    load(swarm)
    swarm.give(PeerJoined(offer=make_offer("c")))
    assert done(swarm, SurveyPeers) == [], "making up for the loss comes first"
    commit(swarm, 4)
    (survey,) = done(swarm, SurveyPeers)
    assert [offer.name for offer in survey.peers] == [A, B, C]
    commit(swarm, 6)
    lose(swarm, C)
    assert len(done(swarm, SurveyPeers)) == 1
    swarm.give(PeerJoined(offer=make_offer("c")))
    commit(swarm, 7)
    looks = [item for item in done(swarm, ConsiderMove) if C in {offer.name for offer in item.peers}]
    assert len(done(swarm, SurveyPeers)) + len(looks) == 2, "it may have come back on another machine"


def test_a_plan_made_in_haste_is_looked_at_again_after_a_rest() -> None:
    swarm = training("a", "b", "c")
    lose(swarm, B)
    load(swarm)
    commit(swarm, 8)
    assert done(swarm, ConsiderMove) == [], "the run is left alone for a while"
    swarm.pass_time(60.0)
    commit(swarm, 20)
    (look,) = done(swarm, ConsiderMove)
    assert [offer.name for offer in look.peers] == [A, C]
    swarm.answer_all(lambda event: type(event).__name__ == "MoveJudged")
    swarm.pass_time(60.0)
    commit(swarm, 40)
    assert len(done(swarm, ConsiderMove)) == 1, "it was looked at once"


def test_a_plan_that_was_searched_for_is_not_looked_at_again() -> None:
    swarm = training("a", "b", "c")
    lose(swarm, B)
    load(swarm, hasty=False)
    swarm.pass_time(60.0)
    commit(swarm, 30)
    assert done(swarm, ConsiderMove) == []
