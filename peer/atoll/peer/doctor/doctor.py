"""`atoll-peer doctor`: looks at everything that a peer on this machine needs, from the network's first step on.

What depends on something that is bad is not looked at. Nothing is joined; where a token is given, this peer is enrolled with
it, as it is when it joins under the same name.
"""

from __future__ import annotations

import asyncio
import datetime
import socket
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from atoll.peer.doctor.device_check import of_device
from atoll.peer.doctor.diagnosis import (
    BE_INVITED,
    SET_THE_CLOCK,
    Finding,
    Verdict,
    not_looked_at,
    of_clock,
    of_disk,
    of_link,
    of_memory,
    of_protocol,
    of_reachability,
)
from atoll.peer.measuring.profile import free_memory_bytes
from atoll.peer.session.enrolling import Belonging
from atoll.peer.settings import PeerSettings, default_cache, software_version
from atoll.peer.state.free_disk import free_disk_bytes
from atoll.protocol.certificates import fingerprint
from atoll.protocol.channel import PROTOCOL_VERSION, open_channel, start_server
from atoll.protocol.errors import AtollError, IdentityRefused
from atoll.protocol.ids import COORDINATOR, PeerId
from atoll.protocol.presented import presented, short
from atoll.protocol.probe_client import ProbeTarget, probe_link
from atoll.protocol.pump import describe
from atoll.protocol.security import Security
from atoll.protocol.v1 import examination_pb2, examination_pb2_grpc

CONNECT_SECONDS = 5.0
ASK_SECONDS = 10.0
PROBE_SECONDS = 15.0
_OF_THE_RUN = ("protocol", "clock", "reachability", "throughput")


async def examine(settings: PeerSettings) -> AsyncIterator[Finding]:
    """All findings, each as soon as it is there. Raises nothing but JobError, for a flag that is wrong."""
    async for finding in _network(settings):
        yield finding
    cache = settings.cache or default_cache()
    yield of_disk(free_disk_bytes(cache), str(cache))
    device = of_device(settings.device)
    if device.verdict is not Verdict.BAD:
        yield of_memory(free_memory_bytes(settings.device), settings.device)
    yield device


async def _network(settings: PeerSettings) -> AsyncIterator[Finding]:
    for look in (_name, _tcp, _tls):
        finding = await look(settings)
        if finding is not None:
            yield finding
        if finding is not None and finding.verdict is Verdict.BAD:
            missing = {_name: ("connection", "encryption"), _tcp: ("encryption",), _tls: ()}[look]
            for subject in (*missing, "invitation", *_OF_THE_RUN):
                yield not_looked_at(subject, f"not looked at, for the {finding.subject} is bad")
            return
    belonging = Belonging(settings)
    try:
        security = await belonging.open()
    except AtollError as error:
        mend = BE_INVITED if isinstance(error, IdentityRefused) else SET_THE_CLOCK
        yield Finding(subject="invitation", verdict=Verdict.BAD, found=str(error), mend=mend)
        for subject in _OF_THE_RUN:
            yield not_looked_at(subject, "not looked at, for nobody who is not invited is answered")
        return
    found = "none is needed in plain text" if settings.insecure else "the run knows this peer"
    yield Finding(subject="invitation", verdict=Verdict.GOOD, found=found)
    async for finding in _run(settings, security):
        yield finding


async def _name(settings: PeerSettings) -> Finding:
    host, port = settings.coordinator.host, settings.coordinator.port
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        mend = f"getent hosts {host} must find it; else give the coordinator's number instead: atoll-peer doctor NUMBER:{port}"
        return Finding(subject="name", verdict=Verdict.BAD, found=f"{host} is not known: {error.strerror or error}", mend=mend)
    numbers = ", ".join(dict.fromkeys(str(entry[4][0]) for entry in found))
    return Finding(subject="name", verdict=Verdict.GOOD, found=f"{host} is {numbers}")


async def _tcp(settings: PeerSettings) -> Finding:
    address, began = settings.coordinator, time.monotonic()
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(address.host, address.port), CONNECT_SECONDS)
    except ConnectionRefusedError:
        mend = f"on the coordinator's machine: atoll run JOB --listen 0.0.0.0:{address.port}"
        return Finding(subject="connection", verdict=Verdict.BAD, found=f"nothing listens at {address}", mend=mend)
    except (OSError, TimeoutError) as error:
        found = f"{address} does not answer: {str(error) or f'nothing within {CONNECT_SECONDS:g} s'}"
        mend = f"on the coordinator's machine: ufw allow {address.port}/tcp; and in its router, forward that port"
        return Finding(subject="connection", verdict=Verdict.BAD, found=found, mend=mend)
    taken = time.monotonic() - began
    writer.close()
    return Finding(subject="connection", verdict=Verdict.GOOD, found=f"made in {1e3 * taken:.1f} ms")


async def _tls(settings: PeerSettings) -> Finding | None:
    """None in plain text."""
    if settings.insecure:
        return None
    try:
        found = await presented(settings.coordinator, CONNECT_SECONDS)
    except AtollError as error:
        mend = "--insecure here as well, if the coordinator was started with it; else see which program has that port"
        return Finding(subject="encryption", verdict=Verdict.BAD, found=str(error), mend=mend)
    wrong = found.wrong_clock(datetime.datetime.now(datetime.UTC))
    if wrong is not None:
        return Finding(subject="encryption", verdict=Verdict.BAD, found=wrong, mend=SET_THE_CLOCK)
    whose = short(fingerprint(found.authority))
    return Finding(subject="encryption", verdict=Verdict.GOOD, found=f"TLS, with the authority {whose}")


async def _run(settings: PeerSettings, security: Security) -> AsyncIterator[Finding]:
    """What only the coordinator can tell."""
    server, bound, trouble = None, "", ""
    try:
        server, bound = await start_server((), settings.listen_address, security=security)
    except AtollError as error:
        trouble = str(error)
    try:
        advertised = settings.advertised_address(bound) if bound else ""
        async for finding in _answers(settings, security, advertised, trouble):
            yield finding
    finally:
        if server is not None:
            await server.stop(grace=None)


async def _answers(settings: PeerSettings, security: Security, advertised: str, trouble: str) -> AsyncIterator[Finding]:
    request = examination_pb2.ExamineRequest(protocol_version=PROTOCOL_VERSION, name=settings.name, address=advertised)
    address = str(settings.coordinator)
    try:
        async with open_channel(address, security) as channel:
            stub = examination_pb2_grpc.ExaminationStub(channel)
            reply = await stub.Examine(request, timeout=ASK_SECONDS)
            now = time.time()
    except grpc.aio.AioRpcError as error:
        older = error.code() is grpc.StatusCode.UNIMPLEMENTED
        mend = "pip install --upgrade atoll, on both machines" if older else "atoll-peer doctor again, with the run in progress"
        yield Finding(subject="protocol", verdict=Verdict.BAD, found=describe(error), mend=mend)
        for subject in _OF_THE_RUN[1:]:
            yield not_looked_at(subject, "not looked at, for the coordinator does not answer")
        return
    yield of_protocol(reply, software_version())
    yield of_clock(now - reply.time)
    if trouble:
        yield Finding(subject="reachability", verdict=Verdict.BAD, found=trouble, mend="--listen HOST:PORT with a free port")
    else:
        yield of_reachability(reply, advertised)
    yield await _link(settings, security)


async def _link(settings: PeerSettings, security: Security) -> Finding:
    target = ProbeTarget(name=COORDINATOR, address=str(settings.coordinator))
    try:
        speed = await probe_link(target, own=PeerId(settings.name), limit_seconds=PROBE_SECONDS, security=security)
    except AtollError as error:
        return Finding(subject="throughput", verdict=Verdict.POOR, found=str(error), mend="atoll-peer doctor again, later")
    return of_link(speed)
