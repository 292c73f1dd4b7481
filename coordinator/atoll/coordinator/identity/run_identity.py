"""All of a run's identity that its coordinator has open: authority, register, and how its own connections are protected."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from cryptography import x509

from atoll.coordinator.identity.authority import FOLDER, REGISTER, Authority
from atoll.coordinator.identity.enrolment import LIFETIME, EnrolmentServicer, Registrar
from atoll.coordinator.identity.register import Invitation, Register
from atoll.protocol.certificates import certificate_pem, fingerprint
from atoll.protocol.identity import Role, Verifier
from atoll.protocol.invitation import Token, invitation_authority, new_token
from atoll.protocol.security import MutualTls
from atoll.protocol.v1 import enrolment_pb2_grpc

OWN_LIFETIME = datetime.timedelta(days=30)
"""Of the coordinator's own certificate, which never leaves its process; peers whose clock is ahead accept it as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An invitation to be made."""

    lifetime: datetime.timedelta
    uses: int = 1
    trusted: bool = False


class RunIdentity:
    """``security`` protects the coordinator's own connections; :meth:`refresh` is to be called now and then."""

    def __init__(self, authority: Authority, register: Register, lifetime: datetime.timedelta = LIFETIME) -> None:
        now = _now()
        self.register = register
        self._authority = authority
        self._registrar = Registrar(authority, register, lifetime)
        self._invitations: dict[str, Invitation] = {}
        self._revoked: set[str] = set()
        verifier = Verifier(authority.certificate, revoked=self._revoked, invitation=self._authority_of)
        self.security = MutualTls(authority.credentials(Role.COORDINATOR, now, OWN_LIFETIME), verifier)
        self._renew_at = now + OWN_LIFETIME / 2
        self._version = (-1, -1)
        self.refresh()

    @classmethod
    def open(cls, state: Path, run_id: str, lifetime: datetime.timedelta = LIFETIME) -> RunIdentity:
        """That of the run kept in ``state``, made now if there is none yet. Raises IdentityRefused, ResourceError."""
        folder = state / FOLDER
        authority = Authority.open(folder, run_id, _now())
        return cls(authority, Register(folder / REGISTER), lifetime)

    def add_services(self, server: grpc.aio.Server) -> None:
        """Adds enrolment to a server, before it starts."""
        enrolment_pb2_grpc.add_EnrolmentServicer_to_server(EnrolmentServicer(self._registrar), server)

    @property
    def revoked(self) -> frozenset[str]:
        """Serials of certificates that are valid no more."""
        return frozenset(self._revoked)

    def refresh(self) -> bool:
        """Takes in what was written into the register since; renews the own certificate in time. Whether other
        certificates are revoked now, of which peers are to be told."""
        now = _now()
        if now >= self._renew_at:
            self.security.replace(self._authority.credentials(Role.COORDINATOR, now, OWN_LIFETIME))
            self._renew_at = now + OWN_LIFETIME / 2
        version = self.register.version
        if version == self._version:
            return False
        self._version = version
        self._invitations = {invitation.id: invitation for invitation in self.register.invitations(now.timestamp())}
        roots = b"".join(certificate_pem(invitation.authority) for invitation in self._invitations.values())
        self.security.let_connect(roots)
        revoked = self.register.revoked()
        if revoked == self._revoked:
            return False
        self._revoked.clear()
        self._revoked.update(revoked)
        return True

    def close(self) -> None:
        self.register.close()

    def _authority_of(self, invitation_id: str) -> x509.Certificate | None:
        found = self._invitations.get(invitation_id)
        return None if found is None else found.authority


def invite(authority: Authority, register: Register, wanted: Wanted) -> Token:
    """Makes an invitation and returns its token, of which nothing secret is kept."""
    now = _now()
    token = new_token(fingerprint(authority.certificate))
    register.add(
        Invitation(
            id=token.invitation,
            authority=invitation_authority(token, now),
            expires=(now + wanted.lifetime).timestamp(),
            uses=wanted.uses,
            trusted=wanted.trusted,
        )
    )
    return token


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
