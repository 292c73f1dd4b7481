"""Probes over real gRPC: between two ends, through a slow link, and against ends that do not play along."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from atoll.peer.measuring.probing import answer_probe
from atoll.protocol.channel import PROTOCOL_VERSION, open_channel, start_server
from atoll.protocol.errors import LinkError
from atoll.protocol.ids import PeerId
from atoll.protocol.pacing import Pacer
from atoll.protocol.probe_client import LinkSpeed, ProbeTarget, probe_link
from atoll.protocol.probe_server import ProbeContext, ProbesServicer
from atoll.protocol.v1 import probe_pb2_grpc, session_pb2
from atoll.protocol.v1.probe_pb2 import ProbeEnd, ProbeFrame, ProbeHello, ProbeProgress, ProbeStart, ProbeWelcome
from support.shaped_proxy import Shape, shaped_proxy
from support.waiting import assert_eventually

OWN, OTHER = PeerId("own"), PeerId("other")


@asynccontextmanager
async def serving(servicer: probe_pb2_grpc.ProbesServicer) -> AsyncIterator[str]:
    """The address of a server with this service."""
    server, address = await start_server(
        [lambda server: probe_pb2_grpc.add_ProbesServicer_to_server(servicer, server)], "127.0.0.1:0"
    )
    try:
        yield address
    finally:
        await server.stop(0)


async def probe(address: str, *, seconds: float = 20.0, name: PeerId = OTHER, latency_only: bool = False) -> LinkSpeed:
    target = ProbeTarget(name=name, address=address)
    return await probe_link(target, own=OWN, limit_seconds=seconds, latency_only=latency_only)


async def failure(address: str, *, seconds: float, name: PeerId = OTHER) -> str:
    """Why a probe fails; it must end soon after its limit."""
    began = time.monotonic()
    with pytest.raises(LinkError) as raised:
        await probe(address, seconds=seconds, name=name)
    assert time.monotonic() - began < seconds + 5.0
    return str(raised.value)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(up=1e6, down=3e6, delay_seconds=0.04),
        Shape(up=6e6, down=2e6, delay_seconds=0.01),
    ],
)
async def test_each_direction_of_a_slow_link_is_measured_on_its_own(shape: Shape) -> None:
    async with serving(ProbesServicer(OTHER)) as direct, shaped_proxy(direct, shape) as address:
        speed = await probe(address)
    assert speed.upload_bytes_per_second == pytest.approx(shape.up, rel=0.15)
    assert speed.download_bytes_per_second == pytest.approx(shape.down, rel=0.15)
    assert 2 * shape.delay_seconds <= speed.round_trip_seconds < 2 * shape.delay_seconds + 0.03


async def test_loopback_is_fast() -> None:
    async with serving(ProbesServicer(OTHER)) as address:
        speed = await probe(address)
    assert speed.upload_bytes_per_second is not None
    assert speed.download_bytes_per_second is not None
    assert min(speed.upload_bytes_per_second, speed.download_bytes_per_second) > 5e6
    assert 0 < speed.round_trip_seconds < 0.1


async def test_latency_alone_takes_no_load() -> None:
    async with serving(ProbesServicer(OTHER)) as address:
        speed = await probe(address, latency_only=True)
    assert speed.round_trip_seconds > 0
    assert speed.upload_bytes_per_second is None
    assert speed.download_bytes_per_second is None


async def test_caps_of_both_owners_are_kept_and_found() -> None:
    async with serving(ProbesServicer(OTHER, max_download=1e6)) as address:
        speed = await probe_link(
            ProbeTarget(name=OTHER, address=address), own=OWN, limit_seconds=20.0, pacers=(Pacer(2e6),), max_download=1.5e6
        )
    assert speed.upload_bytes_per_second == pytest.approx(1e6, rel=0.15)
    assert speed.download_bytes_per_second == pytest.approx(1.5e6, rel=0.15)


async def test_a_cap_that_lets_too_little_through_ends_the_direction_in_time() -> None:
    async with serving(ProbesServicer(OTHER)) as address:
        target = ProbeTarget(name=OTHER, address=address)
        with pytest.raises(LinkError, match="too little came through to it to tell a rate"):
            await probe_link(target, own=OWN, limit_seconds=5.0, pacers=(Pacer(1.0),))


async def test_a_second_probe_waits_until_the_first_has_ended() -> None:
    servicer = ProbesServicer(OTHER)
    async with serving(servicer) as direct, shaped_proxy(direct, Shape(up=5e6, down=5e6, delay_seconds=0.02)) as address:
        first, second = await asyncio.gather(probe(address), probe(address))
    for speed in (first, second):  # together they would have had half of it each
        assert speed.upload_bytes_per_second == pytest.approx(5e6, rel=0.2)


async def test_a_server_that_stays_busy_is_named_when_the_limit_is_over() -> None:
    servicer = ProbesServicer(OTHER)
    async with serving(servicer) as address, open_channel(address) as channel:
        call = probe_pb2_grpc.ProbesStub(channel).Probe()
        await say_hello(call, limit_seconds=20.0)
        assert "waiting until it has served other probes" in await failure(address, seconds=2.0)
        call.cancel()
        await assert_eventually(lambda: servicer.num_serving == 0)


async def say_hello(call: grpc.aio.StreamStreamCall[ProbeFrame, ProbeFrame], limit_seconds: float) -> None:
    hello = ProbeHello(protocol_version=PROTOCOL_VERSION, name=OWN, limit_seconds=limit_seconds)
    await call.write(ProbeFrame(hello=hello))
    assert (await read(call)).HasField("welcome")


async def read(call: grpc.aio.StreamStreamCall[ProbeFrame, ProbeFrame]) -> ProbeFrame:
    frame = await asyncio.wait_for(call.read(), 10)
    assert isinstance(frame, ProbeFrame)
    return frame


async def test_who_says_hello_and_then_nothing_does_not_hold_the_server() -> None:
    servicer = ProbesServicer(OTHER)
    async with serving(servicer) as address, open_channel(address) as channel:
        call = probe_pb2_grpc.ProbesStub(channel).Probe()
        await say_hello(call, limit_seconds=0.2)
        with pytest.raises(grpc.aio.AioRpcError, match="longer than it may"):
            await read(call)
        await assert_eventually(lambda: servicer.num_serving == 0)
        assert (await probe(address, latency_only=True)).round_trip_seconds > 0


async def test_a_direction_may_not_be_asked_for_again_and_again() -> None:
    async with serving(ProbesServicer(OTHER)) as address, open_channel(address) as channel:
        call = probe_pb2_grpc.ProbesStub(channel).Probe()
        await say_hello(call, limit_seconds=10.0)
        for _ in range(2):
            await call.write(ProbeFrame(start=ProbeStart(seconds=1.0)))
            await call.write(ProbeFrame(end=ProbeEnd()))
        assert (await read(call)).progress.enough
        with pytest.raises(grpc.aio.AioRpcError, match="came too often"):
            await read(call)


@pytest.mark.parametrize("download", [False, True])
async def test_limits_that_are_no_numbers_are_none(download: bool) -> None:
    servicer = ProbesServicer(OTHER)
    nan = float("nan")
    async with serving(servicer) as address, open_channel(address) as channel:
        call = probe_pb2_grpc.ProbesStub(channel).Probe()
        await say_hello(call, limit_seconds=10.0)
        start = ProbeStart(seconds=nan, round_trip_seconds=nan, max_bytes_per_second=nan, download=download)
        await call.write(ProbeFrame(start=start))
        if download:
            assert (await read(call)).HasField("end")
        else:
            await call.write(ProbeFrame(load=b"enough at once"))
            assert (await read(call)).progress.enough
        call.cancel()


async def test_who_gives_no_number_as_its_limit_does_not_hold_the_server() -> None:
    servicer = ProbesServicer(OTHER)
    async with serving(servicer) as address, open_channel(address) as channel:
        call = probe_pb2_grpc.ProbesStub(channel).Probe()
        await say_hello(call, limit_seconds=float("nan"))
        await assert_eventually(lambda: servicer.num_serving == 0)
        call.cancel()


class Scripted(probe_pb2_grpc.ProbesServicer):
    """Plays along until the frame called ``until`` comes, and then says ``last``, or nothing."""

    def __init__(self, until: str, last: ProbeFrame | None = None) -> None:
        self._until = until
        self._last = last

    async def Probe(self, request_iterator: object, context: ProbeContext) -> None:
        told = False
        while isinstance(frame := await context.read(), ProbeFrame):
            content = frame.WhichOneof("content")
            if content == self._until:
                if self._last is not None:
                    await context.write(self._last)
                await asyncio.Event().wait()
            elif content == "hello":
                await context.write(ProbeFrame(welcome=ProbeWelcome(name=OTHER)))
            elif content == "echo":
                await context.write(frame)
            elif content == "load" and not told:
                told = True
                await context.write(ProbeFrame(progress=ProbeProgress(bytes=2**40, enough=True, bytes_per_second=1e6)))


@pytest.mark.parametrize(
    ("until", "doing"),
    [
        ("hello", "connecting to"),
        ("echo", "counting its echoes"),
        ("start", "uploading to it"),
        ("load", "uploading to it"),
        ("end", "downloading from it"),
    ],
)
async def test_whoever_falls_silent_is_given_up_in_time(until: str, doing: str) -> None:
    async with serving(Scripted(until)) as address:
        found = await failure(address, seconds=4.0)
    assert found.startswith("link to other: no measurement within 4 s: it spent the last ")
    assert doing in found


@pytest.mark.parametrize("until", ["hello", "echo", "start"])
async def test_whoever_answers_nonsense_is_no_measurement(until: str) -> None:
    async with serving(Scripted(until, last=ProbeFrame(load=b"nonsense"))) as address:
        assert "the probe failed after" in await failure(address, seconds=10.0)


async def test_a_socket_that_never_answers() -> None:
    silent: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent.append(writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        assert f"connecting to 127.0.0.1:{port}" in await failure(f"127.0.0.1:{port}", seconds=1.0)
    finally:
        server.close()
        for writer in silent:
            writer.close()
        await server.wait_closed()


async def test_nobody_listens() -> None:
    async with serving(ProbesServicer(OTHER)) as address:
        pass
    assert "refused" in await failure(address, seconds=10.0)


async def test_somebody_else_answers() -> None:
    async with serving(ProbesServicer("stranger")) as address:
        assert "is 'stranger', not the peer that was meant" in await failure(address, seconds=10.0)


async def test_the_answer_to_the_coordinator() -> None:
    async with serving(ProbesServicer("coordinator")) as address:
        probed = await answer_probe(session_pb2.Probe(number=7, limit_seconds=20.0), own=OWN, coordinator=address)
    assert (probed.number, probed.failure) == (7, "")
    assert probed.round_trip_seconds > 0
    assert min(probed.upload_bytes_per_second, probed.download_bytes_per_second) > 0
    gone = session_pb2.Probe(number=8, peer="other", address=address, limit_seconds=5.0)
    probed = await answer_probe(gone, own=OWN, coordinator="127.0.0.1:1")
    assert probed.number == 8
    assert probed.failure.startswith("link to other: the probe failed after")
