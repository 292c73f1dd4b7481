"""Who is who in a run: what a certificate says of whoever shows it, and whether that is to be believed.

A run has one authority. Its certificates name a *role* in the run and, for peers, a name, as a URI ``atoll:RUN/ROLE/NAME``;
and a DNS name made of both, which whoever dials checks instead of the address: an address changes, and many peers have none
of their own. An *invitation* is a small authority of its own, made from the secret in a token (``invitation``): what it signed
shows that somebody has the token, and serves to ask for a certificate of the run and for nothing else.

TLS has checked signatures and dates when the guard sees a certificate, but not who may call what, nor revocations; and a
resumed TLS session is not checked again. So :class:`Verifier` checks all of it, each time.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Container
from dataclasses import dataclass
from enum import StrEnum

from cryptography import x509

from atoll.protocol.certificates import certificate_of_pem, is_issued_by
from atoll.protocol.errors import IdentityRefused, WireError
from atoll.protocol.ids import PEER_NAME

_SCHEME = "atoll"
_MOST_KNOWN = 512
_HOUR_SECONDS = 3600.0


class Role(StrEnum):
    """What somebody is in a run."""

    COORDINATOR = "coordinator"
    OPERATOR = "operator"
    PEER = "peer"
    INVITATION = "invitation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whoever shows a certificate that is believed. ``name`` is the peer's, or the id of the invitation; ``serial`` is of the
    certificate."""

    role: Role
    name: str
    serial: str
    expires: datetime.datetime

    def __str__(self) -> str:
        return self.name if self.role is Role.PEER else f"the {self.role} {self.name}".rstrip()


def server_name(run_id: str, role: Role, name: str = "") -> str:
    """What TLS is told to expect instead of a host name; names of peers may hold what host names cannot."""
    label = hashlib.sha256(f"{role}/{name}".encode()).hexdigest()[:40]
    return f"{label}.{run_id[:40]}.atoll"


def alternative_names(run_id: str, role: Role, name: str = "") -> list[x509.GeneralName]:
    """What a certificate says of its owner."""
    uri = x509.UniformResourceIdentifier(f"{_SCHEME}:{run_id}/{role}/{name}")
    return [x509.DNSName(server_name(run_id, role, name)), uri]


def authority_name(run_id: str) -> str:
    return f"atoll run {run_id}"


def run_of_authority(authority: x509.Certificate) -> str:
    """The id of the run that an authority is of; empty for another kind of authority."""
    name = authority.subject.rfc4514_string()
    prefix = "CN=atoll run "
    return name.removeprefix(prefix) if name.startswith(prefix) else ""


class Verifier:
    """``authority`` is the run's; ``invitation`` finds the authority of an invitation by its id, None where there is none
    (peers know none at all); ``revoked`` holds serials."""

    def __init__(
        self,
        authority: x509.Certificate,
        *,
        revoked: Container[str] = frozenset(),
        invitation: Callable[[str], x509.Certificate | None] = lambda invitation_id: None,
    ) -> None:
        self.run_id = run_of_authority(authority)
        self.revoked = revoked
        self._authority = authority
        self._invitation = invitation
        self._known: dict[bytes, tuple[Caller, datetime.datetime]] = {}

    def identify(self, pem: bytes, now: datetime.datetime) -> Caller:
        """Who shows this certificate. Raises IdentityRefused with the reason, which may be shown to both sides."""
        caller, valid_from = self._known.get(pem) or self._remember(pem)
        if caller.serial in self.revoked:
            raise IdentityRefused(f"{caller}: this certificate was revoked, the operator removed it from the run")
        if now > caller.expires:
            ago = (now - caller.expires).total_seconds() / _HOUR_SECONDS
            raise IdentityRefused(
                f"{caller}: this certificate expired {ago:.1f} h ago; get a new invitation, and check both machines' clocks"
            )
        if now < valid_from:
            ahead = (valid_from - now).total_seconds() / _HOUR_SECONDS
            raise IdentityRefused(f"{caller}: this certificate is valid in {ahead:.1f} h only; set this machine's clock")
        return caller

    def _remember(self, pem: bytes) -> tuple[Caller, datetime.datetime]:
        """What does not change about a certificate; checking signatures takes longer than most calls."""
        try:
            certificate = certificate_of_pem(pem)
        except WireError as error:
            raise IdentityRefused(str(error)) from error
        found = self._read(certificate), certificate.not_valid_before_utc
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[pem] = found
        return found

    def _read(self, certificate: x509.Certificate) -> Caller:
        role, name = _said(certificate, self.run_id)
        authority = self._invitation(name) if role is Role.INVITATION else self._authority
        if authority is None:
            raise IdentityRefused(f"the invitation {name} is not known to this run; make a new one with `atoll invite`")
        if not is_issued_by(certificate, authority):
            raise IdentityRefused("the certificate was not issued by this run's authority")
        return Caller(role=role, name=name, serial=f"{certificate.serial_number:x}", expires=certificate.not_valid_after_utc)


def _said(certificate: x509.Certificate, run_id: str) -> tuple[Role, str]:
    """Role and name in this run. Raises IdentityRefused."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (x509.ExtensionNotFound, ValueError):
        uris = []
    said = [uri.removeprefix(f"{_SCHEME}:").split("/") for uri in uris if uri.startswith(f"{_SCHEME}:")]
    if len(said) != 1 or len(said[0]) != 3:
        raise IdentityRefused("the certificate says nothing of a run")
    run, role, name = said[0]
    if run != run_id:
        raise IdentityRefused(f"the certificate is of another run ({run[:40]!r}), not of {run_id}")
    named = role in (Role.PEER, Role.INVITATION)
    if role not in frozenset(Role) or bool(PEER_NAME.fullmatch(name)) is not named or (name and not named):
        raise IdentityRefused("the certificate names nobody that a run has")
    return Role(role), name
