"""The one outgoing stream to the coordinator: control messages and frames, both ways. Owns the channel; decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import grpc
import grpc.aio

from atoll.protocol.channel import open_channel, parse_address
from atoll.protocol.errors import SessionError, WireError
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.framing import Arrived, MessageStream
from atoll.protocol.ids import Generation, PeerId
from atoll.protocol.messages import EncodedMessage, Kind, MessageHeader
from atoll.protocol.outbox import Outbox
from atoll.protocol.pacing import Pacer
from atoll.protocol.presented import why_refused
from atoll.protocol.pump import STREAM_ERRORS
from atoll.protocol.security import MutualTls, Security
from atoll.protocol.transfer import COORDINATOR
from atoll.protocol.v1 import frames_pb2, session_pb2, session_pb2_grpc

MAX_ASSIGNMENT_BYTES = 256 * 2**20  # a graph of ten thousand nodes takes a few megabytes
MAX_BATCH_BYTES = 2**30  # one microbatch of one stage: images at most, token ids usually
_LIMITS = {
    Kind.ASSIGNMENT: MAX_ASSIGNMENT_BYTES,
    Kind.BATCH: MAX_BATCH_BYTES,
    Kind.MEASUREMENT: MAX_ASSIGNMENT_BYTES + MAX_BATCH_BYTES,
}
_NOT_FOR_US = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
FLUSH_SECONDS = 1.0  # for the last words of a peer that ends

SessionCall: TypeAlias = grpc.aio.StreamStreamCall[session_pb2.PeerMessage, session_pb2.CoordinatorMessage]
Received: TypeAlias = session_pb2.CoordinatorMessage | EncodedMessage


class Connection:
    """``on_received`` gets every control message and whole message, in order; ``on_lost`` a sentence when the stream ends."""

    def __init__(
        self,
        own: PeerId,
        address: str,
        on_received: Callable[[Received], None],
        on_lost: Callable[[str], None],
        pacers: Sequence[Pacer] = (),
        chaos: FaultPoints | None = None,
        security: Security | None = None,
    ) -> None:
        self._chaos = chaos or FaultPoints()
        self._address = address
        self._on_received = on_received
        self._on_lost = on_lost
        self._security = security
        self._channel = open_channel(address, security)
        self._stub = session_pb2_grpc.CoordinatorStub(self._channel)
        self._outbox: Outbox[session_pb2.PeerMessage] = Outbox(
            own=own, other=COORDINATOR, stream=MessageStream(_accept), wrap=_wrap, pacers=pacers
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._call: SessionCall | None = None
        self._spoke = time.monotonic()
        self.is_foreign = False
        """Whether what listens there has shown that it is no coordinator."""

    @property
    def unspoken_seconds(self) -> float:
        """For how long nothing was written to the coordinator."""
        return time.monotonic() - self._spoke

    async def open(self, timeout_seconds: float) -> None:
        """Connects; raises SessionError when nothing listens there in time."""
        try:
            await asyncio.wait_for(self._channel.channel_ready(), timeout_seconds)
        except TimeoutError:
            if isinstance(self._security, MutualTls):
                reason = await why_refused(parse_address(self._address), self._security.credentials)
                raise SessionError(f"no session with the coordinator at {self._address}: {reason}") from None
            raise SessionError(
                f"no coordinator answers at {self._address} after {timeout_seconds:g} s: check that `atoll run` is running "
                "there with --listen on that port and with --insecure as well, and that no firewall is in between"
            ) from None
        self._call = self._stub.Session()
        self._tasks = [
            asyncio.create_task(self._write(self._call), name="session writer"),
            asyncio.create_task(self._read(self._call), name="session reader"),
        ]

    def tell(self, message: session_pb2.PeerMessage) -> None:
        """Queues a control message."""
        self._outbox.put(message)

    def advance(self, generation: Generation) -> None:
        """Drops what is under way for older generations."""
        self._outbox.advance(generation)

    async def close(self) -> None:
        """Writes what is queued, within a second, and closes the channel."""
        if self._call is not None:
            self._outbox.close()
            await asyncio.wait(self._tasks[:1], timeout=FLUSH_SECONDS)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._call.cancel()
        await self._channel.close(grace=None)

    async def _write(self, call: SessionCall) -> None:
        with contextlib.suppress(*STREAM_ERRORS):  # the reader reports why the stream ended
            while (dispatch := await self._outbox.next()) is not None:
                await self._chaos.passable(COORDINATOR)
                await call.write(dispatch.item)
                self._told(dispatch.item)
            await call.done_writing()

    async def _read(self, call: SessionCall) -> None:
        try:
            while isinstance(message := await call.read(), session_pb2.CoordinatorMessage):
                await self._chaos.passable(COORDINATOR)
                self._received(message)
            code = await call.code()
            self.is_foreign = code is grpc.StatusCode.UNIMPLEMENTED
            reason = _ending(self._address, code, await call.details())
        except grpc.aio.AioRpcError as error:
            if error.code() in _NOT_FOR_US:
                rejected = session_pb2.Rejected(reason=error.details() or error.code().name)
                self._on_received(session_pb2.CoordinatorMessage(rejected=rejected))
                return
            self.is_foreign = error.code() is grpc.StatusCode.UNIMPLEMENTED
            reason = _ending(self._address, error.code(), error.details())
        except WireError as error:
            reason = f"the coordinator at {self._address} broke the protocol: {error}"
        self._on_lost(reason)

    def _told(self, message: session_pb2.PeerMessage) -> None:
        self._spoke = time.monotonic()
        if message.HasField("report") and not message.report.evaluation:
            self._chaos.reached("waiting for commit", step=message.report.step)

    def _received(self, message: session_pb2.CoordinatorMessage) -> None:
        if message.WhichOneof("content") != "frame":
            self._on_received(message)
            return
        for event in self._outbox.handle(message.frame):
            if isinstance(event, Arrived):
                self._on_received(event.message)
            else:
                raise WireError(str(self._outbox.error_of(event)))


def _wrap(frame: frames_pb2.Frame) -> session_pb2.PeerMessage:
    return session_pb2.PeerMessage(frame=frame)


def _accept(header: MessageHeader) -> str | None:
    """Judges the header of a message from the coordinator."""
    limit = _LIMITS.get(header.key.kind)
    if limit is None:
        return f"a session carries no {header.key.kind.name.lower()} messages"
    if header.num_bytes > limit:
        return f"{header.num_bytes} bytes are more than the {limit} that a peer accepts"
    return None


def _ending(address: str, code: grpc.StatusCode, details: str | None) -> str:
    """Why the stream ended, in a sentence."""
    match code:
        case grpc.StatusCode.OK:
            return f"the coordinator at {address} ended the session without a reason: see the last line that it printed"
        case grpc.StatusCode.UNAVAILABLE:
            return f"the connection to the coordinator at {address} broke ({details}): it ended, or the network did"
        case grpc.StatusCode.UNIMPLEMENTED:
            return f"what listens at {address} is no Atoll coordinator of this version: check address and port"
    return f"the coordinator at {address} ended the session: {details or code.name}"
