"""A store as one more place that a run can go back to, by its state machine and its registry."""

from __future__ import annotations

from atoll.coordinator.events import FailedEvent, RestoredEvent, SnapshotEvent
from atoll.coordinator.moves import without_store
from atoll.coordinator.run.events import PeerGone, PeerJoined, SnapshotTaken, StopAsked, StoreHolds
from atoll.coordinator.run.instructions import Assign, FillStore
from atoll.coordinator.run.schedule import LearningRateSchedule
from atoll.coordinator.run.snapshots import THE_STORE, HeldPart, Moment, Part, Snapshots
from atoll.coordinator.run.states import RunSettings, RunState
from atoll.protocol.ids import PeerId, StepNumber
from support.simulated_peers import PARAMETERS, SimulatedSwarm, make_offer

A, B = PeerId("a"), PeerId("b")
NAMES = frozenset({"x", "y"})


def held(step: int, names: frozenset[str] = NAMES) -> HeldPart:
    return HeldPart(step=StepNumber(step), names=names, num_bytes=10)


def at(step: int) -> Moment:
    return Moment(step=StepNumber(step))


def test_what_peers_delete_stays_in_the_store_and_is_gone_back_to() -> None:
    snapshots = Snapshots()
    snapshots.essential = NAMES
    snapshots.joined(A, ())
    for step in (2, 4):
        snapshots.ordered(at(step))
        snapshots.taken(A, Part(moment=at(step), names=NAMES))
    snapshots.joined(THE_STORE, (held(2),))
    snapshots.dropped({StepNumber(4)})
    assert snapshots.newest_complete() == at(4)
    snapshots.gone(A)
    assert snapshots.newest_complete() == at(2)
    snapshots.joined(THE_STORE, (held(2), held(4)))
    assert snapshots.newest_complete() is None or snapshots.newest_complete() == at(4)


def test_what_is_being_put_into_the_store_is_kept_meanwhile() -> None:
    snapshots = Snapshots()
    snapshots.essential = NAMES
    snapshots.joined(A, ())
    for step in (2, 4):
        snapshots.ordered(at(step))
        snapshots.taken(A, Part(moment=at(step), names=NAMES))
    assert snapshots.worth_keeping() == {4}
    snapshots.stored = at(2)
    assert snapshots.worth_keeping() == {2, 4}


def test_a_damaged_part_counts_no_more() -> None:
    snapshots = Snapshots()
    snapshots.essential = NAMES
    snapshots.joined(A, ())
    snapshots.ordered(at(2))
    snapshots.taken(A, Part(moment=at(2), names=NAMES))
    snapshots.damaged(A, StepNumber(2))
    snapshots.damaged(B, StepNumber(2))
    assert snapshots.newest_complete() is None


def test_peers_alone_are_donors() -> None:
    assert without_store({"x": (A, THE_STORE), "y": (THE_STORE,)}) == {"x": (A,)}


def make_swarm(steps: int = 12) -> SimulatedSwarm:
    schedule = LearningRateSchedule(highest=0.1, steps=steps)
    return SimulatedSwarm(RunSettings(steps=steps, schedule=schedule, snapshot_every=2, has_store=True))


def train_to(swarm: SimulatedSwarm, step: int) -> None:
    while swarm.machine.context.committed < step:
        swarm.now += 0.1
        if swarm.answers:
            swarm.answer(0)
        else:
            swarm.pass_time(1.0)
    swarm.answer_all(lambda event: isinstance(event, SnapshotTaken))


def fills(swarm: SimulatedSwarm) -> list[int]:
    return [item.step for item in swarm.done if isinstance(item, FillStore)]


def changing(swarm: SimulatedSwarm) -> frozenset[str]:
    return swarm.machine.context.snapshots.essential


def test_one_snapshot_after_the_other_is_put_into_the_store() -> None:
    swarm = make_swarm()
    swarm.start("a", "b")
    train_to(swarm, 2)
    assert fills(swarm) == [2]
    train_to(swarm, 6)
    assert fills(swarm) == [2], "the first is still under way"
    swarm.give(StoreHolds(parts=(held(2, changing(swarm)),)))
    assert fills(swarm) == [2, 6]
    swarm.give(StoreHolds(parts=(held(2, changing(swarm)),)))
    assert fills(swarm) == [2, 6], "what failed is not tried again at once"
    train_to(swarm, 8)
    assert fills(swarm) == [2, 6, 8]


def test_a_run_whose_peers_are_all_gone_goes_back_to_the_store() -> None:
    swarm = make_swarm()
    swarm.start("a", "b")
    train_to(swarm, 2)
    swarm.give(StoreHolds(parts=(held(2, changing(swarm)),)))
    train_to(swarm, 3)
    for peer in (A, B):
        swarm.give(PeerGone(peer=peer, reason="its connection ended"))
        swarm.forget(peer)
    for name in ("c", "d"):
        swarm.give(PeerJoined(offer=make_offer(name)))
    train_to(swarm, 5)
    restored = [event for event in swarm.told if isinstance(event, RestoredEvent)]
    assert [(event.step, event.from_step) for event in restored] == [(2, 3)]
    assign = [item for item in swarm.done if isinstance(item, Assign)][-1]
    assert set(assign.on_disks.values()) == {(THE_STORE,)}


def test_a_run_that_is_resumed_begins_after_its_snapshot() -> None:
    swarm = make_swarm()
    swarm.machine.begin_at(StepNumber(7))
    swarm.give(StoreHolds(parts=(held(7, frozenset(PARAMETERS)),)))
    swarm.start("a", "b")
    train_to(swarm, 8)
    first = next(item for item in swarm.done if isinstance(item, Assign))
    assert first.committed == 7
    assert swarm.machine.context.journal_step >= 8


def test_a_run_does_not_go_back_behind_where_it_was_resumed() -> None:
    swarm = make_swarm()
    swarm.machine.begin_at(StepNumber(7))
    swarm.start("a", "b")
    swarm.give(StoreHolds(parts=()))
    swarm.pass_time(600.0)
    (failed,) = [event for event in swarm.told if isinstance(event, FailedEvent)]
    assert "step 7, at which the run began" in failed.reason


def finish_training(swarm: SimulatedSwarm, steps: int) -> None:
    train_to(swarm, steps)
    swarm.answer_all()


def state(swarm: SimulatedSwarm) -> RunState:
    return swarm.machine.context.state


def test_a_run_that_is_done_ends_once_its_last_step_is_in_the_store() -> None:
    swarm = make_swarm(steps=3)
    swarm.start("a", "b")
    finish_training(swarm, 3)
    assert state(swarm) is RunState.FINISHING
    assert "its last snapshot to be in the store" in str(swarm.machine.waiting())
    assert fills(swarm) == [2], "the one before is still under way"
    swarm.give(StoreHolds(parts=(held(2, changing(swarm)),)))
    assert fills(swarm) == [2, 3]
    assert state(swarm) is RunState.FINISHING
    swarm.give(StoreHolds(parts=(held(2, changing(swarm)), held(3, changing(swarm)))))
    assert state(swarm) is RunState.FINISHED


def test_a_store_that_takes_nothing_holds_no_run_up_for_ever() -> None:
    swarm = make_swarm(steps=3)
    swarm.start("a", "b")
    finish_training(swarm, 3)
    swarm.give(StoreHolds(parts=()))
    swarm.pass_time(swarm.machine.context.settings.deadlines.keeping_seconds + 1.0)
    assert state(swarm) is RunState.FINISHED
    (told,) = [event for event in swarm.told if isinstance(event, SnapshotEvent) and event.failure]
    assert (told.step, "after the weights were written" in told.failure) == (3, True)


def test_peers_that_go_while_the_last_snapshot_is_stored_change_nothing() -> None:
    swarm = make_swarm(steps=3)
    swarm.start("a", "b")
    finish_training(swarm, 3)
    swarm.give(PeerGone(peer=A, reason="its connection ended"))
    swarm.forget(A)
    assert state(swarm) is RunState.FINISHING
    swarm.give(StopAsked(reason="interrupted", keep_weights=True))
    assert state(swarm) is RunState.FINISHED, "the weights are written"
