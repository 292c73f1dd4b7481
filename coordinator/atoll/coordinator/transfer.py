"""State by name between the coordinator and a peer, the coordinator's end: what its servicer calls.

Tensors are taken and given one at a time, so memory holds two of them however large the model is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import grpc.aio
from torch import Tensor

from atoll.compression.registry import decode_message, encode_message
from atoll.protocol.errors import IdentityRefused, LinkError, WireError
from atoll.protocol.framing import Arrived, CorruptSender, GaveUp, MessageStream, frames_of
from atoll.protocol.guard import not_own_name
from atoll.protocol.ids import PeerId
from atoll.protocol.messages import EncodedMessage, Kind, Message, MessageHeader, MessageKey
from atoll.protocol.outbox import Outbox
from atoll.protocol.pacing import paced_chunk_bytes, pacers_with, take_turns
from atoll.protocol.pump import FramePump
from atoll.protocol.sending import urgency
from atoll.protocol.transfer import COORDINATOR, STATE_CREDIT, TRANSFER_SILENCE_SECONDS
from atoll.protocol.v1 import frames_pb2

Context = grpc.aio.ServicerContext[frames_pb2.Frame, frames_pb2.Frame]
Accept = Callable[[PeerId, MessageHeader], str | None]
OnTensor = Callable[[PeerId, MessageKey, str, Tensor], Awaitable[None]]
Source = Callable[[str], Tensor]

_HELLO_SECONDS = 10.0


async def receive_state(
    context: Context, accept: Accept, on_tensor: OnTensor, *, silence_seconds: float = TRANSFER_SILENCE_SECONDS
) -> PeerId:
    """Serves one StoreState stream to its end and returns who sent it.

    ``accept`` judges each header (by peer, name, shape, ...) before anything is allocated. ``on_tensor`` is awaited for one
    tensor after the other; the peer hears that its state is stored only when this returned. Raises LinkError when the peer is
    gone, silent or keeps sending damaged messages, IdentityRefused when it is not who it says it is, WireError for bytes that
    cannot be decoded, and what ``on_tensor`` raises (a full disk); the caller aborts the stream with the sentence.
    """
    try:
        frame: object = await asyncio.wait_for(context.read(), _HELLO_SECONDS)
    except TimeoutError:
        frame = None
    if not isinstance(frame, frames_pb2.Frame) or not frame.HasField("hello"):
        raise WireError("the first frame of a state transfer must be a hello")
    peer = PeerId(frame.hello.peer)
    if (foreign := not_own_name(peer)) is not None:
        raise IdentityRefused(foreign)
    await _Receiver(peer, context, lambda header: accept(peer, header), on_tensor, silence_seconds).run()
    return peer


async def stream_state(
    context: Context,
    key: MessageKey,
    names: Iterable[str],
    source: Source,
    *,
    max_bytes_per_second: float = 0.0,
    silence_seconds: float = TRANSFER_SILENCE_SECONDS,
) -> None:
    """Answers a FetchState request, no faster than the peer's owner lets it (0: no limit). ``source`` gives a tensor by name,
    on another thread."""
    pacers = pacers_with((), max_bytes_per_second)
    for number, name in enumerate(names, start=1):
        encoded = await asyncio.to_thread(_encode, key, name, source)
        for frame in frames_of(encoded, number, paced_chunk_bytes(pacers)):
            await take_turns(pacers, frame.ByteSize(), urgency(Kind.STATE), silence_seconds)
            await asyncio.wait_for(context.write(frame), silence_seconds)


def _encode(key: MessageKey, name: str, source: Source) -> EncodedMessage:
    return encode_message(Message(key=key, tensors=((name, source(name)),)))


class _Receiver:
    """One stream: the pump fills a queue that credit bounds, one task empties it."""

    def __init__(
        self,
        peer: PeerId,
        context: Context,
        accept: Callable[[MessageHeader], str | None],
        on_tensor: OnTensor,
        silence_seconds: float,
    ) -> None:
        stream = MessageStream(accept, credit=STATE_CREDIT)
        self._peer = peer
        self._on_tensor = on_tensor
        self._outbox: Outbox[frames_pb2.Frame] = Outbox(own=COORDINATOR, other=peer, stream=stream, wrap=lambda frame: frame)
        self._pump = FramePump(
            other=peer, duplex=context, outbox=self._outbox, silence_seconds=silence_seconds, on_event=self._take
        )
        self._arrived: asyncio.Queue[EncodedMessage | LinkError | None] = asyncio.Queue()

    async def run(self) -> None:
        """Returns when the peer has closed the stream and everything has been consumed."""
        pumping = asyncio.create_task(self._pump_to_end())
        try:
            while (item := await self._arrived.get()) is not None:
                if isinstance(item, LinkError):
                    raise item
                await self._consume(item)
            await pumping
        finally:
            pumping.cancel()
            await asyncio.gather(pumping, return_exceptions=True)

    async def _pump_to_end(self) -> None:
        try:
            await self._pump.run()
            if self._outbox.is_expecting:
                raise LinkError(self._peer, "it closed the stream in the middle of a message")
        finally:
            self._arrived.put_nowait(None)

    async def _consume(self, encoded: EncodedMessage) -> None:
        for name, tensor in decode_message(encoded).tensors:
            await self._on_tensor(self._peer, encoded.key, name, tensor)
        self._outbox.grant(encoded.key.generation, encoded.key.kind)

    def _take(self, event: Arrived | GaveUp | CorruptSender) -> None:
        self._arrived.put_nowait(event.message if isinstance(event, Arrived) else self._outbox.error_of(event))
