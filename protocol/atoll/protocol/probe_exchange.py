"""One direction of a probe over a gRPC stream, for either end: to load the link, or to take what arrives."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Protocol

from atoll.protocol.errors import WireError
from atoll.protocol.messages import Kind
from atoll.protocol.pacing import Pacer, pacers_with, take_turns
from atoll.protocol.probing import LARGEST_LOAD_BYTES, MAX_BYTES, LoadSender, RateEstimator
from atoll.protocol.sending import urgency
from atoll.protocol.v1.probe_pb2 import ProbeEnd, ProbeFrame, ProbeProgress, ProbeStart

_URGENCY = urgency(Kind.STATE)


class ProbeDuplex(Protocol):
    """What a client's call and a server's context have in common. ``read`` returns no frame at the end."""

    async def read(self) -> object: ...

    async def write(self, message: ProbeFrame, /) -> None: ...


async def read_frame(duplex: ProbeDuplex) -> ProbeFrame:
    """The next frame. Raises WireError where there is none."""
    frame = await duplex.read()
    if not isinstance(frame, ProbeFrame):
        raise WireError("the other end closed the stream")
    return frame


async def send_load(duplex: ProbeDuplex, start: ProbeStart, pacers: Sequence[Pacer]) -> float:
    """Loads the link until the other end has enough, and returns the bytes a second that it found; 0 where it found none."""
    sender = LoadSender(
        time.monotonic(),
        max_seconds=start.seconds,
        max_bytes=MAX_BYTES,
        round_trip_seconds=start.round_trip_seconds,
    )
    payload = os.urandom(LARGEST_LOAD_BYTES)  # a tunnel that compresses must not look faster than it is
    pacers = pacers_with(pacers, start.max_bytes_per_second)
    progressed = asyncio.Event()
    listening = asyncio.create_task(_listen(duplex, sender, progressed))
    try:
        while not sender.finished(time.monotonic()) and not listening.done():
            progressed.clear()
            size = sender.next_bytes()
            if size == 0:
                await _heard(progressed, sender)
                continue
            try:
                await take_turns(pacers, size, _URGENCY, sender.seconds_left(time.monotonic()))
            except TimeoutError:
                break
            sender.sent(size)
            await duplex.write(ProbeFrame(load=payload[:size]))
        await duplex.write(ProbeFrame(end=ProbeEnd()))
        return await listening
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def receive_load(duplex: ProbeDuplex, start: ProbeStart) -> float:
    """Takes what the other end sends until that is enough, tells it so, and returns the bytes a second; 0 where too little
    came to tell. Raises WireError for anything else than load, or far more than there may be."""
    estimator = RateEstimator(
        time.monotonic(),
        max_seconds=start.seconds,
        max_bytes=MAX_BYTES,
        round_trip_seconds=start.round_trip_seconds,
    )
    found: float | None = None
    while True:
        frame = await read_frame(duplex)
        ended = frame.HasField("end")
        if not ended and not frame.HasField("load"):
            raise WireError(f"{frame.WhichOneof('content') or 'an empty frame'} in the middle of a load")
        estimator.arrived(len(frame.load), now := time.monotonic())
        if estimator.num_bytes > 2 * MAX_BYTES:
            raise WireError(f"it sends on after {estimator.num_bytes} bytes")
        if found is None:
            enough = ended or estimator.enough(now)
            rate = estimator.bytes_per_second() or 0.0 if enough else 0.0
            progress = ProbeProgress(bytes=estimator.num_bytes, enough=enough, bytes_per_second=rate)
            await duplex.write(ProbeFrame(progress=progress))
            found = rate if enough else None
        if ended:
            assert found is not None, "the end is always enough"
            return found


async def _listen(duplex: ProbeDuplex, sender: LoadSender, progressed: asyncio.Event) -> float:
    try:
        while True:
            frame = await read_frame(duplex)
            if not frame.HasField("progress"):
                raise WireError(f"{frame.WhichOneof('content') or 'an empty frame'} where progress was due")
            sender.progressed(frame.progress.bytes, frame.progress.enough, time.monotonic())
            progressed.set()
            if frame.progress.enough:
                return frame.progress.bytes_per_second
    finally:
        progressed.set()


async def _heard(progressed: asyncio.Event, sender: LoadSender) -> None:
    """Waits for the other end's next word, or for the sender's own limit."""
    try:
        async with asyncio.timeout(max(0.0, sender.seconds_left(time.monotonic()))):
            await progressed.wait()
    except TimeoutError:
        return
