"""The coordinator's end of one peer's session: control messages and frames on one stream. Decides nothing."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc.aio

from atoll.coordinator.run.resuming import Held
from atoll.coordinator.sessions.membership import Member
from atoll.protocol.errors import LinkError, WireError
from atoll.protocol.framing import MessageStream
from atoll.protocol.ids import Generation, PeerId
from atoll.protocol.messages import EncodedMessage, MessageHeader
from atoll.protocol.outbox import Outbox
from atoll.protocol.pacing import paced_chunk_bytes, pacers_with
from atoll.protocol.pump import STREAM_ERRORS, describe
from atoll.protocol.transfer import COORDINATOR
from atoll.protocol.v1 import frames_pb2, session_pb2

SessionContext = grpc.aio.ServicerContext[session_pb2.PeerMessage, session_pb2.CoordinatorMessage]

MAX_UNACKNOWLEDGED_BYTES = 64 * 2**20
"""How far batches may run ahead of what a peer has taken. Bounds this process's memory, whatever an evaluation's size."""


TAKING_SECONDS = 120.0
"""How long a peer may take none of its batches. It is alive, for its lease holds, but the batches of others wait too."""

LAST_WORD_SECONDS = 1.0
"""For a peer that may not even read any more."""


class PeerSession:
    """``on_message`` gets every control message in the order of arrival, on the event loop. ``held`` is what the peer brought
    with it; ``news`` is set whenever it says something, and when it is gone."""

    def __init__(
        self, member: Member, held: Held | None, on_message: Callable[[PeerSession, session_pb2.PeerMessage], None]
    ) -> None:
        self.member = member
        self.held = held
        self.news = asyncio.Event()
        self._on_message = on_message
        pacers = pacers_with((), member.introduction.max_download_bytes_per_second)
        self._outbox: Outbox[session_pb2.CoordinatorMessage] = Outbox(
            own=COORDINATOR,
            other=member.name,
            stream=MessageStream(_refuse_everything, chunk_bytes=paced_chunk_bytes(pacers)),
            wrap=_wrap,
            pacers=pacers,
        )
        self._flying: deque[tuple[asyncio.Future[None], int]] = deque()
        self._closing = asyncio.Event()
        self._tasks: tuple[asyncio.Task[Any], ...] = ()
        self._writer: asyncio.Task[str] | None = None
        self._close_reason = ""

    @property
    def peer(self) -> PeerId:
        return self.member.name

    def tell(self, message: session_pb2.CoordinatorMessage) -> None:
        """Queue a control message, ahead of every frame."""
        self._outbox.put(message)

    async def send(self, message: EncodedMessage) -> None:
        """Queue a message, once the peer has taken enough of the earlier ones; a peer that takes none for long is given up."""
        self._forget_settled()
        while sum(size for _, size in self._flying) > MAX_UNACKNOWLEDGED_BYTES:
            done, _ = await asyncio.wait((self._flying[0][0],), timeout=TAKING_SECONDS)
            if not done:
                self.close(f"it took none of what it was sent for {TAKING_SECONDS:g} s")
                return
            self._forget_settled()
        self._flying.append((self._outbox.submit(message), message.num_bytes))

    def advance(self, generation: Generation) -> None:
        """Drop the frames of older generations that are still to be sent."""
        self._outbox.advance(generation)

    def end(self, message: session_pb2.CoordinatorMessage) -> None:
        """Say ``message`` as the last word and close the stream."""
        self._outbox.put(message)
        self._outbox.close()

    def expel(self, reason: str) -> None:
        """Tell the peer why it is taken for lost, in case it is there after all, and close the stream."""
        self.dismiss(session_pb2.CoordinatorMessage(rejected=session_pb2.Rejected(reason=reason, again=True)), reason)

    def dismiss(self, word: session_pb2.CoordinatorMessage, reason: str) -> None:
        """Say ``word`` as the last one, and close the stream soon, whether it was read or not."""
        self._close_reason = reason
        self.end(word)
        asyncio.get_running_loop().call_later(LAST_WORD_SECONDS, self._closing.set)

    def close(self, reason: str) -> None:
        """Close the stream now."""
        self._close_reason = reason
        self._closing.set()

    async def run(self, context: SessionContext) -> str:
        """Carry the session until either side ends it; returns why it ended. To be wound up afterwards."""
        reader = asyncio.create_task(self._read(context), name=f"session reader {self.peer}")
        writer = self._writer = asyncio.create_task(self._write(context), name=f"session writer {self.peer}")
        closer = asyncio.create_task(self._closing.wait())
        self._tasks = reader, writer, closer
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        if self._close_reason:
            return self._close_reason
        return reader.result() if reader.done() else writer.result()

    async def wind_up(self) -> None:
        """Let the last word go out, and end every task."""
        self._outbox.close()
        try:
            if self._writer is not None:
                # A write that is cancelled half-way would keep the stream's end from the peer.
                await asyncio.wait((self._writer,), timeout=LAST_WORD_SECONDS)
        finally:
            for task in self._tasks:
                task.cancel()
            self._outbox.fail(LinkError(self.peer, "its session is over"))
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, context: SessionContext) -> str:
        try:
            while isinstance(message := await context.read(), session_pb2.PeerMessage):
                if message.WhichOneof("content") == "frame":
                    for event in self._outbox.handle(message.frame):
                        return str(self._outbox.error_of(event))  # type: ignore[arg-type]  # nothing arrives as a message here
                else:
                    self._on_message(self, message)
        except WireError as error:
            return f"it broke the protocol: {error}"
        except STREAM_ERRORS as error:
            return f"its connection broke: {describe(error)}"
        return "its connection ended"

    async def _write(self, context: SessionContext) -> str:
        try:
            while (dispatch := await self._outbox.next()) is not None:
                await context.write(dispatch.item)
        except STREAM_ERRORS as error:
            return f"its connection broke: {describe(error)}"
        return "the run ended"

    def _forget_settled(self) -> None:
        while self._flying and self._flying[0][0].done():
            self._flying.popleft()


def _wrap(frame: frames_pb2.Frame) -> session_pb2.CoordinatorMessage:
    return session_pb2.CoordinatorMessage(frame=frame)


def _refuse_everything(header: MessageHeader) -> str | None:
    return "a peer sends no messages on its session"
