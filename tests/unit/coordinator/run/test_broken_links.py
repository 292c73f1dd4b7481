"""Which links count as broken, and for how long."""

from __future__ import annotations

from atoll.coordinator.planning.avoidance import describe
from atoll.coordinator.run.broken_links import BrokenLinks, BrokenLinkSettings
from atoll.protocol.ids import PeerId

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
AB, BC = frozenset((A, B)), frozenset((B, C))
SETTINGS = BrokenLinkSettings(faults=2, window_seconds=100.0, forget_seconds=60.0, longest_forget_seconds=200.0)


def test_one_fault_is_chance_and_two_are_a_broken_link_whoever_tells() -> None:
    links = BrokenLinks(SETTINGS)
    assert not links.faulted(A, B, 0.0)
    assert not links.faulted(B, C, 1.0)
    assert links.faulted(B, A, 5.0)
    assert links.broken(5.0) == {AB}


def test_faults_that_lie_far_apart_do_not_add_up() -> None:
    links = BrokenLinks(SETTINGS)
    assert not links.faulted(A, B, 0.0)
    assert not links.faulted(A, B, 101.0)


def test_a_pair_is_forgotten_after_a_while_which_grows() -> None:
    links = BrokenLinks(SETTINGS)
    links.faulted(A, B, 0.0)
    links.faulted(A, B, 1.0)
    assert links.broken(60.0) == {AB}
    assert not links.broken(61.0)
    assert links.faulted(A, B, 62.0), "it has not become better"
    assert links.broken(62.0 + 119.0) == {AB}
    assert links.faulted(A, B, 63.0)
    assert not links.broken(63.0 + 200.0)


def test_a_probe_that_shows_the_link_frees_it_and_one_more_fault_breaks_it() -> None:
    links = BrokenLinks(SETTINGS)
    links.faulted(A, B, 0.0)
    links.faulted(A, B, 1.0)
    links.shown([AB, BC])
    assert not links.broken(2.0)
    assert links.faulted(A, B, 3.0)


def test_a_peer_that_is_gone_takes_its_links_with_it() -> None:
    links = BrokenLinks(SETTINGS)
    for when in (0.0, 1.0):
        links.faulted(A, B, when)
        links.faulted(B, C, when)
    links.forget(A)
    assert links.broken(2.0) == {BC}


def test_pauses_grow_until_a_step_is_committed() -> None:
    links = BrokenLinks(BrokenLinkSettings(pause_seconds=2.0, longest_pause_seconds=10.0))
    links.faulted(A, B, 3.0)
    assert links.trouble_since == 3.0
    assert [links.next_pause_seconds() for _ in range(5)] == [2.0, 4.0, 8.0, 10.0, 10.0]
    links.committed()
    assert links.next_pause_seconds() == 2.0
    assert links.trouble_since is None


def test_pairs_are_named_in_order() -> None:
    assert describe([BC, AB]) == "a - b and b - c"
