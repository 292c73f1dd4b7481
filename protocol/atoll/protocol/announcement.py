"""How a run is found by its name: what it says of itself, signed, and which of several statements is believed. Pure.

The DHT keeps statements under a run's name, one for each authority: many runs may be called alike, and anybody may claim a
name. Whoever has an invitation knows the fingerprint of its run's authority, and believes that one alone. Whoever has none
can be sure only where one authority claims the name; where several do, the choice is not made for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError

from atoll.protocol.addresses import Address, parse_address
from atoll.protocol.certificates import certificate_of_pem, fingerprint
from atoll.protocol.errors import AtollError, IdentityRefused, JobError, WireError
from atoll.protocol.v1 import announcement_pb2

MAX_BYTES = 4096
"""Of a statement: a certificate takes some 700 bytes, an address some 20."""
_MAX_ADDRESSES = 16
_MAX_NAME = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """``authority`` is the certificate of the run's authority, PEM. ``number`` grows from one statement to the next."""

    run: str
    addresses: tuple[Address, ...]
    authority: bytes
    number: int

    @property
    def fingerprint(self) -> bytes:
        """Of the authority."""
        return fingerprint(certificate_of_pem(self.authority))


def signed(announcement: Announcement, sign: Callable[[bytes], bytes]) -> bytes:
    """What to keep in the DHT; ``sign`` signs with the authority's key."""
    body = announcement_pb2.Announcement(
        run=announcement.run,
        addresses=[str(address) for address in announcement.addresses],
        authority=announcement.authority,
        number=announcement.number,
    ).SerializeToString(deterministic=True)
    return announcement_pb2.SignedAnnouncement(announcement=body, signature=sign(body)).SerializeToString(deterministic=True)


def verified(data: bytes) -> Announcement:
    """A statement that the authority it names has signed. Raises WireError for all else."""
    if len(data) > MAX_BYTES:
        raise WireError(f"an announcement has {len(data)} bytes, more than {MAX_BYTES}")
    try:
        outer = announcement_pb2.SignedAnnouncement.FromString(data)
        body = announcement_pb2.Announcement.FromString(outer.announcement)
        addresses = tuple(parse_address(text, "the announced address") for text in body.addresses)
    except (DecodeError, JobError) as error:
        raise WireError(f"an announcement cannot be read: {error}") from error
    if not body.run or len(body.run) > _MAX_NAME or not 0 < len(addresses) <= _MAX_ADDRESSES:
        raise WireError("an announcement names no run or no address, or too many")
    public = certificate_of_pem(body.authority).public_key()
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise WireError("an announcement's authority has a key of another kind")
    try:
        public.verify(outer.signature, outer.announcement, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise WireError("an announcement's signature is not that of its authority") from None
    return Announcement(run=body.run, addresses=addresses, authority=body.authority, number=body.number)


def chosen(run: str, found: Iterable[bytes], wanted: bytes | None) -> Announcement:
    """The statement to believe: of the authority with the fingerprint ``wanted``, or of the only one there is. The newest wins.

    Raises IdentityRefused where it cannot be told, AtollError where there is none.
    """
    newest: dict[bytes, Announcement] = {}
    for data in found:
        try:
            statement = verified(data)
        except WireError:
            continue
        known = newest.get(statement.fingerprint)
        if statement.run == run and (known is None or known.number < statement.number):
            newest[statement.fingerprint] = statement
    if wanted is not None:
        newest = {wanted: newest[wanted]} if wanted in newest else {}
    if len(newest) > 1:
        raise IdentityRefused(
            f"{len(newest)} runs are called {run}: say which with --token, which `atoll invite` prints where its coordinator is"
        )
    if not newest:
        whose = "" if wanted is None else " by the authority that this token is of"
        raise AtollError(
            f"no run called {run} is announced{whose}: is `atoll run --dht` running, with the same --initial-peers?"
        )
    return next(iter(newest.values()))
