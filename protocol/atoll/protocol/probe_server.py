"""The end of a probe that is dialled, on peers and coordinator: it serves so many at once, each for so long, whoever asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import grpc
import grpc.aio

from atoll.protocol.channel import PROTOCOL_VERSION
from atoll.protocol.errors import WireError
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.guard import not_own_name
from atoll.protocol.pacing import Pacer
from atoll.protocol.probe_exchange import receive_load, send_load
from atoll.protocol.probing import DIRECTION_SECONDS, MAX_SECONDS
from atoll.protocol.v1 import probe_pb2_grpc
from atoll.protocol.v1.probe_pb2 import ProbeBusy, ProbeFrame, ProbeHello, ProbeStart, ProbeWelcome

HELLO_SECONDS = 10.0
AGAIN_SECONDS = 0.2
"""After which a dialler that found the server busy should ask again."""
_MOST_ECHOES = 64
_LONGEST_TRIP_SECONDS = 10.0

ProbeContext = grpc.aio.ServicerContext[ProbeFrame, ProbeFrame]


async def _everybody(name: str) -> str | None:
    """Nobody is refused."""
    return None


class ProbesServicer(probe_pb2_grpc.ProbesServicer):
    """``name`` is who answers. What is sent is paced by ``pacers``, what comes by ``max_download`` bytes a second.
    ``refusal`` says why a dialler of that name is not served, None when it is."""

    def __init__(
        self,
        name: str,
        *,
        most_at_once: int = 1,
        pacers: Sequence[Pacer] = (),
        max_download: float | None = None,
        chaos: FaultPoints | None = None,
        refusal: Callable[[str], Awaitable[str | None]] = _everybody,
    ) -> None:
        self._name = name
        self._most_at_once = most_at_once
        self._pacers = tuple(pacers)
        self._max_download = max_download
        self._chaos = chaos or FaultPoints()
        self._refusal = refusal
        self._serving = 0

    @property
    def num_serving(self) -> int:
        """Probes that are being served."""
        return self._serving

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server, before it starts."""
        probe_pb2_grpc.add_ProbesServicer_to_server(self, server)

    async def Probe(self, request_iterator: object, context: ProbeContext) -> None:
        """Serves one probe to its end or its limit."""
        hello = await self._hello(context)
        if self._serving >= self._most_at_once:
            await context.write(ProbeFrame(busy=ProbeBusy(again_seconds=AGAIN_SECONDS)))
            return
        self._serving += 1
        try:
            # max(0.0, NaN) is 0, max(NaN, 0.0) is NaN
            async with asyncio.timeout(min(max(0.0, hello.limit_seconds), MAX_SECONDS)):
                await self._chaos.passable(hello.name)
                await self._serve(context)
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the probe took longer than it may")
        finally:
            self._serving -= 1

    async def _hello(self, context: ProbeContext) -> ProbeHello:
        try:
            frame: object = await asyncio.wait_for(context.read(), HELLO_SECONDS)
        except TimeoutError:
            frame = None
        if not isinstance(frame, ProbeFrame) or not frame.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first frame of a probe must be a hello")
        if frame.hello.protocol_version != PROTOCOL_VERSION:
            theirs = frame.hello.protocol_version
            reason = f"{self._name} speaks protocol {PROTOCOL_VERSION}, not {theirs}: install the same version of Atoll on both"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        refused = not_own_name(frame.hello.name) or await self._refusal(frame.hello.name)
        if refused is not None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, refused)
        return frame.hello

    async def _serve(self, context: ProbeContext) -> None:
        await context.write(ProbeFrame(welcome=ProbeWelcome(name=self._name, max_bytes_per_second=self._max_download or 0.0)))
        echoes, directions = 0, set[bool]()
        while isinstance(frame := await context.read(), ProbeFrame):
            match frame.WhichOneof("content"):
                case "echo" if echoes < _MOST_ECHOES:
                    echoes += 1
                    await context.write(frame)
                case "start" if frame.start.download not in directions:
                    directions.add(frame.start.download)
                    await self._direction(context, frame.start)
                case other:
                    raise WireError(f"{other or 'an empty frame'} has no place here, or came too often")

    async def _direction(self, context: ProbeContext, start: ProbeStart) -> None:
        start.seconds = min(max(0.0, start.seconds), DIRECTION_SECONDS)
        start.round_trip_seconds = min(max(0.0, start.round_trip_seconds), _LONGEST_TRIP_SECONDS)
        if start.download:
            await send_load(context, start, self._pacers)
        else:
            await receive_load(context, start)
