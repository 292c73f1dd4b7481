"""How the connections of one process are protected: mutual TLS with a run's certificates, or plain text within one machine.

:class:`MutualTls` belongs to one process in one run. Its certificate may be replaced at any time: connections that are made
afterwards use the new one, those that are there stay. What it opens is sure of whom it reached, by name and run and not by
address; whom it lets in is :class:`~atoll.protocol.guard.Guard`'s matter.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import grpc
import grpc.aio

from atoll.protocol.addresses import Address
from atoll.protocol.certificates import certificate_of_pem
from atoll.protocol.errors import IdentityRefused
from atoll.protocol.guard import Guard
from atoll.protocol.handshakes import HandshakeWatch
from atoll.protocol.identity import Role, Verifier, run_of_authority, server_name
from atoll.protocol.ids import COORDINATOR, PeerId

Options = tuple[tuple[str, int], ...]


class Security(ABC):
    """``guard`` stands before the servers of this process."""

    guard: Guard

    @abstractmethod
    def channel(self, address: Address, to: PeerId, options: Options) -> grpc.aio.Channel:
        """A channel on which only ``to``, a peer's name or COORDINATOR, is spoken to. Raises IdentityRefused."""

    @abstractmethod
    def listen(self, server: grpc.aio.Server, address: Address) -> int:
        """The port that ``server`` got; raises RuntimeError when it got none, IdentityRefused when it must not have one."""


class PlainText(Security):
    """Nothing is encrypted and nobody shows who they are: on loopback alone. ``anywhere`` is for measurements in a network that
    is closed, and no flag of a command sets it."""

    def __init__(self, *, anywhere: bool = False) -> None:
        self.guard = Guard(None)
        self._anywhere = anywhere

    def channel(self, address: Address, to: PeerId, options: Options) -> grpc.aio.Channel:
        self._check(address)
        return grpc.aio.insecure_channel(str(address), options=options)

    def listen(self, server: grpc.aio.Server, address: Address) -> int:
        self._check(address)
        return server.add_insecure_port(str(address))

    def _check(self, address: Address) -> None:
        if not (address.is_loopback or self._anywhere):
            raise IdentityRefused(
                f"{address} is not on this machine, and plain text is for one machine alone: leave --insecure away, "
                "and give peers what `atoll invite` prints"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What somebody shows, and by what they know others; all PEM."""

    key: bytes = field(repr=False)
    certificate: bytes
    authority: bytes


class MutualTls(Security):
    """``verifier`` judges whoever calls; ``roots`` (PEM) may connect besides those whom the authority knows."""

    def __init__(self, credentials: Credentials, verifier: Verifier, roots: bytes = b"") -> None:
        self.verifier = verifier
        self.guard = Guard(verifier)
        self._run_id = run_of_authority(certificate_of_pem(credentials.authority))
        self._shown = credentials, roots

    @property
    def credentials(self) -> Credentials:
        return self._shown[0]

    def replace(self, credentials: Credentials) -> None:
        """Shows these from now on."""
        self._shown = credentials, self._shown[1]

    def let_connect(self, roots: bytes) -> None:
        """Those whom these authorities (PEM) know may connect as well; what they may call the guard decides."""
        self._shown = self._shown[0], roots

    def channel(self, address: Address, to: PeerId, options: Options) -> grpc.aio.Channel:
        name = server_name(self._run_id, Role.COORDINATOR) if to == COORDINATOR else server_name(self._run_id, Role.PEER, to)
        return grpc.aio.secure_channel(
            str(address),
            channel_credentials(self.credentials),
            options=(*options, ("grpc.ssl_target_name_override", name)),
        )

    def listen(self, server: grpc.aio.Server, address: Address) -> int:
        configuration = _Configuration(self, self.guard.handshakes)
        credentials = grpc.dynamic_ssl_server_credentials(
            configuration.current(),
            configuration.changed,  # type: ignore[arg-type]  # the stubs do not know that None means no change
            require_client_authentication=True,
        )
        return server.add_secure_port(str(address), credentials)

    @property
    def shown(self) -> tuple[Credentials, bytes]:
        """What is shown now, and who may connect besides; always belonging together."""
        return self._shown


def channel_credentials(credentials: Credentials) -> grpc.ChannelCredentials:
    """For a channel that trusts this run's authority alone."""
    return grpc.ssl_channel_credentials(
        root_certificates=credentials.authority, private_key=credentials.key, certificate_chain=credentials.certificate
    )


class _Configuration:
    """What one server shows; gRPC's threads ask at each handshake whether it has changed."""

    def __init__(self, security: MutualTls, watch: HandshakeWatch) -> None:
        self._security = security
        self._watch = watch
        self._last = security.shown

    def current(self) -> grpc.ServerCertificateConfiguration:
        credentials, roots = self._last
        return grpc.ssl_server_certificate_configuration(
            # The authority goes along, so that whoever has only its fingerprint can check it.
            [(credentials.key, credentials.certificate + credentials.authority)],
            root_certificates=credentials.authority + roots,
        )

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What is to be shown from now on, None: the same."""
        self._watch.began(time.monotonic())
        shown = self._security.shown
        if shown is self._last:
            return None
        self._last = shown
        return self.current()
