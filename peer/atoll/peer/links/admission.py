"""The service that neighbours dial: who says hello properly and is expected gets a link, anybody else a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio

from atoll.peer.links.link import Link
from atoll.protocol.channel import PROTOCOL_VERSION
from atoll.protocol.guard import not_own_name
from atoll.protocol.ids import Generation, PeerId
from atoll.protocol.v1 import frames_pb2, frames_pb2_grpc

_HELLO_SECONDS = 10.0  # from the opening of a stream to its first frame

Context = grpc.aio.ServicerContext[frames_pb2.Frame, frames_pb2.Frame]


class NotAdmitted(Exception):
    """Why a stream is not served. The dialler tries again after FAILED_PRECONDITION, and gives up after other codes."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class LinksServicer(frames_pb2_grpc.LinksServicer):
    """``link_for`` finds the link for a peer and a plan's generation, or raises NotAdmitted."""

    def __init__(self, own: PeerId, link_for: Callable[[PeerId, Generation], Awaitable[Link]]) -> None:
        self._own = own
        self._link_for = link_for

    async def Link(self, request_iterator: object, context: Context) -> None:
        """Serves one stream until it ends."""
        try:
            hello = await self._read_hello(context)
            link = await self._link_for(PeerId(hello.peer), Generation(hello.generation))
            await link.passable()
        except NotAdmitted as error:
            await context.abort(error.code, error.reason)
        answer = frames_pb2.Hello(peer=self._own, generation=hello.generation, protocol_version=PROTOCOL_VERSION)
        await context.write(frames_pb2.Frame(hello=answer))
        await link.serve(context)

    async def _read_hello(self, context: Context) -> frames_pb2.Hello:
        try:
            frame: object = await asyncio.wait_for(context.read(), _HELLO_SECONDS)
        except TimeoutError:
            raise NotAdmitted(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {_HELLO_SECONDS:g} s") from None
        if not isinstance(frame, frames_pb2.Frame) or not frame.HasField("hello"):
            raise NotAdmitted(grpc.StatusCode.INVALID_ARGUMENT, "the first frame must be a hello")
        if frame.hello.protocol_version != PROTOCOL_VERSION:
            reason = (
                f"{self._own} speaks protocol {PROTOCOL_VERSION}, {frame.hello.peer} protocol "
                f"{frame.hello.protocol_version}: install the same version of Atoll on both"
            )
            raise NotAdmitted(grpc.StatusCode.INVALID_ARGUMENT, reason)
        if (foreign := not_own_name(frame.hello.peer)) is not None:
            raise NotAdmitted(grpc.StatusCode.PERMISSION_DENIED, foreign)
        return frame.hello
