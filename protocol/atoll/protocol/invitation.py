"""The token that invites a peer into a run.

    atoll1-BASE64URL(authority's fingerprint (32 bytes) | id (6) | secret (16) | CRC-32 of all these)

The fingerprint lets the peer tell the run's coordinator from anybody in between before it says anything. From the secret both
sides make the same private key. The coordinator keeps the public half only, as a small authority that is good for nothing but
this: the peer shows a certificate signed with the key, TLS has it prove that, and the secret itself never crosses the wire nor
lies on the coordinator's disk.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import os
import zlib
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from atoll.protocol.certificates import Key, make_authority, make_end, new_key
from atoll.protocol.errors import IdentityRefused
from atoll.protocol.identity import Role, alternative_names

PREFIX = "atoll1-"
_FINGERPRINT_BYTES, _ID_BYTES, _SECRET_BYTES, _CHECK_BYTES = 32, 6, 16, 4
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_LIFETIME = datetime.timedelta(days=3650)
"""Of an invitation's authority; the coordinator counts hours and uses."""
_ASKING_LIFETIME = datetime.timedelta(days=1, hours=2)
_ASKING_AHEAD = datetime.timedelta(days=1)
"""How far the clock of whoever asks may be ahead, or behind: the coordinator says so, and its certificates decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """What an invited peer is given. ``str()`` shows no secret; :meth:`text` is what to paste."""

    fingerprint: bytes
    invitation: str
    secret: bytes = field(repr=False)

    def text(self) -> str:
        """The token itself: whoever reads it can join."""
        body = self.fingerprint + bytes.fromhex(self.invitation) + self.secret
        return PREFIX + base64.urlsafe_b64encode(body + _check(body)).decode().rstrip("=")

    def __str__(self) -> str:
        return f"the token of invitation {self.invitation}"


def new_token(fingerprint: bytes) -> Token:
    """A token with a fresh id and secret, for the run whose authority has this fingerprint."""
    return Token(fingerprint=fingerprint, invitation=os.urandom(_ID_BYTES).hex(), secret=os.urandom(_SECRET_BYTES))


def parse_token(text: str) -> Token:
    """Raises IdentityRefused for what is no token, or not all of one; the sentence does not repeat it."""
    text = text.strip()
    if not text.startswith(PREFIX):
        raise IdentityRefused(f"the token does not begin with {PREFIX}: paste the whole line that `atoll invite` printed")
    encoded = text.removeprefix(PREFIX)
    try:
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        data = b""
    body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    if len(body) != _FINGERPRINT_BYTES + _ID_BYTES + _SECRET_BYTES or check != _check(body):
        raise IdentityRefused("the token is damaged or not whole: paste the whole line that `atoll invite` printed")
    rest = body[_FINGERPRINT_BYTES:]
    return Token(fingerprint=body[:_FINGERPRINT_BYTES], invitation=rest[:_ID_BYTES].hex(), secret=rest[_ID_BYTES:])


def invitation_authority(token: Token, now: datetime.datetime) -> x509.Certificate:
    """What the coordinator keeps: by it, TLS knows who has the token."""
    return make_authority(_subject(token), _key(token), now, _LIFETIME)


def asking_certificate(token: Token, run_id: str, now: datetime.datetime) -> tuple[Key, x509.Certificate]:
    """What whoever has the token shows, to ask for a certificate of the run."""
    key, authority = new_key(), _key(token)
    issuer = invitation_authority(token, now).subject
    names = alternative_names(run_id, Role.INVITATION, token.invitation)
    begins, lifetime = now - _ASKING_AHEAD, _ASKING_AHEAD + _ASKING_LIFETIME
    subject = f"with invitation {token.invitation}"
    certificate = make_end(subject, key.public_key(), names, (issuer, authority), begins, lifetime)
    return key, certificate


def _subject(token: Token) -> str:
    return f"atoll invitation {token.invitation}"


def _key(token: Token) -> Key:
    """FIPS 186-5, A.2.1: a private key from more random bits than it has, so that none is likelier than another."""
    info = f"atoll invitation {token.invitation}".encode()
    bits = HKDF(algorithm=hashes.SHA256(), length=48, salt=token.fingerprint, info=info).derive(token.secret)
    return ec.derive_private_key(int.from_bytes(bits, "big") % (_P256_ORDER - 1) + 1, ec.SECP256R1())


def _check(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(_CHECK_BYTES, "big")
