"""Which of the statements about a run is believed."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from atoll.protocol.addresses import Address
from atoll.protocol.announcement import MAX_BYTES, Announcement, chosen, signed, verified
from atoll.protocol.certificates import certificate_pem, make_authority, new_key
from atoll.protocol.errors import AtollError, IdentityRefused, WireError

Say = Callable[..., bytes]


def authority() -> tuple[Say, bytes]:
    """Somebody who can make statements, and the fingerprint by which it is known."""
    key = new_key()
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    pem = certificate_pem(make_authority("atoll run x", key, now, datetime.timedelta(days=30)))

    def say(run: str = "tale", port: int = 7000, number: int = 1, claims: bytes = pem) -> bytes:
        statement = Announcement(run=run, addresses=(Address("192.0.2.7", port),), authority=claims, number=number)
        return signed(statement, lambda data: key.sign(data, ec.ECDSA(hashes.SHA256())))

    return say, verified(say()).fingerprint


def port(statement: Announcement) -> int:
    return statement.addresses[0].port


def test_the_newest_statement_of_the_only_authority_is_believed() -> None:
    say, own = authority()
    found = [say(port=1, number=5), say(port=2, number=7), say(port=3, number=6), say(run="other", port=4, number=9)]
    assert port(chosen("tale", found, None)) == 2
    assert port(chosen("tale", found, own)) == 2


def test_whoever_was_invited_believes_that_authority_alone() -> None:
    (say, own), (liar, _) = authority(), authority()
    found = [liar(port=1, number=9), say(port=2)]
    assert port(chosen("tale", found, own)) == 2
    with pytest.raises(IdentityRefused, match=r"2 runs are called tale.*--token"):
        chosen("tale", found, None)
    with pytest.raises(AtollError, match="no run called tale is announced by the authority"):
        chosen("tale", [liar()], own)


def test_nothing_is_believed_that_its_authority_has_not_signed() -> None:
    (say, own), (liar, _) = authority(), authority()
    true = say(port=2)
    forged = liar(port=1, number=9, claims=verified(true).authority)
    changed = true.replace(b":2", b":3")
    assert changed != true
    for data in (forged, changed, true[:-1], b"", b"\xff" * 40, true + b"\0" * MAX_BYTES):
        with pytest.raises(WireError):
            verified(data)
    assert port(chosen("tale", [forged, changed, true], own)) == 2


def test_a_run_that_nobody_announces_is_said_to_be_missing() -> None:
    with pytest.raises(AtollError, match="no run called tale is announced: is `atoll run --dht` running"):
        chosen("tale", [], None)
