"""Enrols peers: from a token and a signing request to a certificate, and from a certificate that ends to the next one."""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from cryptography.hazmat.primitives.asymmetric import ec

from atoll.coordinator.identity.authority import Authority
from atoll.coordinator.identity.register import Register
from atoll.protocol.certificates import certificate_pem, key_digest, public_key_of_request
from atoll.protocol.channel import PROTOCOL_VERSION
from atoll.protocol.errors import AtollError, IdentityRefused
from atoll.protocol.guard import caller
from atoll.protocol.identity import Role
from atoll.protocol.v1 import enrolment_pb2, enrolment_pb2_grpc

LIFETIME = datetime.timedelta(hours=24)
"""Of a peer's certificate. Longer than a coordinator is away, short enough that one that was copied is soon of no use."""

_log = logging.getLogger(__name__)


class Registrar:
    """Decides who gets a certificate. ``clock`` is the time of day; blocking."""

    def __init__(
        self,
        authority: Authority,
        register: Register,
        lifetime: datetime.timedelta = LIFETIME,
        clock: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._authority = authority
        self._register = register
        self._lifetime = lifetime
        self._clock = clock

    def enrol(self, invitation: str, request: enrolment_pb2.EnrolRequest) -> enrolment_pb2.Enrolled:
        """For somebody who has shown the token of ``invitation``. Raises IdentityRefused, WireError."""
        if request.protocol_version != PROTOCOL_VERSION:
            raise IdentityRefused(
                f"the coordinator speaks protocol {PROTOCOL_VERSION}, the peer protocol {request.protocol_version}: "
                "install the same version of atoll on both"
            )
        public = public_key_of_request(request.signing_request)
        self._register.enrol(request.name, key_digest(public), invitation, self._clock().timestamp())
        _log.info("%s enrolled with invitation %s", request.name, invitation)
        return self._issue(request.name, public)

    def renew(self, name: str, request: enrolment_pb2.RenewRequest) -> enrolment_pb2.Enrolled:
        """For a peer that has shown a certificate of that name. Raises IdentityRefused, WireError."""
        public = public_key_of_request(request.signing_request)
        if self._register.key_of(name) != key_digest(public):
            raise IdentityRefused(
                f"{name} asks for a certificate with another key than it enrolled with: join with an invitation"
            )
        return self._issue(name, public)

    def _issue(self, name: str, public: ec.EllipticCurvePublicKey) -> enrolment_pb2.Enrolled:
        now = self._clock()
        certificate = self._authority.issue(Role.PEER, name, public, now, self._lifetime)
        expires = certificate.not_valid_after_utc.timestamp()
        serial = f"{certificate.serial_number:x}"
        self._register.note_certificate(serial, name, key_digest(public), expires, now.timestamp())
        return enrolment_pb2.Enrolled(
            certificate=certificate_pem(certificate),
            time=now.timestamp(),
            lifetime_seconds=self._lifetime.total_seconds(),
            revoked=sorted(self._register.revoked()),
        )


class EnrolmentServicer(enrolment_pb2_grpc.EnrolmentServicer):
    """The RPCs of it; the guard has seen who calls."""

    def __init__(self, registrar: Registrar) -> None:
        self._registrar = registrar

    async def Enrol(
        self,
        request: enrolment_pb2.EnrolRequest,
        context: grpc.aio.ServicerContext[enrolment_pb2.EnrolRequest, enrolment_pb2.Enrolled],
    ) -> enrolment_pb2.Enrolled:
        """A first certificate, for the token."""
        return await self._answer(context, lambda name: self._registrar.enrol(name, request))

    async def Renew(
        self,
        request: enrolment_pb2.RenewRequest,
        context: grpc.aio.ServicerContext[enrolment_pb2.RenewRequest, enrolment_pb2.Enrolled],
    ) -> enrolment_pb2.Enrolled:
        """The next certificate, for the present one."""
        return await self._answer(context, lambda name: self._registrar.renew(name, request))

    async def _answer(
        self,
        context: grpc.aio.ServicerContext[Any, enrolment_pb2.Enrolled],
        decide: Callable[[str], enrolment_pb2.Enrolled],
    ) -> enrolment_pb2.Enrolled:
        asking = caller()
        assert asking is not None, "enrolment is served with mutual TLS alone"
        try:
            return await asyncio.to_thread(decide, asking.name)
        except AtollError as error:
            _log.warning("refused a certificate to %s at %s: %s", asking, context.peer(), error)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
