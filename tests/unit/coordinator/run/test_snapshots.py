"""The registry of snapshots: what is complete, what is safe, and what may be deleted, after any sequence of events."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.coordinator.run.rollback import GoOn, GoTo, Situation, Wait, decide
from atoll.coordinator.run.snapshots import FIRST_VALUES, THE_STORE, HeldPart, Moment, Part, Snapshots
from atoll.protocol.ids import PeerId, StepNumber

A, B, C = (PeerId(name) for name in "abc")
NAMES = frozenset({"x", "y"})


def at(step: int, line: int = 0) -> Moment:
    return Moment(step=StepNumber(step), line=line)


def part(step: int, *names: str, line: int = 0) -> Part:
    return Part(moment=at(step, line), names=frozenset(names), num_bytes=10)


def held(step: int, *names: str) -> HeldPart:
    return HeldPart(step=StepNumber(step), names=frozenset(names), num_bytes=10)


def registry(copies: int = 0) -> Snapshots:
    """Of two peers that are here, with a name each of the snapshot of step 4."""
    snapshots = Snapshots(copies)
    snapshots.essential = NAMES
    for peer in (A, B):
        snapshots.joined(peer, ())
    snapshots.ordered(at(4))
    snapshots.taken(A, part(4, "x"))
    snapshots.taken(B, part(4, "y"))
    return snapshots


def test_a_snapshot_is_complete_when_all_parts_are_here() -> None:
    snapshots = registry()
    assert snapshots.newest_complete() == at(4)
    assert snapshots.holders(at(4)) == {"x": (A,), "y": (B,)}
    snapshots.gone(B)
    assert snapshots.newest_complete() is None
    assert snapshots.missing(at(4)) == ("y",)
    assert snapshots.newest_complete(also_away=True) == at(4)
    snapshots.joined(B, (held(4, "y"),))
    assert snapshots.newest_complete() == at(4)


def test_who_comes_back_with_an_empty_disk_has_nothing() -> None:
    snapshots = registry()
    snapshots.gone(B)
    snapshots.joined(B, ())
    assert snapshots.newest_complete(also_away=True) is None


def test_safe_means_that_each_name_has_its_copies() -> None:
    snapshots = registry(copies=1)
    assert snapshots.newest_safe() is None
    snapshots.taken(A, part(4, "y"))
    assert snapshots.newest_safe() is None
    snapshots.taken(B, part(4, "x"))
    assert snapshots.newest_safe() == at(4)
    assert snapshots.num_bytes(at(4)) == 40
    assert snapshots.holders(at(4)) == {"x": (A, B), "y": (A, B)}


def test_a_part_of_a_step_that_was_done_twice_counts_only_if_it_is_known_which_time() -> None:
    snapshots = registry()
    snapshots.gone(A)
    snapshots.gone(B)
    snapshots.ordered(at(4, line=1))
    snapshots.joined(C, (held(4, "x", "y"),))
    assert snapshots.newest_complete() is None
    snapshots.joined(A, (held(4, "x"),))
    snapshots.joined(B, (held(4, "y"),))
    assert snapshots.newest_complete() == at(4)
    snapshots.taken(B, part(4, "y", line=1))
    assert snapshots.newest_complete() is None


def test_a_snapshot_that_nobody_ordered_does_not_count() -> None:
    snapshots = registry()
    snapshots.joined(C, (held(9, "x", "y"),))
    assert snapshots.newest_complete() == at(4)


def test_what_an_earlier_coordinator_wrote_down_counts_when_its_peers_are_back() -> None:
    earlier = registry()
    snapshots = Snapshots()
    snapshots.essential = NAMES
    snapshots.remember([at(4)], earlier.parts())
    assert snapshots.newest_complete() is None
    snapshots.joined(A, (held(4, "x"),))
    snapshots.joined(B, (held(4, "y"),))
    assert snapshots.newest_complete() == at(4)


EVENTS = st.one_of(
    st.tuples(st.just("taken"), st.sampled_from("abc"), st.integers(1, 6), st.sampled_from(["x", "y", "xy"])),
    st.tuples(st.just("gone"), st.sampled_from("abc"), st.just(0), st.just("")),
    st.tuples(st.just("joined"), st.sampled_from("abc"), st.just(0), st.just("")),
    st.tuples(st.just("rotate"), st.just("a"), st.just(0), st.just("")),
)


@settings(max_examples=300)
@given(events=st.lists(EVENTS, max_size=60), copies=st.integers(0, 2))
def test_rotation_never_takes_the_last_good_snapshot(events: list[tuple[str, str, int, str]], copies: int) -> None:
    snapshots = Snapshots(copies)
    snapshots.essential = NAMES
    disks: dict[PeerId, dict[int, frozenset[str]]] = {peer: {} for peer in (A, B, C)}
    here: set[PeerId] = set()
    for kind, name, step, names in events:
        peer = PeerId(name)
        if kind == "taken" and peer in here:
            snapshots.ordered(at(step))
            snapshots.taken(peer, part(step, *names))
            disks[peer][step] = disks[peer].get(step, frozenset()) | frozenset(names)
        elif kind == "gone":
            here.discard(peer)
            snapshots.gone(peer)
        elif kind == "joined" and peer not in here:
            here.add(peer)
            snapshots.joined(peer, [held(at_step, *found) for at_step, found in disks[peer].items()])
        elif kind == "rotate":
            complete, safe = snapshots.newest_complete(), snapshots.newest_safe()
            keep = snapshots.worth_keeping()
            snapshots.dropped(keep)
            for other in here:
                disks[other] = {at_step: found for at_step, found in disks[other].items() if at_step in keep}
            assert (snapshots.newest_complete(), snapshots.newest_safe()) == (complete, safe)
        for moment in (snapshots.newest_complete(), snapshots.newest_safe()):
            if moment is not None:
                found = [disks[other].get(moment.step, frozenset()) for other in here]
                assert frozenset().union(*found) >= NAMES


def situation(stands: int, *, covered: bool, patience: float = 0.0, began: int = 0) -> Situation:
    """A step takes two seconds; for what saves more than a minute it pays to wait for ``patience``."""
    return Situation(
        stands=at(stands),
        covered=covered,
        began=began,
        step_seconds=2.0,
        patience_seconds=lambda saved: patience if saved > 60.0 else 0.0,
    )


def test_nothing_lost_nothing_done() -> None:
    assert decide(situation(7, covered=True), registry(), 100.0) == GoOn()


def test_a_run_that_does_steps_again_goes_to_a_later_snapshot() -> None:
    assert decide(situation(2, covered=True), registry(), 100.0) == GoTo(moment=at(4))


def test_what_costs_little_is_done_at_once_and_what_costs_much_after_a_wait() -> None:
    assert decide(situation(34, covered=False, patience=20.0), registry(), 100.0) == GoTo(moment=at(4))
    assert decide(situation(35, covered=False, patience=20.0), registry(), 100.0) == Wait(until=120.0, otherwise=at(4))


def with_a_later_one_on_the_disk_of_c() -> Snapshots:
    """C, which is away, has a part of the snapshot of step 6; that of step 4 is complete without it."""
    snapshots = registry()
    snapshots.taken(A, part(6, "x"))
    snapshots.taken(C, part(6, "y"))
    return snapshots


def test_nobody_is_waited_for_who_has_a_later_snapshot_on_its_disk() -> None:
    snapshots = with_a_later_one_on_the_disk_of_c()
    assert snapshots.newest_complete(also_away=True) == at(6)
    assert decide(situation(400, covered=False), snapshots, 100.0) == GoTo(moment=at(4))


def test_a_run_that_has_nothing_to_go_back_to_waits_for_a_disk() -> None:
    snapshots = with_a_later_one_on_the_disk_of_c()
    began = situation(8, covered=False, began=5)
    assert decide(began, snapshots, 100.0) == Wait(until=math.inf, otherwise=None)
    snapshots.damaged(C, StepNumber(6))
    assert decide(began, snapshots, 100.0) == GoTo(moment=at(4)), "there is nobody to hope for"


def test_without_a_snapshot_it_is_the_first_values() -> None:
    empty = Snapshots()
    empty.essential = NAMES
    assert decide(situation(4, covered=False), empty, 100.0) == GoTo(moment=FIRST_VALUES)


def test_what_may_have_been_overwritten_without_a_word_does_not_count_after_a_restart() -> None:
    earlier = registry()
    snapshots = Snapshots()
    snapshots.essential = NAMES
    snapshots.remember([at(4), at(4, line=7)], earlier.parts())
    snapshots.joined(A, (held(4, "x"),))
    snapshots.joined(B, (held(4, "y"),))
    assert snapshots.newest_complete() is None


def test_a_disk_that_nobody_knows_does_not_count_for_a_step_that_was_done_again() -> None:
    snapshots = Snapshots()
    snapshots.essential = NAMES
    snapshots.redone_until = StepNumber(8)
    snapshots.ordered(at(8, line=5))
    snapshots.ordered(at(9, line=5))
    snapshots.joined(C, (held(9, "x", "y"),))
    assert snapshots.newest_complete() == at(9, line=5), "that step was done once"
    snapshots.joined(C, ())
    snapshots.joined(A, (held(8, "x", "y"),))
    assert snapshots.newest_complete() is None
    snapshots.stored = at(8, line=5)
    snapshots.joined(THE_STORE, (held(8, "x", "y"),))
    assert snapshots.newest_complete() == at(8, line=5), "what is in the store was put there"
