"""Every RPC of every service, called by those who may not: without a certificate, with one of the wrong time, run, role or
name, and by somebody in between. A new RPC is among them without anybody's doing."""

from __future__ import annotations

import datetime
import importlib
import logging
import pkgutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor

import atoll.protocol.v1
from atoll.coordinator.cli.invite import invite_for_swarm
from atoll.coordinator.identity.authority import FOLDER, Authority
from atoll.coordinator.identity.run_identity import Wanted, invite
from atoll.peer.session.enrolling import Belonging
from atoll.peer.settings import Patience, PeerSettings
from atoll.peer.state import permits
from atoll.protocol.access import is_allowed
from atoll.protocol.certificates import certificate_pem, key_pem, new_key
from atoll.protocol.channel import CHANNEL_OPTIONS, PROTOCOL_VERSION, open_channel, parse_address
from atoll.protocol.errors import AtollError, IdentityRefused
from atoll.protocol.identity import Role, Verifier, server_name
from atoll.protocol.ids import PeerId
from atoll.protocol.invitation import Token, asking_certificate, parse_token
from atoll.protocol.security import Credentials, MutualTls
from atoll.protocol.v1 import (
    frames_pb2,
    frames_pb2_grpc,
    operator_pb2,
    probe_pb2,
    probe_pb2_grpc,
    relay_pb2,
    relay_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    state_pb2,
    state_pb2_grpc,
)
from support.coordinated import Coordinated, coordinated, tiny_job
from support.identities import SmallAuthority

DAY = datetime.timedelta(days=1)
OF_PEERS = ("Links", "State", "Probes", "Reach")
REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
CALL_SECONDS = 20.0


def methods() -> list[MethodDescriptor]:
    names = [module.name for module in pkgutil.iter_modules(atoll.protocol.v1.__path__) if module.name.endswith("_pb2")]
    files = [importlib.import_module(f"atoll.protocol.v1.{name}").DESCRIPTOR for name in sorted(names)]
    return [method for file in files for service in file.services_by_name.values() for method in service.methods]


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


@dataclass
class Place:
    """A run with one peer, ann; and all its authority's secrets."""

    run: Coordinated
    authority: Authority
    ann: str

    @property
    def run_id(self) -> str:
        return Verifier(self.authority.certificate).run_id

    def credentials(self, role: Role, name: str = "", lifetime: datetime.timedelta = DAY) -> Credentials:
        """What the run's authority would give to somebody."""
        key, now = new_key(), datetime.datetime.now(datetime.UTC)
        if lifetime < DAY * 0:
            now, lifetime = now + 2 * lifetime, -lifetime
        certificate = self.authority.issue(role, name, key.public_key(), now, lifetime)
        return Credentials(
            key=key_pem(key), certificate=certificate_pem(certificate), authority=certificate_pem(self.authority.certificate)
        )

    def shown(self, credentials: Credentials) -> MutualTls:
        return MutualTls(credentials, Verifier(self.authority.certificate))

    def ends(self, method: MethodDescriptor) -> Iterator[tuple[str, str]]:
        """Where the method is served, and under which name for TLS."""
        if method.containing_service.name in OF_PEERS:
            yield self.ann, server_name(self.run_id, Role.PEER, "ann")
        if method.containing_service.name not in ("Links", "State", "Reach"):
            yield self.run.address, server_name(self.run_id, Role.COORDINATOR)

    async def called(self, method: MethodDescriptor, credentials: Credentials | None) -> list[grpc.aio.AioRpcError]:
        """How a call of the method ends, wherever it is served; it must not succeed."""
        errors = []
        for address, name in self.ends(method):
            shown = grpc.ssl_channel_credentials(
                root_certificates=certificate_pem(self.authority.certificate),
                private_key=credentials.key if credentials is not None else None,
                certificate_chain=credentials.certificate if credentials is not None else None,
            )
            options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", name))
            async with grpc.aio.secure_channel(address, shown, options=options) as channel:
                errors.append(await failure(channel, method))
        return errors


async def failure(channel: grpc.aio.Channel, method: MethodDescriptor) -> grpc.aio.AioRpcError:
    """Calls the method with an empty message, as raw bytes."""
    path, generic = path_of(method), cast(Any, channel)  # the stubs want serialisers; gRPC passes bytes on without
    try:
        if method.client_streaming:
            call = generic.stream_stream(path)(timeout=CALL_SECONDS)
            await call.write(b"")
            await call.read()
        elif method.server_streaming:
            call = generic.unary_stream(path)(b"", timeout=CALL_SECONDS)
            await call.read()
        else:
            await generic.unary_unary(path)(b"", timeout=CALL_SECONDS)
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError(f"{path} was served")


@asynccontextmanager
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with coordinated(tiny_job(tmp_path), tmp_path / "state", peers=0, min_peers=9, insecure=False) as run:
        run.join("ann", cache=tmp_path / "cache")
        sessions = run.coordinator._sessions
        await run.until(lambda: sessions.find(PeerId("ann")) is not None, "ann did not join")
        (ann,) = sessions.membership
        yield Place(run, Authority.existing(tmp_path / "state" / FOLDER), ann.introduction.address)


def of_nobody(here: Place, kind: str) -> Credentials | None:
    """What TLS itself turns away."""
    if kind == "expired":
        return here.credentials(Role.PEER, "ann", -DAY)
    if kind == "none":
        return None
    # The same run, the same names, another key: what somebody makes who has seen a certificate.
    other = SmallAuthority(here.run_id if kind == "self-made" else "0f" * 16)
    return other.credentials(Role.OPERATOR if kind == "self-made" else Role.PEER, "" if kind == "self-made" else "ann")


async def test_nothing_is_served_to_those_whom_tls_turns_away(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        for kind in ("none", "expired", "another run's", "self-made"):
            for method in methods():
                for error in await here.called(method, of_nobody(here, kind)):
                    assert error.code() is grpc.StatusCode.UNAVAILABLE, f"{kind}, {path_of(method)}: {error.details()}"
        watch = here.run.coordinator._security.guard.handshakes
        assert "turned away" in (watch.report(10.0**9) or ""), "the coordinator says nothing of them"


async def test_each_rpc_is_for_some_roles_alone(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        token = parse_token(invite_for_swarm(here.run.settings.state))
        key, asking = asking_certificate(token, here.run_id, datetime.datetime.now(datetime.UTC))
        shown: dict[Role, Credentials] = {}
        for role in (Role.OPERATOR, Role.COORDINATOR):
            shown[role] = here.credentials(role)
        shown[Role.PEER] = here.credentials(Role.PEER, "eve")
        shown[Role.INVITATION] = Credentials(
            key=key_pem(key), certificate=certificate_pem(asking), authority=certificate_pem(here.authority.certificate)
        )
        await here.run.until(lambda: token.invitation in here.run.coordinator._identity._invitations)  # type: ignore[union-attr]
        for method in methods():
            for role in [role for role in Role if not is_allowed(path_of(method), role)]:
                for error in await here.called(method, shown[role]):
                    if role is Role.INVITATION and error.code() is grpc.StatusCode.UNAVAILABLE:
                        continue  # peers know of no invitations: their TLS turns it away
                    assert error.code() in REFUSED, f"{role}, {path_of(method)}: {error.details()}"
                    assert "is for the role" in str(error.details())


async def test_a_revoked_certificate_serves_for_nothing_anywhere(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        settings = PeerSettings(
            coordinator=parse_address(here.run.address), name="eve", token=invite_for_swarm(here.run.settings.state)
        )
        eve = await Belonging(settings).open()
        assert isinstance(eve, MutualTls)
        async with here.run.operator() as operator:
            reply = await operator.RemovePeer(operator_pb2.RemovePeerRequest(name="eve"))
            assert not reply.was_here
        revoked = here.run.peer("ann")._belonging._revoked
        await here.run.until(lambda: bool(revoked), "ann did not hear of it")
        for method in methods():
            if is_allowed(path_of(method), Role.PEER):
                for error in await here.called(method, eve.credentials):
                    assert error.code() is grpc.StatusCode.UNAUTHENTICATED, f"{path_of(method)}: {error.details()}"
                    assert "eve: this certificate was revoked, the operator removed it from the run" in str(error.details())


async def test_nobody_speaks_for_another_or_asks_for_what_is_not_permitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permits, "WAIT_SECONDS", 0.2)
    async with place(tmp_path) as here:
        eve = here.shown(here.credentials(Role.PEER, "eve"))
        foreign = "the certificate is that of eve, the message says it comes from 'bob'"
        async with open_channel(here.run.address, eve) as channel:
            session = session_pb2_grpc.CoordinatorStub(channel).Session()
            await session.write(session_pb2.PeerMessage(join=session_pb2.Join(name="bob", protocol_version=PROTOCOL_VERSION)))
            answer = await session.read()
            assert foreign in answer.rejected.reason
            stub = session_pb2_grpc.CoordinatorStub(channel)
            for name, reason in (("bob", foreign), ("eve", "may not fetch")):
                fetch = stub.FetchState(session_pb2.FetchStateRequest(peer=name, names=["x"], generation=1))
                assert reason in await details(fetch)
            store = stub.StoreState()
            await store.write(frames_pb2.Frame(hello=frames_pb2.Hello(peer="bob")))
            assert foreign in await details(store)
            probes = probe_pb2_grpc.ProbesStub(channel)
            for name, reason in (("bob", foreign), ("eve", "eve has no session")):
                assert reason in await probed(probes, name)
            for source, answer, reason in (
                ("bob", 0, foreign),
                ("eve", 0, "the plan has nothing go from 'eve' to 'ann' through this relay"),
                ("eve", 1, "nobody waits for an answer 1 of eve"),
            ):
                tunnel = relay_pb2_grpc.RelayStub(channel).Tunnel()
                said = relay_pb2.TunnelHello(source=source, target="ann", answer=answer, protocol_version=PROTOCOL_VERSION)
                await tunnel.write(relay_pb2.TunnelFrame(hello=said))
                assert reason in await details(tunnel)
        async with open_channel(here.ann, eve, PeerId("ann")) as channel:
            for name, reason in (("bob", foreign), ("eve", "the coordinator has not asked eve for a probe")):
                assert reason in await probed(probe_pb2_grpc.ProbesStub(channel), name)
            for name, reason in (("bob", foreign), ("eve", "the coordinator has not asked eve for a copy")):
                request = state_pb2.StateRequest(peer=name, snapshot=True, names=["x"], step=1)
                assert reason in await details(state_pb2_grpc.StateStub(channel).Fetch(request))
            for name, generation, reason in (("bob", 0, foreign), ("eve", 0, "has not heard of plan 0")):
                link = frames_pb2_grpc.LinksStub(channel).Link()
                hello = frames_pb2.Hello(peer=name, generation=generation, protocol_version=PROTOCOL_VERSION)
                await link.write(frames_pb2.Frame(hello=hello))
                assert reason in await details(link)


async def test_tokens_are_refused_with_a_sentence_and_leave_no_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with place(tmp_path) as here:
        identity = here.run.coordinator._identity
        assert identity is not None
        once = invite(here.authority, identity.register, Wanted(lifetime=DAY))
        over = invite(here.authority, identity.register, Wanted(lifetime=-datetime.timedelta(minutes=30)))
        await here.run.until(lambda: len(identity._invitations) >= 3)

        async def joined(name: str, token: Token, folder: str = "other") -> MutualTls:
            address = parse_address(here.run.address)
            settings = PeerSettings(coordinator=address, name=name, token=token.text(), cache=tmp_path / folder)
            security = await Belonging(settings).open()
            assert isinstance(security, MutualTls)
            return security

        async def refused(name: str, token: Token) -> str:
            with pytest.raises(AtollError) as caught:
                await joined(name, token)
            return str(caught.value)

        bob = await joined("bob", once)
        assert (await joined("bob", once)).credentials == bob.credentials, "it keeps what it has"
        assert "was used once already, and serves no more peers" in await refused("eve", once)
        assert "expired 30 min ago; make a new one with `atoll invite`" in await refused("eve", over)
        fresh = invite(here.authority, identity.register, Wanted(lifetime=DAY))
        await here.run.until(lambda: fresh.invitation in identity._invitations)
        assert "a peer named bob enrolled before" in await refused_with(here, "bob", fresh, tmp_path / "elsewhere")
        guessed = Token(fingerprint=fresh.fingerprint, invitation=fresh.invitation, secret=bytes(16))
        assert "does not accept this side's certificate" in await refused("eve", guessed)

        async with coordinated(tiny_job(tmp_path), tmp_path / "another", peers=0, min_peers=9, insecure=False) as between:
            settings = PeerSettings(coordinator=parse_address(between.address), name="eve", token=fresh.text())
            with pytest.raises(IdentityRefused, match=r"shows the authority .* somebody is in between; nothing was sent"):
                await Belonging(settings).open()
            # Where the peer has been in the run before, it trusts the run's authority alone.
            kept = here.shown(bob.credentials)
            async with open_channel(between.address, kept) as channel:
                assert "CERTIFICATE_VERIFY_FAILED" in await details(session_pb2_grpc.CoordinatorStub(channel).Session())
        tokens = (once, over, fresh)
    said_aloud = caplog.text + "".join(str(record.args) for record in caplog.records)
    files = written(tmp_path)
    for token in tokens:
        for secret in (token.text(), token.text()[-30:], token.secret.hex(), repr(token.secret)):
            assert secret not in said_aloud
            assert all(secret.encode() not in data for data in files), "a token lies on a disk"
        assert all(token.secret not in data for data in files)
    assert "PRIVATE KEY" not in said_aloud


async def test_who_looks_for_a_coordinator_without_an_invitation_is_told_how_to_get_one(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        address = parse_address(here.run.address)
        with pytest.raises(IdentityRefused, match="run `atoll invite` on the coordinator's machine"):
            await Belonging(PeerSettings(coordinator=address, name="eve", cache=tmp_path / "cache")).open()
        # One that has been in the run needs none.
        again = await Belonging(PeerSettings(coordinator=address, name="ann", cache=tmp_path / "cache")).open()
        assert isinstance(again, MutualTls)
    async with coordinated(tiny_job(tmp_path), tmp_path / "plain", peers=0, min_peers=9) as plain:
        settings = PeerSettings(coordinator=parse_address(plain.address), name="eve", patience=Patience(end=2.0))
        with pytest.raises(AtollError, match=r"does not speak TLS as Atoll does.*--insecure as well"):
            await Belonging(settings).open()


async def test_a_run_over_tls_trains_with_renewed_certificates_and_lets_a_removed_peer_go_at_once(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, steps=2, plan={"stages": 2})
    lifetime = datetime.timedelta(seconds=15)  # for a busy machine: it asks again after ten
    async with coordinated(job, tmp_path / "state", peers=0, min_peers=4, insecure=False, certificate_lifetime=lifetime) as run:
        run.join("ann", "bob", "cat", cache=tmp_path / "cache")
        for name in ("ann", "bob"):
            await renewed(run, run.peer(name)._belonging)
        async with run.operator() as operator:
            await operator.RemovePeer(operator_pb2.RemovePeerRequest(name="cat", hand_over_seconds=0.0))
        assert "removed" in (await run.peer_ended("cat")).reason
        run.join("dan", "eve", cache=tmp_path / "cache")
        assert (await run.ended()).finished


async def renewed(run: Coordinated, belonging: Belonging) -> None:
    """Wait until the peer shows another certificate than the first that it was seen with."""
    seen: set[bytes] = set()

    def is_another() -> bool:
        if isinstance(belonging.security, MutualTls):
            seen.add(belonging.security.credentials.certificate)
        return len(seen) > 1

    await run.until(is_another, "its certificate was not renewed")


async def refused_with(here: Place, name: str, token: Token, cache: Path) -> str:
    settings = PeerSettings(coordinator=parse_address(here.run.address), name=name, token=token.text(), cache=cache)
    with pytest.raises(IdentityRefused) as caught:
        await Belonging(settings).open()
    return str(caught.value)


def written(folder: Path) -> list[bytes]:
    """All files in it."""
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


async def probed(stub: probe_pb2_grpc.ProbesStub, name: str) -> str:
    call = stub.Probe()
    hello = probe_pb2.ProbeHello(protocol_version=PROTOCOL_VERSION, name=name, limit_seconds=1.0)
    await call.write(probe_pb2.ProbeFrame(hello=hello))
    return await details(call)


async def details(call: Any) -> str:
    """Why the call was refused."""
    try:
        answer = await call.read()
    except grpc.aio.AioRpcError as error:
        return str(error.details())
    assert answer is cast(Any, grpc.aio).EOF, f"it was served: {answer}"
    return str(await call.details())
