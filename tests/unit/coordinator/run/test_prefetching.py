"""Spares have the newest complete snapshot on their disks before anybody is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.coordinator.events import SnapshotEvent
from atoll.coordinator.run import prefetching
from atoll.coordinator.run.events import PeerGone, PeerJoined, PlanMade, SnapshotCopied, SnapshotTaken
from atoll.coordinator.run.instructions import Assign, CopySnapshot
from atoll.coordinator.run.prefetching import MOST_FAILURES, MOST_PREPARED
from atoll.coordinator.run.schedule import LearningRateSchedule
from atoll.coordinator.run.states import RunSettings, RunState
from atoll.protocol.ids import PeerId
from support.simulated_peers import PARAMETERS, SimulatedSwarm, make_offer

A, B, C, D = (PeerId(name) for name in "abcd")


def training(*names: str, until: int = 2, copies: int = 0) -> SimulatedSwarm:
    """A run of two stages, with a snapshot of step 2 that is complete."""
    settings = RunSettings(steps=100, schedule=LearningRateSchedule(highest=0.1, steps=100), snapshot_every=2, copies=copies)
    swarm = SimulatedSwarm(settings)
    swarm.start(*names)
    train_to(swarm, until)
    return swarm


def train_to(swarm: SimulatedSwarm, step: int) -> None:
    """Commit steps up to this one; all that is said of snapshots is heard."""
    while swarm.machine.context.committed < step:
        swarm.now += 0.1
        swarm.answer(0)
    swarm.answer_all(lambda event: isinstance(event, SnapshotTaken | SnapshotCopied))


def wait(swarm: SimulatedSwarm, times: int = 20) -> None:
    """Time passes, and copies arrive."""
    for _ in range(times):
        swarm.pass_time(0.1)
        swarm.answer_all(lambda event: isinstance(event, SnapshotCopied))


def copies(swarm: SimulatedSwarm) -> list[tuple[int, str, tuple[str, ...]]]:
    return [(item.step, item.copy.target, item.copy.names) for item in swarm.done if isinstance(item, CopySnapshot)]


def prepared(swarm: SimulatedSwarm, step: int) -> set[PeerId]:
    """Whose disk has everything."""
    return {peer for peer, disk in swarm.disks.items() if disk.get(step, frozenset()) >= set(PARAMETERS)}  # type: ignore[call-overload]


def test_a_spare_fetches_what_it_lacks_though_no_copies_are_wanted() -> None:
    swarm = training("a", "b", "c")
    assert copies(swarm) == []
    wait(swarm)
    assert prepared(swarm, 2) == {C}
    assert sorted(name for _, target, names in copies(swarm) for name in names) == sorted(PARAMETERS)


def test_whoever_joins_is_prepared_without_waiting_for_the_next_snapshot() -> None:
    swarm = training("a", "b")
    wait(swarm)
    assert copies(swarm) == []
    swarm.give(PeerJoined(offer=make_offer("c")))
    wait(swarm)
    assert prepared(swarm, 2) == {C}


def test_of_a_lost_peer_s_state_nothing_has_to_be_sent_then() -> None:
    swarm = training("a", "b", "c")
    wait(swarm)
    swarm.give(PeerGone(peer=B, reason="its connection ended"))
    swarm.forget(B)
    swarm.pass_time(1.0)
    swarm.answer_all(lambda event: isinstance(event, PlanMade))
    assign = next(item for item in reversed(swarm.done) if isinstance(item, Assign))
    assert assign.committed == 2
    assert assign.plan.peers == (A, C)
    assert all(C in assign.on_disks[name] for name in ("middle", "head"))


def test_the_copies_that_make_a_snapshot_safe_come_first() -> None:
    swarm = training("a", "b", "c", "d", copies=1)
    asked = copies(swarm)
    assert [target for _, target, _ in asked] == ["c", "d"]
    wait(swarm)
    assert prepared(swarm, 2) == {C, D}
    assert len(copies(swarm)) == 4, "each has fetched what only the other had, and nothing twice"


def test_a_slice_is_copied_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "SLICE_BYTES", 1)
    swarm = training("a", "b", "c")
    swarm.pass_time(0.1)
    swarm.pass_time(0.1)
    assert len(copies(swarm)) == 1, "the next follows when this one is there"
    wait(swarm)
    assert [len(names) for _, _, names in copies(swarm)] == [1, 1, 1]
    assert prepared(swarm, 2) == {C}


def test_a_few_spares_are_prepared_and_not_all() -> None:
    swarm = training("a", "b", *(f"spare-{number}" for number in range(MOST_PREPARED + 2)))
    wait(swarm)
    assert len(prepared(swarm, 2)) == MOST_PREPARED


def test_one_whose_disk_is_full_is_asked_a_few_times_only() -> None:
    swarm = training("a", "b", "c")
    swarm.full.add(C)
    wait(swarm)
    assert len(copies(swarm)) == MOST_FAILURES
    assert swarm.machine.context.state is RunState.TRAINING


def test_one_without_room_is_not_asked_at_all() -> None:
    swarm = training("a", "b")
    swarm.give(PeerJoined(offer=make_offer("c"), disk_bytes=4))
    wait(swarm)
    assert copies(swarm) == []


def test_a_source_that_is_lost_is_replaced_by_another() -> None:
    swarm = training("a", "b", "c", "d", copies=1)
    swarm.pass_time(0.1)
    (_, _, _), (_, _, _), *late = copies(swarm)
    assert late
    swarm.answers = [event for event in swarm.answers if not isinstance(event, SnapshotCopied)]
    for item in [item for item in swarm.done if isinstance(item, CopySnapshot)][2:]:
        failure = f"{item.copy.source} is gone"
        swarm.disks[item.copy.target][item.step] -= set(item.copy.names)
        swarm.give(SnapshotCopied(peer=item.copy.target, step=item.step, source=item.copy.source, failure=failure))
    wait(swarm)
    assert prepared(swarm, 2) == {C, D}


def interval(swarm: SimulatedSwarm, until: int, failure: str = "") -> None:
    """Training goes on to the snapshot of a step; one slice arrives meanwhile, or fails."""
    swarm.pass_time(0.1)
    train_without_slices(swarm, until)
    slices = [event for event in swarm.answers if isinstance(event, SnapshotCopied)]
    if slices:
        swarm.answers.remove(slices[0])
        swarm.give(replace(slices[0], failure=failure))


def train_without_slices(swarm: SimulatedSwarm, step: int) -> None:
    def other(event: object) -> bool:
        return not isinstance(event, SnapshotCopied)

    while swarm.machine.context.committed < step:
        swarm.now += 0.1
        swarm.answer(next(index for index, event in enumerate(swarm.answers) if other(event)))
    swarm.answer_all(lambda event: isinstance(event, SnapshotTaken))


def test_a_spare_behind_a_slow_line_has_a_whole_snapshot_in_the_end_and_the_run_goes_back_to_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetching, "SLICE_BYTES", 1)
    swarm = training("a", "b", "c")
    for step in (4, 6, 8):
        interval(swarm, step)
    assert prepared(swarm, 2) == {C}
    assert {step for step, _, _ in copies(swarm)} == {2}
    interval(swarm, 10)
    assert copies(swarm)[-1][0] == 8, "the next one is the newest there was"
    interval(swarm, 12)
    assert 2 in swarm.disks[A], "until it has another one as a whole"
    swarm.give(PeerGone(peer=B, reason="its connection ended"))
    swarm.forget(B)
    swarm.pass_time(1.0)
    swarm.answer_all(lambda event: isinstance(event, PlanMade))
    assign = next(item for item in reversed(swarm.done) if isinstance(item, Assign))
    assert (assign.committed, assign.plan.peers) == (2, (A, C))


def test_where_a_newer_snapshot_outlives_a_loss_that_one_is_fetched_and_the_older_one_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetching, "SLICE_BYTES", 1)
    swarm = training("a", "b", "c", "d", copies=1)
    for step in range(4, 4 + 2 * (MOST_FAILURES + 2), 2):
        swarm.pass_time(0.1)
        late = [event for event in swarm.answers if isinstance(event, SnapshotCopied)]
        assert {event.step for event in late} == {step - 2}, "each spare fetches what it lacks of the newest"
        train_without_slices(swarm, step)
        swarm.answer_all(lambda event, old=step - 2: isinstance(event, SnapshotCopied) and event.step > old)
        for event in late:
            swarm.answers.remove(event)
            swarm.give(replace(event, failure="the snapshot is not needed any more"))
    assert all(not event.failure for event in swarm.told if isinstance(event, SnapshotEvent))


def test_a_slice_that_does_not_come_is_told() -> None:
    swarm = training("a", "b", "c")
    interval(swarm, 4, failure="the disk is full")
    (event,) = [event for event in swarm.told if isinstance(event, SnapshotEvent) and event.failure]
    assert event.failure.startswith("c, a spare, could not fetch what ")
    assert event.failure.endswith(" has: the disk is full")
