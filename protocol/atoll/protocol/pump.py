"""Runs an outbox of frames over a gRPC stream: one task reads, one writes, one watches for silence.

A neighbour whose process stands still keeps its connection, so each end sends a ping when it has nothing else to say, and calls
the other silent when nothing at all was heard for a while. How long a pong takes is the round trip, or more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import grpc
import grpc.aio

from atoll.protocol.errors import LinkError, WireError
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.framing import Arrived, CorruptSender, GaveUp
from atoll.protocol.ids import PeerId
from atoll.protocol.outbox import Dispatch, Outbox
from atoll.protocol.v1 import frames_pb2

STREAM_ERRORS = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""What grpc raises, on either side, when a stream has ended."""


_LAST_WRITE_SECONDS = 2.0
_LAST_READ_SECONDS = 1.0


class Duplex(Protocol):
    """What a client's call and a server's context have in common. ``read`` returns no frame at the end."""

    async def read(self) -> object: ...

    async def write(self, message: frames_pb2.Frame, /) -> None: ...


class FramePump:
    """For one stream. ``on_event``, ``on_written(dispatch, seconds)``, ``on_read(frame)``, once what the frame brought is told,
    and ``on_round_trip(seconds)`` are called on the event loop."""

    def __init__(
        self,
        *,
        other: PeerId,
        duplex: Duplex,
        outbox: Outbox[frames_pb2.Frame],
        silence_seconds: float,
        on_event: Callable[[Arrived | GaveUp | CorruptSender], None],
        on_written: Callable[[Dispatch[frames_pb2.Frame], float], None] = lambda _dispatch, _seconds: None,
        on_read: Callable[[frames_pb2.Frame], None] = lambda _frame: None,
        on_round_trip: Callable[[float], None] = lambda _seconds: None,
        chaos: FaultPoints | None = None,
    ) -> None:
        self._other = other
        self._duplex = duplex
        self._outbox = outbox
        self._silence_seconds = silence_seconds
        self._on_event = on_event
        self._on_written = on_written
        self._on_read = on_read
        self._on_round_trip = on_round_trip
        self._chaos = chaos or FaultPoints()
        self._pinged = 0.0
        self._num_pings = 0
        self._heard = time.monotonic()
        self._writing = False
        self._stopping = False
        self._is_client = isinstance(duplex, grpc.aio.StreamStreamCall)

    @property
    def silent_seconds(self) -> float:
        """How long nothing has been heard from the other end."""
        return time.monotonic() - self._heard

    async def run(self, until: asyncio.Event | None = None) -> None:
        """Returns when the other end closes the stream, or ``until`` is set; raises LinkError when the stream breaks."""
        reader, writer = asyncio.create_task(self._read()), asyncio.create_task(self._write())
        running = [reader, writer, asyncio.create_task(self._watch())]
        if until is not None:
            running.append(asyncio.create_task(_wait(until)))
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():  # it knows that the stream has ended, the reader is about to hear why
                await asyncio.wait((reader,), timeout=_LAST_READ_SECONDS)
        finally:
            self._stopping = True
            if self._writing and not self._is_client:
                # A server cannot send its status while a write is under way: the other end would never see the stream end.
                await asyncio.wait((writer,), timeout=_LAST_WRITE_SECONDS)
            for task in running:
                task.cancel()
            outcomes = await asyncio.gather(*running, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _read(self) -> None:
        try:
            while isinstance(frame := await self._duplex.read(), frames_pb2.Frame):
                await self._chaos.passable(self._other)
                self._heard = time.monotonic()
                if frame.HasField("ping"):
                    self._outbox.put(frames_pb2.Frame(pong=frame.ping))
                elif frame.HasField("pong"):
                    self._hear_pong(frame.pong)
                else:
                    for event in self._outbox.handle(frame):
                        self._on_event(event)
                    self._on_read(frame)
        except WireError as error:
            raise LinkError(self._other, str(error)) from error
        except STREAM_ERRORS as error:
            raise self._broken(error) from error

    async def _write(self) -> None:
        try:
            while (dispatch := await self._outbox.next()) is not None and not self._stopping:
                began = time.monotonic()
                if dispatch.item.HasField("ping"):
                    self._pinged = began
                key = None if dispatch.message is None else dispatch.message.key
                frame = self._chaos.outgoing(dispatch.item, key, self._other)
                await self._chaos.passable(self._other)
                self._writing = True
                await self._duplex.write(frame)
                self._writing = False
                self._on_written(dispatch, time.monotonic() - began)
                if self._stopping:
                    return
            if isinstance(self._duplex, grpc.aio.StreamStreamCall):
                await self._duplex.done_writing()
        except STREAM_ERRORS as error:
            raise self._broken(error) from error
        await asyncio.Event().wait()  # the reader decides when the stream is over

    async def _watch(self) -> None:
        period = self._silence_seconds / 5
        while True:
            if not self._writing:
                self._num_pings += 1
                self._outbox.put(frames_pb2.Frame(ping=self._num_pings))
            slept = time.monotonic()
            await asyncio.sleep(period)
            if time.monotonic() - slept > 2 * period:
                # This process stood still: what the other end said meanwhile is yet to be read.
                self._heard = time.monotonic()
            elif self.silent_seconds > self._silence_seconds:
                raise LinkError(self._other, f"nothing was heard from it for {self.silent_seconds:.1f} s")

    def _hear_pong(self, number: int) -> None:
        if number == self._num_pings:
            self._on_round_trip(time.monotonic() - self._pinged)

    def _broken(self, error: BaseException) -> LinkError:
        return LinkError(self._other, f"the stream broke: {describe(error)}")


def describe(error: BaseException) -> str:
    """What grpc's error says, for a sentence."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.details() or 'no details'} ({error.code().name})"
    return str(error) or type(error).__name__


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
