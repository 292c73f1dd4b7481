"""Admission and leases: each refusal says what to do; a silent peer is noticed, a stopped coordinator blames nobody."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from atoll.coordinator.sessions.membership import Introduction, Member, Membership, Refusal, Taken
from atoll.protocol.channel import PROTOCOL_VERSION
from atoll.protocol.ids import PeerId

HERE = "ipv4:127.0.0.1:50000"

GOOD = Introduction(
    protocol_version=PROTOCOL_VERSION,
    version="0.1.0",
    name="a",
    address="127.0.0.1:4000",
    device="cpu",
    threads=1,
    memory_bytes=10**9,
    flops_per_second=1e9,
)


def admit(membership: Membership, came_from: str = HERE, now: float = 0.0, **changes: Any) -> Member | Refusal | Taken:
    return membership.admit(dataclasses.replace(GOOD, **changes), came_from, "0.1.0", now)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"protocol_version": 7, "version": "9.0"},
            f"protocol {PROTOCOL_VERSION} (atoll 0.1.0), the peer protocol 7 (atoll 9.0); install",
        ),
        ({"name": ""}, "--name"),
        ({"name": "a b"}, "'a b' is not a name; give --name"),
        ({"flops_per_second": float("nan")}, "atoll-peer bench"),
        ({"memory_bytes": 0}, "--max-memory"),
        ({"address": "nonsense"}, "is not HOST:PORT"),
        ({"address": "0.0.0.0:4000"}, "cannot dial 0.0.0.0:4000; give --advertise"),
        ({"address": "[::]:4000"}, "cannot dial [::]:4000; give --advertise"),
        ({"address": "10.0.0.1:0"}, "cannot dial 10.0.0.1:0; give --advertise"),
    ],
)
def test_a_refusal_says_what_to_do(changes: dict[str, Any], sentence: str) -> None:
    verdict = admit(Membership(0.0), **changes)
    assert isinstance(verdict, Refusal)
    assert sentence in verdict.reason
    assert not verdict.again


@pytest.mark.parametrize("came_from", ["ipv4:10.0.0.7:5000", "ipv6:%5B2001:db8::1%5D:5000", "ipv6:[::ffff:10.0.0.7]:5000"])
def test_a_loopback_address_from_another_machine_is_refused_with_the_flags(came_from: str) -> None:
    verdict = admit(Membership(0.0), came_from)
    assert isinstance(verdict, Refusal)
    assert "--advertise" in verdict.reason


@pytest.mark.parametrize("came_from", [HERE, "ipv6:%5B::1%5D:5000", "unix:"])
def test_a_peer_on_this_machine_is_admitted(came_from: str) -> None:
    assert isinstance(admit(Membership(0.0), came_from), Member)


def test_a_name_is_given_once() -> None:
    membership = Membership(0.0)
    first = admit(membership)
    assert isinstance(first, Member)
    second = admit(membership, now=1.0, address="127.0.0.1:4001")
    assert isinstance(second, Taken)
    assert second.holder is first
    assert not second.same_process
    sentence = "a peer named a is in the run already (at 127.0.0.1:4000); give this one another name with --name"
    assert second.refusal.reason == sentence
    assert not second.refusal.again
    membership.remove(first)
    assert isinstance(admit(membership, now=2.0), Member)


@pytest.mark.parametrize(("first", "second", "same"), [("x", "x", True), ("x", "y", False), ("x", "", False), ("", "", False)])
def test_a_process_that_comes_back_is_told_from_another_of_its_name(first: str, second: str, same: bool) -> None:
    membership = Membership(0.0)
    admit(membership, instance=first)
    verdict = admit(membership, instance=second)
    assert isinstance(verdict, Taken)
    assert verdict.same_process == same


def look(membership: Membership, start: float, end: float, every: float = 0.25) -> float | None:
    """Look at the leases from ``start`` to ``end``; when the first one ended."""
    now = start
    while now < end:
        now += every
        if membership.expired(now):
            return now
    return None


def test_a_lease_ends_without_a_message() -> None:
    membership = Membership(0.0)
    member = admit(membership)
    assert isinstance(member, Member)
    assert look(membership, 0.0, 9.75) is None
    member.heard = 9.0
    assert look(membership, 9.75, 30.0) == 19.0


def test_a_coordinator_that_stood_still_blames_nobody() -> None:
    membership = Membership(0.0)
    admit(membership)
    look(membership, 0.0, 1.0)
    assert membership.expired(100.0) == []
    assert look(membership, 100.0, 200.0) == pytest.approx(108.5)


def test_a_coordinator_that_crawls_gives_its_peers_as_much_longer() -> None:
    membership = Membership(0.0)
    admit(membership)
    assert look(membership, 0.0, 100.0, every=2.0) == pytest.approx(40.0)


def test_an_old_member_s_end_does_not_touch_its_successor() -> None:
    membership = Membership(0.0)
    old = admit(membership)
    assert isinstance(old, Member)
    membership.remove(old)
    new = admit(membership, now=1.0)
    membership.remove(old)
    assert membership.find(PeerId("a")) is new
