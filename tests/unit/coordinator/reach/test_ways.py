"""Who dials whom, and who meets whom at the relay."""

from __future__ import annotations

import pytest

from atoll.coordinator.reach.relay_grants import RelayGrants
from atoll.coordinator.reach.ways import Way, Ways
from atoll.protocol.ids import PeerId

ANN, BOB, CAT = PeerId("ann"), PeerId("bob"), PeerId("cat")
ADDRESSES = {ANN: "ann:1", BOB: "bob:1", CAT: ""}


@pytest.mark.parametrize(
    ("outbound_only", "dialled", "way"),
    [
        ((), {}, Way(dialler=ANN, address="bob:1")),
        ((BOB,), {}, Way(dialler=BOB, address="ann:1")),
        ((ANN,), {}, Way(dialler=ANN, address="bob:1")),
        ((ANN, BOB), {}, Way(dialler=ANN, relayed=True)),
        # Neighbours of one network, whom nobody outside can dial.
        ((ANN, BOB), {(BOB, ANN): True}, Way(dialler=BOB, address="ann:1")),
        ((ANN, BOB), {(ANN, BOB): False}, Way(dialler=ANN, relayed=True)),
        # The coordinator reaches both, but they are in networks that do not reach each other.
        ((), {(ANN, BOB): False}, Way(dialler=BOB, address="ann:1")),
        ((), {(ANN, BOB): False, (BOB, ANN): False}, Way(dialler=ANN, relayed=True)),
    ],
)
def test_the_first_dials_if_it_can_else_the_second_else_they_meet(
    outbound_only: tuple[PeerId, ...], dialled: dict[tuple[PeerId, PeerId], bool], way: Way
) -> None:
    assert Ways(ADDRESSES, outbound_only, dialled).between(ANN, BOB) == way


def test_who_accepts_no_connection_is_dialled_by_nobody() -> None:
    ways = Ways(ADDRESSES, (CAT,))
    assert ways.between(ANN, CAT) == Way(dialler=CAT, address="ann:1")
    assert ways.to(ANN, CAT) == Way(dialler=ANN, relayed=True)
    assert CAT in ways
    assert PeerId("dan") not in ways


def test_two_meet_while_the_plan_says_so_or_for_a_while() -> None:
    grants = RelayGrants()
    assert "the plan has nothing go from 'ann' to 'bob'" in (grants.refusal(ANN, BOB, 0.0) or "")
    grants.planned([frozenset((ANN, BOB))])
    grants.allow(BOB, CAT, 5.0)
    for one, other in ((ANN, BOB), (BOB, ANN), (CAT, BOB)):
        assert grants.refusal(one, other, 4.0) is None
    assert grants.refusal(ANN, CAT, 4.0) is not None
    assert grants.refusal(CAT, BOB, 5.0) is not None
    grants.planned([])
    assert grants.refusal(ANN, BOB, 5.0) is not None
