"""A TCP proxy that is as slow as a link far away: a rate and a delay, each direction on its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

_PIECE_BYTES = 8 * 1024
_QUEUE_BYTES = 128 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Bytes a second from who dials to whom it dials, and back; seconds one way. Every connection has these rates for itself,
    or all that are open share them."""

    up: float
    down: float
    delay_seconds: float
    shared: bool = False


@dataclass(slots=True)
class Wire:
    """One direction, and when it is free again."""

    rate: float
    free: float = 0.0

    def leave(self, num_bytes: int) -> float:
        """When the last of so many bytes has left."""
        self.free = max(self.free, time.monotonic()) + num_bytes / self.rate
        return self.free


@asynccontextmanager
async def shaped_proxy(target: str, shape: Shape) -> AsyncIterator[str]:
    """The address to dial instead of ``target``."""
    host, _, port = target.rpartition(":")
    open_streams: set[asyncio.Task[None]] = set()
    common = Wire(shape.up), Wire(shape.down)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_streams.add(task)
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        up, down = common if shape.shared else (Wire(shape.up), Wire(shape.down))
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await asyncio.gather(
                _pass(reader, far_writer, up, shape.delay_seconds),
                _pass(far_reader, writer, down, shape.delay_seconds),
            )
        for one in (writer, far_writer):
            one.close()
        open_streams.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(open_streams):
            task.cancel()
        await asyncio.gather(*open_streams, return_exceptions=True)
        await server.wait_closed()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wire: Wire, delay_seconds: float) -> None:
    """Bytes leave at the wire's rate and arrive a delay later; as many as the link holds, and a queue, are under way."""
    most = int(_QUEUE_BYTES + wire.rate * delay_seconds) // _PIECE_BYTES + 1
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=most)

    async def arrive() -> None:
        piece = b"first"
        while piece:
            due, piece = await under_way.get()
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            writer.write(piece)
            await writer.drain()
        writer.close()

    arriving = asyncio.create_task(arrive())
    try:
        piece = b"first"
        while piece and not arriving.done():
            piece = await reader.read(_PIECE_BYTES)  # empty at the end, which takes as long as anything else to get through
            await under_way.put((wire.leave(len(piece)) + delay_seconds, piece))
        await arriving
    finally:
        arriving.cancel()
        await asyncio.gather(arriving, return_exceptions=True)
