"""The state machine when peers leave in order: who is planned with, until when they stay, and with what word they go."""

from __future__ import annotations

import pytest

from atoll.coordinator.events import PeerEvent
from atoll.coordinator.run.events import (
    BatchPrepared,
    MoveJudged,
    PeerJoined,
    PeerLeaving,
    PeerReady,
    PlanMade,
    ReplanAsked,
    SnapshotCopied,
    SnapshotTaken,
    StageReported,
)
from atoll.coordinator.run.instructions import Assign, ConsiderMove, CopySnapshot, LetGo, MakePlan, RefuseHandOver
from atoll.coordinator.run.leaving import GRACE_SECONDS
from atoll.coordinator.run.roster import PeerState
from atoll.coordinator.run.schedule import LearningRateSchedule
from atoll.coordinator.run.states import RunSettings, RunState
from atoll.protocol.ids import PeerId
from support.simulated_peers import SimulatedSwarm, make_offer

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
SECONDS = 30.0


def training(*names: str, steps: int = 20, committed: int = 1) -> SimulatedSwarm:
    swarm = SimulatedSwarm(RunSettings(steps=steps, schedule=LearningRateSchedule(highest=0.1, steps=steps), min_peers=2))
    swarm.start(*names)
    commit(swarm, committed)
    return swarm


def commit(swarm: SimulatedSwarm, count: int = 1) -> None:
    wanted = (StageReported, BatchPrepared, PeerReady, PlanMade)
    for _ in range(count):
        before = len(swarm.commits)
        while len(swarm.commits) == before:
            swarm.now += 0.1
            swarm.answer(next(index for index, event in enumerate(swarm.answers) if isinstance(event, wanted)))


def leave(swarm: SimulatedSwarm, peer: PeerId, seconds: float = SECONDS, *, removed: bool = False) -> None:
    swarm.give(PeerLeaving(peer=peer, reason="told to end", hand_over_seconds=seconds, removed=removed))


def asked(swarm: SimulatedSwarm, kind: type) -> list:  # type: ignore[type-arg]
    return [item for item in swarm.done if isinstance(item, kind)]


def state(swarm: SimulatedSwarm) -> RunState:
    return swarm.machine.context.state


def judge(swarm: SimulatedSwarm) -> None:
    swarm.answer_all(lambda event: isinstance(event, MoveJudged))


def finish(swarm: SimulatedSwarm) -> None:
    swarm.answer_all()
    assert swarm.machine.context.state is RunState.FINISHED
    assert [item.step for item in swarm.commits] == list(range(1, swarm.machine.context.settings.steps + 1))


def test_a_spare_that_leaves_may_go_at_once_and_counts_as_a_spare_no_more() -> None:
    swarm = training("a", "b", "c")
    leave(swarm, C)
    assert asked(swarm, LetGo) == [LetGo(peer=C, reason="told to end")]
    assert swarm.machine.context.roster[C].state is PeerState.LEFT
    finish(swarm)
    assert len(asked(swarm, Assign)) == 1


def test_a_stage_is_handed_over_at_a_steps_end_and_its_peer_goes_when_others_have_it() -> None:
    swarm = training("a", "b", "c")
    leave(swarm, A)
    (look,) = asked(swarm, ConsiderMove)
    assert [offer.name for offer in look.peers] == [B, C]
    judge(swarm)
    commit(swarm)
    assert not asked(swarm, LetGo), "it still lends"
    assert asked(swarm, Assign)[-1].holders["embedding"] == (A,)
    swarm.answer_all(lambda event: isinstance(event, PeerReady))
    assert asked(swarm, LetGo) == [LetGo(peer=A, reason="told to end")]
    assert [event.state for event in swarm.told if isinstance(event, PeerEvent) and event.name == A][-1] == PeerState.LEFT
    finish(swarm)
    assert asked(swarm, Assign)[-1].plan.peers == (B, C)


def test_a_look_that_counts_on_a_peer_that_leaves_meanwhile_is_overtaken() -> None:
    swarm = training("a", "b", "c")
    swarm.give(ReplanAsked())
    leave(swarm, B)
    first, second = asked(swarm, ConsiderMove)
    assert [offer.name for offer in first.peers] == [A, B, C]
    assert [offer.name for offer in second.peers] == [A, C]
    judge(swarm)
    commit(swarm)
    assert asked(swarm, Assign)[-1].plan.peers == (A, C)
    finish(swarm)


def test_when_too_few_would_remain_the_peer_hears_it_at_once_and_somebody_may_still_join() -> None:
    swarm = training("a", "b")
    leave(swarm, A)
    judge(swarm)
    assert asked(swarm, RefuseHandOver) == [RefuseHandOver(peers=(A,), reason="it does not pay")]
    commit(swarm, 3)
    assert len(asked(swarm, ConsiderMove)) == 1, "nobody has come who could help"
    swarm.give(PeerJoined(offer=make_offer("c")))
    swarm.give(ReplanAsked())
    judge(swarm)
    commit(swarm)
    swarm.answer_all(lambda event: isinstance(event, PeerReady))
    assert [item.peer for item in asked(swarm, LetGo)] == [A]
    finish(swarm)


def test_a_peer_whose_time_is_over_goes_as_if_it_were_lost() -> None:
    swarm = training("a", "b")
    leave(swarm, A)
    judge(swarm)
    swarm.pass_time(SECONDS + GRACE_SECONDS - 1.0)
    assert not asked(swarm, LetGo)
    swarm.pass_time(1.0)
    assert asked(swarm, LetGo) == [LetGo(peer=A, reason="told to end")]
    assert swarm.machine.context.roster[A].state is PeerState.LEFT


@pytest.mark.parametrize("seconds", [0.0, SECONDS])
def test_a_removed_peer_hands_over_first_where_it_has_time(seconds: float) -> None:
    swarm = training("a", "b", "c")
    leave(swarm, A, seconds, removed=True)
    assert bool(asked(swarm, LetGo)) == (seconds == 0.0)
    if seconds:
        judge(swarm)
        commit(swarm)
        swarm.answer_all(lambda event: isinstance(event, PeerReady))
    assert asked(swarm, LetGo) == [LetGo(peer=A, reason="told to end", removed=True)]


def test_who_leaves_while_others_plan_or_load_is_not_in_the_plan_that_follows() -> None:
    for loading in (False, True):
        swarm = SimulatedSwarm(RunSettings(steps=3, schedule=LearningRateSchedule(highest=0.1, steps=3)))
        swarm.start()
        for name in "abc":
            swarm.give(PeerJoined(offer=make_offer(name)))
        swarm.pass_time(1.0)
        assert state(swarm) is RunState.PLANNING
        if loading:
            swarm.answer_all(lambda event: isinstance(event, PlanMade))
            assert state(swarm) is RunState.LOADING
        leave(swarm, A)
        assert [item.peer for item in asked(swarm, LetGo)] == [A], "nothing is learned yet that it could hand over"
        swarm.pass_time(1.0)
        assert [offer.name for offer in asked(swarm, MakePlan)[-1].peers] == [B, C]
        swarm.forget(A)
        finish(swarm)


def test_a_second_that_leaves_while_the_first_hands_over_makes_donors_of_both() -> None:
    swarm = training("a", "b", "c")
    leave(swarm, A)
    judge(swarm)
    commit(swarm)
    assert state(swarm) is RunState.LOADING
    leave(swarm, B)
    swarm.pass_time(1.0)
    swarm.answer_all(lambda event: isinstance(event, PlanMade))
    assert not asked(swarm, LetGo), "both still lend"
    assert set(asked(swarm, Assign)[-1].holders.values()) == {(A,), (B,)}
    swarm.answer_all(lambda event: isinstance(event, PeerReady))
    assert {item.peer for item in asked(swarm, LetGo)} == {A, B}
    finish(swarm)


def test_the_last_two_that_leave_together_are_both_told() -> None:
    swarm = training("a", "b")
    leave(swarm, A)
    leave(swarm, B)
    judge(swarm)
    assert set(asked(swarm, RefuseHandOver)[-1].peers) == {A, B}


def with_snapshots(*names: str) -> SimulatedSwarm:
    """Two stages and spares, a snapshot after every second step of which only its owners have their parts."""
    settings = RunSettings(
        steps=20, schedule=LearningRateSchedule(highest=0.1, steps=20), min_peers=2, snapshot_every=2, copies=0
    )
    swarm = SimulatedSwarm(settings)
    swarm.start(*names)
    commit(swarm, 2)
    swarm.answer_all(lambda event: isinstance(event, SnapshotTaken))
    assert swarm.machine.context.snapshots.newest_complete() is not None
    return swarm


def test_what_only_a_leaver_has_of_a_snapshot_is_copied_before_it_goes() -> None:
    swarm = with_snapshots("a", "b")
    swarm.give(PeerJoined(offer=make_offer("c")))
    leave(swarm, B)
    (asked_for,) = asked(swarm, CopySnapshot)
    assert asked_for.copy.source == B
    assert asked_for.copy.target in (A, C)
    judge(swarm)
    commit(swarm, 2)
    assert B not in swarm.machine.context.plan.peers  # type: ignore[union-attr]
    assert not asked(swarm, LetGo), "somebody fetches from its disk"
    snapshots = swarm.machine.context.snapshots
    moment = snapshots.newest_complete()
    assert moment is not None
    swarm.answer_all(lambda event: isinstance(event, SnapshotCopied))
    assert [item.peer for item in asked(swarm, LetGo)] == [B]
    assert snapshots.is_complete(moment), "it can still be gone back to"


def test_a_copy_that_fails_holds_no_leaver() -> None:
    swarm = with_snapshots("a", "b")
    swarm.give(PeerJoined(offer=make_offer("c")))
    swarm.full = {A, C}
    leave(swarm, B)
    judge(swarm)
    commit(swarm, 2)
    swarm.answer_all(lambda event: isinstance(event, SnapshotCopied))
    assert [item.peer for item in asked(swarm, LetGo)] == [B]


def test_a_copy_with_somebody_who_leaves_is_none() -> None:
    swarm = training("a", "b")
    swarm.give(PeerJoined(offer=make_offer("c")))
    leave(swarm, C)
    assert not swarm.machine.snapshotting._counts(C)
    assert swarm.machine.snapshotting._counts(A)
