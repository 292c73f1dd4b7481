"""The end of a probe that dials: round trip, upload, download, or a sentence that says why not; always within its limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from atoll.protocol.channel import PROTOCOL_VERSION, open_channel
from atoll.protocol.errors import LinkError, Unreached, WireError
from atoll.protocol.ids import PeerId
from atoll.protocol.pacing import Pacer
from atoll.protocol.probe_exchange import read_frame, receive_load, send_load
from atoll.protocol.probing import DIRECTION_SECONDS, NUM_ECHOES
from atoll.protocol.pump import STREAM_ERRORS, describe
from atoll.protocol.security import Security
from atoll.protocol.v1 import probe_pb2_grpc
from atoll.protocol.v1.probe_pb2 import ProbeFrame, ProbeHello, ProbeStart

_RESERVE_TRIPS = 4.0
"""Round trips kept back of the time that is left, for a direction to end in."""
_SHORTEST_PAUSE_SECONDS = 0.05

ProbeCall = grpc.aio.StreamStreamCall[ProbeFrame, ProbeFrame]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """What a probe found. Rates are None where only latency was measured."""

    round_trip_seconds: float
    upload_bytes_per_second: float | None = None
    download_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTarget:
    """Whom to probe: ``name`` must be who answers at ``address``, unless it is empty."""

    name: PeerId
    address: str


async def probe_link(
    target: ProbeTarget,
    *,
    own: PeerId,
    limit_seconds: float,
    connect_seconds: float | None = None,
    latency_only: bool = False,
    pacers: Sequence[Pacer] = (),
    max_download: float | None = None,
    security: Security | None = None,
) -> LinkSpeed:
    """Measures the link to ``target``. Raises LinkError, after ``limit_seconds`` at the latest; Unreached where there is no
    connection after ``connect_seconds``.

    What is uploaded is paced by ``pacers``; the other end is asked to send no more than ``max_download`` bytes a second.
    Without ``security`` in plain text.
    """
    probe = _Probe(own, target, limit_seconds, tuple(pacers), max_download)
    try:
        async with asyncio.timeout(limit_seconds), open_channel(target.address, security, target.name) as channel:
            if connect_seconds is not None:
                await _connected(channel, target, connect_seconds)
            return await probe.run(probe_pb2_grpc.ProbesStub(channel), latency_only=latency_only)
    except TimeoutError:
        raise LinkError(target.name, f"no measurement within {limit_seconds:g} s: {probe.state()}") from None
    except (*STREAM_ERRORS, WireError) as error:
        raise LinkError(
            target.name, f"the probe failed after {probe.seconds():.1f} s {probe.doing}: {describe(error)}"
        ) from error


async def _connected(channel: grpc.aio.Channel, target: ProbeTarget, seconds: float) -> None:
    try:
        await asyncio.wait_for(channel.channel_ready(), seconds)
    except TimeoutError:
        raise Unreached(target.name, f"no connection to {target.address} within {seconds:g} s") from None


class _Probe:
    def __init__(
        self, own: PeerId, target: ProbeTarget, limit_seconds: float, pacers: Sequence[Pacer], max_download: float | None
    ) -> None:
        self._own = own
        self._target = target
        self._began = time.monotonic()
        self._deadline = self._began + limit_seconds
        self._pacers = pacers
        self._max_download = max_download
        self._since = self._began
        self.doing = ""
        self._do(f"connecting to {target.address}")

    def seconds(self) -> float:
        """Since the probe began."""
        return time.monotonic() - self._began

    def state(self) -> str:
        """What it was at, and for how long."""
        return f"it spent the last {time.monotonic() - self._since:.1f} s {self.doing}"

    async def run(self, stub: probe_pb2_grpc.ProbesStub, *, latency_only: bool) -> LinkSpeed:
        """Asks until the server has time."""
        while True:
            call = stub.Probe()
            try:
                again_seconds = await self._say_hello(call)
                if again_seconds is None:
                    return await self._measure(call, latency_only=latency_only)
            finally:
                call.cancel()
            if not self.doing.startswith("waiting"):
                self._do("waiting until it has served other probes")
            await asyncio.sleep(max(_SHORTEST_PAUSE_SECONDS, again_seconds))

    async def _say_hello(self, call: ProbeCall) -> float | None:
        """None when it is welcome, else after how many seconds to ask again."""
        left = self._deadline - time.monotonic()
        hello = ProbeHello(protocol_version=PROTOCOL_VERSION, name=self._own, limit_seconds=left)
        await call.write(ProbeFrame(hello=hello))
        answer = await read_frame(call)
        if answer.HasField("busy"):
            return answer.busy.again_seconds
        if not answer.HasField("welcome"):
            raise WireError("it did not answer hello with welcome")
        if self._target.name and answer.welcome.name != self._target.name:
            raise WireError(f"{self._target.address} is {answer.welcome.name!r}, not the peer that was meant")
        self._upload_cap = answer.welcome.max_bytes_per_second
        return None

    async def _measure(self, call: ProbeCall, *, latency_only: bool) -> LinkSpeed:
        self._do("counting its echoes")
        round_trip = min([await self._echo(call, number) for number in range(NUM_ECHOES)])
        if latency_only:
            await call.done_writing()
            return LinkSpeed(round_trip_seconds=round_trip)
        self._do("uploading to it")
        start = self._start(round_trip, directions_left=2, cap=self._upload_cap)
        await call.write(ProbeFrame(start=start))
        upload = await send_load(call, start, self._pacers)
        self._do("downloading from it")
        start = self._start(round_trip, directions_left=1, cap=self._max_download or 0.0)
        start.download = True
        await call.write(ProbeFrame(start=start))
        download = await receive_load(call, start)
        await call.done_writing()
        if upload <= 0.0 or download <= 0.0:
            way = "to" if upload <= 0.0 else "from"
            raise WireError(f"too little came through {way} it to tell a rate")
        return LinkSpeed(round_trip_seconds=round_trip, upload_bytes_per_second=upload, download_bytes_per_second=download)

    async def _echo(self, call: ProbeCall, number: int) -> float:
        sent = time.monotonic()
        await call.write(ProbeFrame(echo=number))
        answer = await read_frame(call)
        if answer.WhichOneof("content") != "echo" or answer.echo != number:
            raise WireError("it did not echo what it was sent")
        return time.monotonic() - sent

    def _start(self, round_trip: float, *, directions_left: int, cap: float) -> ProbeStart:
        left = self._deadline - time.monotonic() - _RESERVE_TRIPS * round_trip
        seconds = min(DIRECTION_SECONDS, 0.8 * left / directions_left)
        return ProbeStart(round_trip_seconds=round_trip, seconds=max(seconds, 0.0), max_bytes_per_second=cap)

    def _do(self, what: str) -> None:
        self.doing = what
        self._since = time.monotonic()
