"""The state machine after losses: back to a snapshot or to the first values, and each step once in the journal."""

from __future__ import annotations

from atoll.coordinator.events import (
    EvaluationEvent,
    PausedEvent,
    RecoveredEvent,
    RestoredEvent,
    ResumedEvent,
    StepEvent,
)
from atoll.coordinator.run.absences import PatienceSettings
from atoll.coordinator.run.events import (
    ExportAsked,
    PeerGone,
    PeerJoined,
    PeerStored,
    PlanMade,
    StageReported,
    StopAsked,
    StorePurpose,
)
from atoll.coordinator.run.instructions import AskStore, Assign, ReleaseState, SendCommit, StartStep, WriteCommit
from atoll.coordinator.run.resuming import Held
from atoll.coordinator.run.schedule import LearningRateSchedule
from atoll.coordinator.run.snapshots import HeldPart, Moment, Part
from atoll.coordinator.run.states import RunSettings, RunState
from atoll.protocol.ids import PeerId, StepNumber
from support.simulated_peers import PARAMETERS, SimulatedSwarm, make_offer

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def training(*names: str, steps: int = 6, until: int = 0, evaluate_every: int | None = None) -> SimulatedSwarm:
    """A run of two stages that has committed so many steps."""
    schedule = LearningRateSchedule(highest=0.1, steps=steps)
    settings = RunSettings(
        steps=steps,
        schedule=schedule,
        evaluate_every=evaluate_every,
        snapshot_every=1000,
        patience=PatienceSettings(expected_seconds=(8.0,)),
    )
    swarm = SimulatedSwarm(settings)
    swarm.start(*names)
    train_to(swarm, until)
    return swarm


def train_to(swarm: SimulatedSwarm, step: int) -> None:
    while swarm.machine.context.committed < step:
        swarm.now += 0.1
        swarm.answer(0)


def state(swarm: SimulatedSwarm) -> RunState:
    return swarm.machine.context.state


def lose(swarm: SimulatedSwarm, peer: PeerId, *, may_return: bool = False) -> None:
    swarm.give(PeerGone(peer=peer, reason="its connection ended", silent_seconds=0.5, may_return=may_return))
    swarm.forget(peer)


def told(swarm: SimulatedSwarm, kind: type) -> list:  # type: ignore[type-arg]
    return [event for event in swarm.told if isinstance(event, kind)]


def done(swarm: SimulatedSwarm, kind: type) -> list:  # type: ignore[type-arg]
    return [item for item in swarm.done if isinstance(item, kind)]


def take(swarm: SimulatedSwarm, step: int, *owners: tuple[PeerId, tuple[str, ...]], line: int = 0) -> None:
    """The snapshot of a step is on these peers' disks."""
    moment = Moment(step=StepNumber(step), line=line)
    swarm.machine.context.snapshots.ordered(moment)
    for peer, names in owners:
        swarm.disks.setdefault(peer, {})[moment.step] = frozenset(names)
        swarm.machine.context.snapshots.taken(peer, Part(moment=moment, names=frozenset(names), num_bytes=8))


def finish(swarm: SimulatedSwarm) -> None:
    swarm.answer_all()
    assert swarm.machine.context.state is RunState.FINISHED
    steps = list(range(1, swarm.machine.context.settings.steps + 1))
    assert [item.step for item in swarm.commits] == steps
    assert [event.step for event in told(swarm, StepEvent)] == steps


def test_without_a_snapshot_all_steps_are_done_again_and_none_is_committed_twice() -> None:
    swarm = training("a", "b", "c", until=3)
    lose(swarm, B)
    assign_before = len(done(swarm, Assign))
    finish(swarm)
    assign = done(swarm, Assign)[assign_before]
    assert (assign.committed, assign.holders, assign.on_disks) == (0, {}, {})
    assert [item.step for item in swarm.replays] == [1, 2, 3]
    assert [(item.loss, item.samples) for item in swarm.replays] == [(item.loss, item.samples) for item in swarm.commits[:3]]
    (restored,) = told(swarm, RestoredEvent)
    assert (restored.step, restored.from_step) == (0, 3)
    assert restored.reason == "b (stage 1) was lost (its connection ended)"


def test_a_step_that_is_done_again_is_committed_to_the_peers_with_its_own_learning_rate() -> None:
    swarm = training("a", "b", "c", until=3)
    lose(swarm, B)
    finish(swarm)
    sent = [item.step for item in done(swarm, SendCommit)]
    assert sent == [1, 2, 3, 1, 2, 3, 4, 5, 6]


def test_the_newest_complete_snapshot_is_what_a_run_goes_back_to() -> None:
    swarm = training("a", "b", "c", until=4)
    take(swarm, 2, (A, PARAMETERS[:1]), (B, PARAMETERS[1:]), (C, PARAMETERS[1:]))
    take(swarm, 3, (A, PARAMETERS[:1]), (B, PARAMETERS[1:]))
    lose(swarm, B)
    finish(swarm)
    assign = done(swarm, Assign)[1]
    assert assign.committed == 2
    assert assign.holders == {}
    assert assign.on_disks == {"embedding": (A,), "middle": (C,), "head": (C,)}
    assert [item.step for item in swarm.replays] == [3, 4]


def test_what_is_whole_between_memory_and_disks_as_of_the_last_step_needs_no_way_back() -> None:
    swarm = training("a", "b", "c", until=4)
    take(swarm, 4, (C, PARAMETERS[1:]))
    lose(swarm, B)
    finish(swarm)
    assign = done(swarm, Assign)[1]
    assert (assign.committed, assign.holders) == (4, {"embedding": (A,)})
    assert not swarm.replays
    assert not told(swarm, RestoredEvent)


def test_parts_of_two_lines_of_the_same_step_are_never_put_together() -> None:
    swarm = training("a", "b", "c", until=4)
    take(swarm, 3, (A, PARAMETERS[:1]))
    lose(swarm, B)
    train_to(swarm, 0)
    swarm.answer_all(lambda event: not isinstance(event, StageReported) or event.step <= 3)
    moment = swarm.machine.context.moment
    assert (moment.step, moment.line > 0) == (3, True)
    take(swarm, 3, (C, PARAMETERS[1:]), line=moment.line)
    assert swarm.machine.context.snapshots.newest_complete() is None
    lose(swarm, C)
    assert swarm.machine.context.committed == 0


def test_a_part_that_comes_back_saves_steps_from_being_done_again() -> None:
    swarm = training("a", "b", "c", steps=9, until=8)
    take(swarm, 7, (A, PARAMETERS[:1]), (B, PARAMETERS[1:]))
    lose(swarm, B)
    swarm.answer_all(lambda event: not isinstance(event, StageReported) or event.step <= 2)
    held = HeldPart(step=StepNumber(7), names=frozenset(PARAMETERS[1:]))
    swarm.give(PeerJoined(offer=make_offer("b"), snapshots=(held,)))
    swarm.pass_time(1.0)
    finish(swarm)
    assert [event.step for event in told(swarm, RestoredEvent)] == [0, 7]
    assert [item.step for item in swarm.replays] == [1, 2, 3, 8]


def test_a_part_that_comes_back_while_an_older_state_is_loaded_is_gone_to_at_once() -> None:
    swarm = training("a", "b", "c", steps=9, until=8)
    take(swarm, 7, (A, PARAMETERS[:1]), (B, PARAMETERS[1:]))
    lose(swarm, B)
    swarm.answer_all(lambda event: isinstance(event, PlanMade))
    assert state(swarm) is RunState.LOADING
    held = HeldPart(step=StepNumber(7), names=frozenset(PARAMETERS[1:]))
    swarm.give(PeerJoined(offer=make_offer("b"), snapshots=(held,)))
    assert state(swarm) is RunState.PLANNING, "what is being loaded is of no use any more"
    finish(swarm)
    assert [event.step for event in told(swarm, RestoredEvent)] == [7]
    assert [item.step for item in swarm.replays] == [8]


def test_two_that_are_lost_together_with_both_copies_of_a_part_cost_the_steps_until_one_is_back() -> None:
    swarm = training("a", "b", "c", "d", steps=9, until=8)
    take(swarm, 7, (A, PARAMETERS[:1]), (B, PARAMETERS[1:]), (C, PARAMETERS[1:]))
    lose(swarm, B)
    lose(swarm, C)
    assert not told(swarm, PausedEvent), "steps are done again while they are away"
    swarm.answer_all(lambda event: not isinstance(event, StageReported) or event.step <= 3)
    swarm.give(PeerJoined(offer=make_offer("c"), snapshots=swarm.held_by(C)))
    finish(swarm)
    assert [event.step for event in told(swarm, RestoredEvent)] == [0, 7]
    assert [item.step for item in swarm.replays] == [1, 2, 3, 4, 8], "the open step was finished first"


def test_a_run_that_began_in_a_store_which_is_gone_waits_for_the_disk_of_a_lost_peer() -> None:
    swarm = training("a", "b", "c", steps=9, until=8)
    swarm.machine.context.began = StepNumber(5)
    take(swarm, 7, (A, PARAMETERS[:1]), (B, PARAMETERS[1:]))
    lose(swarm, B)
    assert state(swarm) is RunState.WAITING
    (paused,) = told(swarm, PausedEvent)
    assert "nor a snapshot to go back to: waits for whoever has one on its disk; b (stage 1) was lost" in paused.reason
    swarm.pass_time(3600.0)
    assert state(swarm) is RunState.WAITING
    swarm.give(PeerJoined(offer=make_offer("b"), snapshots=swarm.held_by(B)))
    finish(swarm)
    assert [item.step for item in swarm.replays] == [8]


def test_evaluations_are_made_once_and_one_that_was_owed_is_made_later() -> None:
    swarm = training("a", "b", "c", steps=6, evaluate_every=2)
    swarm.answer_all(lambda event: not (isinstance(event, StageReported) and event.step == 4 and event.evaluation))
    assert swarm.machine.cycle.open is not None
    assert swarm.machine.cycle.open.evaluation
    lose(swarm, B)
    finish(swarm)
    assert [event.step for event in told(swarm, EvaluationEvent)] == [2, 4, 6]
    evaluated = [item.step for item in done(swarm, StartStep) if item.evaluation]
    assert evaluated == [2, 4, 4, 6]


def test_a_loss_while_weights_are_stored_at_the_end_leads_back_and_to_the_same_end() -> None:
    swarm = training("a", "b", "c", steps=3)
    swarm.answer_all(lambda event: not isinstance(event, PeerStored) or event.peer == A)
    assert swarm.machine.context.state is RunState.FINISHING
    lose(swarm, B)
    finish(swarm)
    assert [item.step for item in swarm.replays] == [1, 2, 3]


def test_an_export_that_a_loss_interrupts_is_of_the_last_step_in_the_journal_when_it_is_made() -> None:
    swarm = training("a", "b", "c", steps=4, until=2)
    swarm.give(ExportAsked())
    swarm.answer_all(lambda event: not isinstance(event, PeerStored))
    lose(swarm, B)
    finish(swarm)
    exports = [item.step for item in done(swarm, AskStore) if item.purpose is StorePurpose.EXPORT]
    assert exports == [3, 3]


def test_who_stops_a_run_that_does_steps_again_gets_the_weights_of_where_it_was() -> None:
    swarm = training("a", "b", "c", until=3)
    lose(swarm, B)
    swarm.give(StopAsked(reason="stopped", keep_weights=True))
    swarm.answer_all()
    assert swarm.ended is not None
    assert "after step 3 of 6; the weights are in" in swarm.ended.reason


def test_who_may_come_back_with_what_saves_much_work_is_waited_for_a_while() -> None:
    swarm = training("a", "b", "c", steps=300, until=250)
    lose(swarm, B, may_return=True)
    (paused,) = told(swarm, PausedEvent)
    assert paused.reason.startswith("nobody here has the state of middle - head after step 250: waits up to ")
    assert "waits up to 10 s for b to come back, then goes back to step 0; b (stage 1) was lost" in paused.reason
    assert str(swarm.machine.waiting()).startswith("is paused: nobody here has the state of")
    assert state(swarm) is RunState.WAITING
    swarm.pass_time(9.9)
    assert state(swarm) is RunState.WAITING
    swarm.pass_time(0.1)
    assert state(swarm) is RunState.PLANNING
    assert told(swarm, ResumedEvent) == [ResumedEvent(reason="the run goes on from step 0")]
    finish(swarm)


def test_a_peer_that_was_seen_to_end_is_not_waited_for() -> None:
    swarm = training("a", "b", "c", steps=300, until=250)
    lose(swarm, B)
    assert state(swarm) is RunState.PLANNING
    assert not told(swarm, PausedEvent)


def test_a_recovery_tells_how_long_each_part_of_it_took() -> None:
    swarm = training("a", "b", "c", until=2)
    lose(swarm, B)
    for wanted, seconds in ((None, 1.0), (lambda event: not isinstance(event, StageReported), 2.0)):
        if wanted is not None:
            swarm.answer_all(wanted)
        swarm.now += seconds
    while not told(swarm, RecoveredEvent):
        swarm.now += 0.25
        swarm.answer(0)
    (recovered,) = told(swarm, RecoveredEvent)
    assert (recovered.step, recovered.replayed_steps) == (3, 2)
    parts = (recovered.planned_seconds, recovered.moved_seconds, recovered.replayed_seconds, recovered.step_seconds)
    assert recovered.noticed_seconds == 0.5
    assert recovered.seconds == 0.5 + sum(parts)
    assert all(part >= 0.0 for part in parts)
    finish(swarm)
    assert len(told(swarm, RecoveredEvent)) == 1


def test_nothing_is_written_for_a_step_that_is_done_again() -> None:
    swarm = training("a", "b", "c", until=3)
    before = len(done(swarm, WriteCommit))
    lose(swarm, B)
    swarm.answer_all(lambda event: not isinstance(event, StageReported) or event.step <= 3)
    assert len(done(swarm, WriteCommit)) == before


def away(swarm: SimulatedSwarm, peer: PeerId, *, reported: int = 0) -> Held:
    """What the peer would say that it still has."""
    context = swarm.machine.context
    names = context.holdings.names_of(peer)
    step = context.committed - (1 if reported else 0)
    return Held(step=StepNumber(step), generation=context.generation, reported_step=StepNumber(reported), names=names)


def test_a_peer_that_is_back_before_others_were_told_to_drop_what_they_hold_spares_the_way_back() -> None:
    swarm = training("a", "b", "c", until=4)
    held = away(swarm, B)
    lose(swarm, B)
    swarm.pass_time(2.0)
    assert swarm.machine.context.committed == 0, "the run has gone back"
    assert state(swarm) is RunState.PLANNING
    swarm.answers.clear()  # the plan that was being made is of no use
    swarm.give(PeerJoined(offer=make_offer("b"), held=held))
    swarm.live[B] = 4
    assert swarm.machine.context.committed == 4
    swarm.pass_time(2.0)
    swarm.answer_all(lambda event: isinstance(event, PlanMade))
    (assign,) = done(swarm, Assign)[-1:]
    assert assign.committed == 4
    assert not assign.stale
    train_to(swarm, 6)
    assert not told(swarm, RestoredEvent)
    assert [commit.step for commit in swarm.commits] == [1, 2, 3, 4, 5, 6]
    assert not swarm.replays


def test_a_peer_that_is_back_later_drops_what_it_holds() -> None:
    swarm = training("a", "b", "c", until=4)
    held = away(swarm, B)
    lose(swarm, B)
    swarm.pass_time(2.0)
    swarm.answer_all(lambda event: isinstance(event, PlanMade))
    assert state(swarm) is RunState.LOADING
    swarm.give(PeerJoined(offer=make_offer("b"), held=held))
    assert swarm.machine.context.committed == 0
    assert [item.peers for item in done(swarm, ReleaseState)][-1] == (B,)


def test_a_peer_that_is_back_while_another_is_still_away_changes_nothing_yet() -> None:
    swarm = training("a", "b", "c", until=4)
    of_a, of_b = away(swarm, A), away(swarm, B)
    lose(swarm, A)
    lose(swarm, B)
    swarm.pass_time(2.0)
    assert state(swarm) is RunState.PLANNING
    swarm.give(PeerJoined(offer=make_offer("b"), held=of_b))
    assert swarm.machine.context.committed == 0
    swarm.give(PeerJoined(offer=make_offer("a"), held=of_a))
    assert swarm.machine.context.committed == 4
