"""Snapshots of a run, by its state machine: when they are taken, who copies what, which are kept, whatever is lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.coordinator.events import SnapshotEvent, StepEvent
from atoll.coordinator.run.events import PeerGone, PeerJoined, SnapshotCopied, SnapshotTaken, StageReported
from atoll.coordinator.run.instructions import CopySnapshot, KeepSnapshots, SendCommit
from atoll.coordinator.run.schedule import LearningRateSchedule
from atoll.coordinator.run.snapshots import Moment
from atoll.coordinator.run.states import RunSettings, RunState
from atoll.protocol.ids import PeerId, StepNumber
from support.simulated_peers import SimulatedSwarm, make_offer

A, B, C, D = (PeerId(name) for name in "abcd")


def make_swarm(*names: str, steps: int = 8, every: int | None = 2, copies: int = 0) -> SimulatedSwarm:
    """A run of two stages that begins its first step."""
    schedule = LearningRateSchedule(highest=0.1, steps=steps)
    swarm = SimulatedSwarm(RunSettings(steps=steps, schedule=schedule, snapshot_every=every, copies=copies))
    swarm.start(*names)
    return swarm


def train_to(swarm: SimulatedSwarm, step: int, *, answers: bool = True) -> None:
    """Commit steps up to this one, and give what peers say of snapshots."""
    while swarm.machine.context.committed < step:
        swarm.now += 0.1
        chosen = [
            i for i, event in enumerate(swarm.answers) if answers or not isinstance(event, SnapshotTaken | SnapshotCopied)
        ]
        if chosen:
            swarm.answer(chosen[0])
        else:
            swarm.pass_time(1.0)
    if answers:
        swarm.answer_all(lambda event: isinstance(event, SnapshotTaken | SnapshotCopied))


def asked(swarm: SimulatedSwarm) -> list[int]:
    """The steps of which a snapshot was ordered."""
    return [item.step for item in swarm.done if isinstance(item, SendCommit) and item.snapshot]


def kept(swarm: SimulatedSwarm) -> list[tuple[int, ...]]:
    return [item.steps for item in swarm.done if isinstance(item, KeepSnapshots)]


def copies(swarm: SimulatedSwarm) -> list[tuple[int, str, str]]:
    return [(item.step, item.copy.source, item.copy.target) for item in swarm.done if isinstance(item, CopySnapshot)]


def told(swarm: SimulatedSwarm) -> list[SnapshotEvent]:
    return [event for event in swarm.told if isinstance(event, SnapshotEvent)]


def lose(swarm: SimulatedSwarm, peer: PeerId) -> None:
    swarm.give(PeerGone(peer=peer, reason="its connection ended"))
    swarm.forget(peer)


def test_every_so_many_steps_but_not_of_the_last_one() -> None:
    swarm = make_swarm("a", "b")
    swarm.answer_all()
    assert asked(swarm) == [2, 4, 6]
    assert [(event.step, event.bytes) for event in told(swarm)] == [(2, 16), (4, 16), (6, 16)]
    assert kept(swarm) == [(4,), (6,), ()]


def test_the_first_one_shows_what_it_costs_and_the_next_follows_when_it_pays() -> None:
    swarm = make_swarm("a", "b", steps=200, every=None)
    train_to(swarm, 190)
    # A stall of 0.01 s and a loss expected every hour: about 8.5 s, of steps that take 0.3 s each here.
    first, second, *_ = asked(swarm)
    assert first == 2
    assert 20 <= second - first <= 36


def test_losses_that_were_seen_make_snapshots_more_frequent() -> None:
    swarm = make_swarm("a", "b", "c", steps=400, every=None)
    train_to(swarm, 100)
    rare = asked(swarm)[2] - asked(swarm)[1]
    for _ in range(8):
        lose(swarm, B)
        swarm.give(PeerJoined(offer=make_offer("b"), snapshots=swarm.held_by(B)))
        train_to(swarm, swarm.machine.context.journal_step + 1)
    train_to(swarm, 390)
    assert asked(swarm)[-1] - asked(swarm)[-2] < rare


def test_no_snapshot_begins_while_one_is_under_way() -> None:
    swarm = make_swarm("a", "b", every=1)
    train_to(swarm, 4, answers=False)
    assert asked(swarm) == [1]
    swarm.answer_all(lambda event: isinstance(event, SnapshotTaken))
    train_to(swarm, 5)
    assert asked(swarm) == [1, 5]


def test_copies_are_kept_by_spares_and_make_a_snapshot_safe() -> None:
    swarm = make_swarm("a", "b", "c", "d", copies=1)
    train_to(swarm, 2)
    assert copies(swarm) == [(2, "a", "c"), (2, "b", "d")]
    moment = Moment(step=swarm.machine.context.committed)
    assert swarm.machine.context.snapshots.newest_safe() == moment
    lose(swarm, B)
    assert swarm.machine.context.committed == 2
    swarm.answer_all()
    assert not swarm.replays


def test_a_copy_that_fails_is_given_to_another_peer() -> None:
    swarm = make_swarm("a", "b", "c", "d", copies=1)
    swarm.full.add(C)
    train_to(swarm, 2)
    assert copies(swarm) == [(2, "a", "c"), (2, "b", "d"), (2, "a", "d")]
    assert "c could not copy the part of a: its disk is full" in [event.failure for event in told(swarm)]
    assert swarm.machine.context.snapshots.newest_safe() is not None


def test_the_last_good_snapshot_stays_when_the_next_fails() -> None:
    swarm = make_swarm("a", "b")
    train_to(swarm, 2)
    swarm.full.add(B)
    train_to(swarm, 5)
    assert swarm.machine.context.snapshots.newest_complete() == Moment(step=asked(swarm)[0])  # type: ignore[arg-type]
    assert not kept(swarm)
    assert told(swarm)[-1].failure == "b (stage 1) could not take its part: its disk is full"
    lose(swarm, A)
    swarm.give(PeerJoined(offer=make_offer("a"), snapshots=swarm.held_by(A)))
    train_to(swarm, 7)
    assert [again.step for again in swarm.replays] == [3, 4, 5]


def test_peers_without_disks_are_asked_more_and_more_rarely() -> None:
    swarm = make_swarm("a", "b", steps=100, every=None)
    swarm.full |= {A, B}
    train_to(swarm, 99)
    assert asked(swarm) == [2, 6, 14, 30, 62]
    assert swarm.machine.context.snapshots.newest_complete() is None


def test_a_snapshot_that_nobody_answers_for_is_given_up_and_others_follow() -> None:
    swarm = make_swarm("a", "b", steps=20)
    train_to(swarm, 3, answers=False)
    swarm.answers = [event for event in swarm.answers if not isinstance(event, SnapshotTaken)]
    swarm.pass_time(swarm.machine.context.settings.deadlines.snapshot_seconds)
    assert told(swarm)[-1].failure == "nothing was heard from a and b for 600 s"
    train_to(swarm, 8)
    assert asked(swarm)[1:] == [4, 6, 8]


def test_a_safe_snapshot_is_kept_until_a_newer_one_is_safe() -> None:
    swarm = make_swarm("a", "b", "c", "d", copies=1, steps=20)
    train_to(swarm, 2)
    swarm.full |= {C, D}
    train_to(swarm, 5)
    # The copies went to those with a stage: nobody else has room.
    swarm.full |= {A, B}
    train_to(swarm, 7)
    assert Moment(step=swarm.commits[3].step) == swarm.machine.context.snapshots.newest_safe()
    assert swarm.machine.context.snapshots.newest_complete() is not None


ACTIONS = st.one_of(
    st.tuples(st.just("answer"), st.integers(0, 50)),
    st.tuples(st.just("answer"), st.integers(0, 50)),
    st.tuples(st.just("many"), st.integers(1, 30)),
    st.tuples(st.just("join"), st.sampled_from("abcde")),
    st.tuples(st.just("lose"), st.sampled_from("abcde")),
    st.tuples(st.just("silent"), st.sampled_from("abcde")),
    st.tuples(st.just("erase"), st.sampled_from("abcde")),
    st.tuples(st.just("full"), st.sampled_from("abcde")),
    st.tuples(st.just("free"), st.sampled_from("abcde")),
    st.tuples(st.just("time"), st.sampled_from([0.3, 1.0])),
)


def act(swarm: SimulatedSwarm, kind: str, value: object) -> None:
    roster, peer = swarm.machine.context.roster, PeerId(str(value))
    if kind == "answer" and swarm.answers and isinstance(value, int):
        swarm.answer(value % len(swarm.answers))
    elif kind == "many" and isinstance(value, int):
        for _ in range(min(value, len(swarm.answers))):
            swarm.now += 0.1
            swarm.answer(0)
    elif kind == "join" and not roster.is_present(peer):
        swarm.give(PeerJoined(offer=make_offer(peer), snapshots=swarm.held_by(peer)))
    elif kind in ("lose", "silent"):
        swarm.give(PeerGone(peer=peer, reason="its connection ended", may_return=kind == "silent"))
        swarm.forget(peer)
    elif kind == "erase" and not roster.is_present(peer):
        swarm.disks.pop(peer, None)
    elif kind == "full":
        swarm.full.add(peer)
    elif kind == "free":
        swarm.full.discard(peer)
    elif kind == "time" and isinstance(value, float):
        swarm.pass_time(value)


@settings(max_examples=300)
@given(actions=st.lists(ACTIONS, max_size=60), every=st.sampled_from([1, 2, 3, None]), copied=st.integers(0, 2))
def test_whatever_is_lost_the_run_reaches_its_end_with_each_step_once(
    actions: list[tuple[str, object]], every: int | None, copied: int
) -> None:
    swarm = make_swarm("a", "b", "c", steps=7, every=every, copies=copied)
    for kind, value in actions:
        act(swarm, kind, value)
    for name in "abc":
        act(swarm, "join", name)
    for _ in range(20):
        swarm.answer_all()
        swarm.pass_time(1.0)
    assert swarm.machine.context.state is RunState.FINISHED, str(swarm.machine.waiting())
    assert [commit.step for commit in swarm.commits] == list(range(1, 8))
    assert [event.step for event in swarm.told if isinstance(event, StepEvent)] == list(range(1, 8))
    assert [commit.samples for commit in swarm.commits] == [f"hash-{step}" for step in range(1, 8)]
    for again in swarm.replays:
        assert (again.loss, again.samples) == (swarm.commits[again.step - 1].loss, swarm.commits[again.step - 1].samples)


def test_a_stage_report_of_a_step_that_is_done_again_is_taken_only_under_its_generation() -> None:
    swarm = make_swarm("a", "b", "c")
    train_to(swarm, 1)
    late = next(event for event in swarm.answers if isinstance(event, StageReported) and event.peer == A)
    lose(swarm, B)
    swarm.give(late)
    swarm.answer_all()
    assert [commit.step for commit in swarm.commits] == list(range(1, 9))


def test_what_a_peer_finds_damaged_on_its_disk_is_told_and_counts_no_more() -> None:
    swarm = make_swarm("a", "b")
    train_to(swarm, 3)
    swarm.give(SnapshotTaken(peer=B, step=StepNumber(2), failure="2/b.safetensors is damaged"))
    (event,) = [event for event in told(swarm) if event.failure]
    assert event.step == 2
    assert event.failure == "what b (stage 1) had of it on its disk is of no use: 2/b.safetensors is damaged"
    assert swarm.machine.context.snapshots.newest_complete() is None
