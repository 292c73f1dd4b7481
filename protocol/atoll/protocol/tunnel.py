"""Carries one local TCP connection over a gRPC stream, and lets this process dial a peer through such a stream.

gRPC dials addresses. So there is one on loopback for each peer that is reached through a tunnel, its *entrance*: whatever
connects there is carried to that peer. What goes through is the peers' own mutual TLS; an entrance adds no trust, and gives
none to others on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

from atoll.protocol.channel import PROTOCOL_VERSION, open_channel
from atoll.protocol.errors import LinkError, WireError
from atoll.protocol.ids import PeerId
from atoll.protocol.pump import STREAM_ERRORS, describe
from atoll.protocol.security import Security
from atoll.protocol.v1 import relay_pb2_grpc
from atoll.protocol.v1.relay_pb2 import TunnelFrame, TunnelHello

FRAME_BYTES = 64 * 1024
"""What is read from a connection at once; the largest frame that is accepted is not much larger."""
OPEN_SECONDS = 10.0
"""From the hello of whoever dials until the target has answered."""
_BUFFER_BYTES = 256 * 1024
"""Of the local connection: more would only delay what is urgent behind what is not."""
_END_SECONDS = 2.0

_log = logging.getLogger(__name__)


class TunnelDuplex(Protocol):
    """What a client's call and a server's context have in common. ``read`` returns no frame at the end."""

    async def read(self) -> object: ...

    async def write(self, message: TunnelFrame, /) -> None: ...


class Tunnel(Protocol):
    """Carries a connection to a peer until either ends it. Raises LinkError where the peer is not reached."""

    def __call__(self, target: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, /) -> Awaitable[None]: ...


async def read_data(duplex: TunnelDuplex) -> TunnelFrame | None:
    """The next frame with data; None at the end. Raises WireError for anything else."""
    frame = await duplex.read()
    if not isinstance(frame, TunnelFrame):
        return None
    if not frame.HasField("data") or len(frame.data) > FRAME_BYTES:
        raise WireError(f"{frame.WhichOneof('content') or 'an empty frame'} in a tunnel, or too much at once")
    return frame


async def carry(duplex: TunnelDuplex, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Both ways, a frame at a time, until one of the two ends; a fast sender waits for a slow receiver."""
    ways = [asyncio.create_task(_send(duplex, reader)), asyncio.create_task(_receive(duplex, writer))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def carry_over_relay(
    relay: str, security: Security | None, hello: TunnelHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Opens a tunnel at the relay, as either of its ends, and carries a connection through it. Raises LinkError when the relay,
    or through it the other end, does not answer or refuses."""
    other = PeerId(hello.target or "whoever wants this peer")
    hello.protocol_version = PROTOCOL_VERSION
    async with open_channel(relay, security) as channel:
        call = relay_pb2_grpc.RelayStub(channel).Tunnel()
        try:
            await call.write(TunnelFrame(hello=hello))
            answer: object = await asyncio.wait_for(call.read(), 2 * OPEN_SECONDS)
            if not isinstance(answer, TunnelFrame) or not answer.HasField("opened"):
                raise LinkError(other, "the relay did not open a tunnel")
            await carry(call, reader, writer)
            await call.done_writing()
            async with asyncio.timeout(_END_SECONDS):  # what was sent last is on its way until the relay ends the stream
                while isinstance(await call.read(), TunnelFrame):
                    pass
        except TimeoutError:
            raise LinkError(other, f"the relay at {relay} did not answer in time") from None
        except STREAM_ERRORS as error:
            raise LinkError(other, f"not through the relay at {relay}: {describe(error)}") from error
        finally:
            call.cancel()


class Entrances:
    """An entrance for each peer that is reached through ``tunnel``, from when it is first asked for until :meth:`close`."""

    def __init__(self, tunnel: Tunnel) -> None:
        self._tunnel = tunnel
        self._servers: dict[PeerId, asyncio.Server] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Lock()

    async def entrance(self, target: PeerId) -> str:
        """Where to dial ``target``: an address of this machine."""
        async with self._opening:
            server = self._servers.get(target)
            if server is None:
                listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
                listening.bind(("127.0.0.1", 0))
                server = await asyncio.start_server(self._connected(target), sock=listening, limit=FRAME_BYTES)
                self._servers[target] = server
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """No more entrances, and whatever came through them ends."""
        for server in self._servers.values():
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._servers.clear()

    def _connected(self, target: PeerId) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._carry(target, reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return connected

    async def _carry(self, target: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._tunnel(target, reader, writer)
        except (LinkError, WireError) as error:
            _log.info("%s", error)
        finally:
            await close_connection(writer)


async def close_connection(writer: asyncio.StreamWriter) -> None:
    """Closes a connection, whatever state it is in."""
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), _END_SECONDS)


async def _send(duplex: TunnelDuplex, reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError, *STREAM_ERRORS):
        while data := await reader.read(FRAME_BYTES):
            await duplex.write(TunnelFrame(data=data))


async def _receive(duplex: TunnelDuplex, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, WireError, *STREAM_ERRORS):
        while (frame := await read_data(duplex)) is not None:
            writer.write(frame.data)
            await writer.drain()
