"""A coordinator over real gRPC that does only what a test tells it to, in any order, right or wrong."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import grpc.aio
from torch import Tensor

from atoll.compression.registry import encode_message
from atoll.coordinator.transfer import receive_state, stream_state
from atoll.protocol.channel import PROTOCOL_VERSION, start_server
from atoll.protocol.framing import MessageStream
from atoll.protocol.ids import Generation, MicrobatchIndex, PeerId, StageIndex, StepNumber
from atoll.protocol.messages import Kind, Message, MessageHeader, MessageKey
from atoll.protocol.outbox import Outbox
from atoll.protocol.pump import STREAM_ERRORS
from atoll.protocol.transfer import COORDINATOR
from atoll.protocol.v1 import frames_pb2, session_pb2, session_pb2_grpc

WAIT_SECONDS = 20.0
RUN_ID = "5e" * 16


class Seat:
    """The coordinator's end of one peer's session."""

    def __init__(self, join: session_pb2.Join) -> None:
        self.join = join
        self.peer = PeerId(join.name)
        self.said: list[session_pb2.PeerMessage] = []
        self.gone = False
        self.progress = session_pb2.Progress()
        self.stored: dict[str, Tensor] = {}
        self._news = asyncio.Condition()
        self._outbox: Outbox[session_pb2.CoordinatorMessage] = Outbox(
            own=COORDINATOR,
            other=self.peer,
            stream=MessageStream(_refuse),
            wrap=lambda frame: session_pb2.CoordinatorMessage(frame=frame),
        )

    def tell(self, **content: Any) -> None:
        """Sends a control message, for example ``tell(start=StartStep(...))``."""
        self._outbox.put(session_pb2.CoordinatorMessage(**content))

    def submit(self, message: Message) -> asyncio.Future[None]:
        """Sends tensors."""
        return self._outbox.submit(encode_message(message))

    def hang_up(self) -> None:
        """Ends the session after what is queued."""
        self._outbox.close()

    async def hears(self, content: str, *, within_seconds: float = WAIT_SECONDS) -> Any:
        """The first message of this kind that the peer says; takes it and forgets what came before it."""

        def found() -> bool:
            return self.gone or any(message.WhichOneof("content") == content for message in self.said)

        async with self._news:
            try:
                await asyncio.wait_for(self._news.wait_for(found), within_seconds)
            except TimeoutError:
                raise AssertionError(f"{self.peer} did not say {content!r}; it said {self.said}") from None
        while self.said:
            message = self.said.pop(0)
            if message.WhichOneof("content") == content:
                return getattr(message, content)
            if message.WhichOneof("content") == "fault":
                raise AssertionError(f"{self.peer} reports instead of {content!r}: {message.fault}")
        raise AssertionError(f"{self.peer} left without saying {content!r}")

    async def serve(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Runs the session until either side ends it."""
        reading = asyncio.create_task(self._read(context))
        writing = asyncio.create_task(self._write(context))
        try:
            await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, writing):
                task.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)
            await self._note(None)

    async def _read(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            while isinstance(message := await context.read(), session_pb2.PeerMessage):
                if message.HasField("frame"):
                    self._outbox.handle(message.frame)
                else:
                    await self._note(message)
        except STREAM_ERRORS:
            return

    async def _write(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            while (dispatch := await self._outbox.next()) is not None:
                await context.write(dispatch.item)
        except STREAM_ERRORS:
            return

    async def _note(self, message: session_pb2.PeerMessage | None) -> None:
        async with self._news:
            if message is None:
                self.gone = True
            elif message.HasField("progress"):
                self.progress = message.progress
            else:
                self.said.append(message)
            self._news.notify_all()


class ScriptedCoordinator(session_pb2_grpc.CoordinatorServicer):
    """Welcomes whoever joins; ``refusal`` turns every peer away with that reason. ``values`` are what FetchState gives."""

    def __init__(self, refusal: str = "", run_id: str = RUN_ID, num_unanswered: int = 0) -> None:
        self.address = ""
        self.seats: dict[PeerId, Seat] = {}
        self.values: dict[str, Tensor] = {}
        self._refusal = refusal
        self._num_unanswered = num_unanswered
        self._run_id = run_id
        self._joined = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    async def start(self, listen: str = "127.0.0.1:0") -> str:
        """The address that peers join."""
        register = partial(session_pb2_grpc.add_CoordinatorServicer_to_server, self)
        self._server, self.address = await start_server([register], listen)
        return self.address

    async def stop(self) -> None:
        """Ends all sessions at once."""
        if self._server is not None:
            await self._server.stop(grace=None)

    async def seated(self, *names: str, within_seconds: float = WAIT_SECONDS) -> list[Seat]:
        """The sessions of these peers, once all have joined."""
        async with self._joined:
            await asyncio.wait_for(self._joined.wait_for(lambda: set(names) <= set(self.seats)), within_seconds)
        return [self.seats[PeerId(name)] for name in names]

    async def Session(self, request_iterator: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        first = await context.read()
        assert isinstance(first, session_pb2.PeerMessage)
        assert first.HasField("join"), "a peer says Join first"
        assert first.join.protocol_version == PROTOCOL_VERSION
        if self._num_unanswered:
            self._num_unanswered -= 1
            await context.read()  # until the peer gives up
            return
        seat = Seat(first.join)
        if self._refusal:
            seat.tell(rejected=session_pb2.Rejected(reason=self._refusal))
            seat.hang_up()
        else:
            seat.tell(welcome=session_pb2.Welcome(run="test", name=seat.peer, run_id=self._run_id))
        async with self._joined:
            self.seats[seat.peer] = seat
            self._joined.notify_all()
        await seat.serve(context)

    async def StoreState(self, request_iterator: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async def keep(peer: PeerId, key: MessageKey, name: str, tensor: Tensor) -> None:
            self.seats[peer].stored[name] = tensor.clone()

        await receive_state(context, lambda peer, header: None, keep)

    async def FetchState(
        self, request: session_pb2.FetchStateRequest, context: grpc.aio.ServicerContext[Any, frames_pb2.Frame]
    ) -> None:
        key = MessageKey(
            generation=Generation(request.generation),
            step=StepNumber(0),
            microbatch=MicrobatchIndex(0),
            kind=Kind.STATE,
            source=StageIndex(0),
            target=StageIndex(0),
        )
        await stream_state(context, key, request.names, self.values.__getitem__)


def _refuse(header: MessageHeader) -> str | None:
    return f"a peer sends no {header.key.kind.name} on its session"
