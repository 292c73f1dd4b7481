"""State by name between this peer and the coordinator: one message a tensor, bounded in memory on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

import grpc.aio
from torch import Tensor

from atoll.compression.registry import decode_message, encode_message
from atoll.protocol.channel import PROTOCOL_VERSION
from atoll.protocol.errors import LinkError
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.framing import MAX_ATTEMPTS, Arrived, CorruptSender, GaveUp, MessageStream
from atoll.protocol.ids import Generation, PeerId
from atoll.protocol.messages import EncodedMessage, Kind, Message, MessageHeader, MessageKey
from atoll.protocol.outbox import Outbox
from atoll.protocol.pacing import Pacer, paced_chunk_bytes
from atoll.protocol.pump import STREAM_ERRORS, FramePump, describe
from atoll.protocol.transfer import COORDINATOR, STATE_CREDIT, TRANSFER_SILENCE_SECONDS
from atoll.protocol.v1 import frames_pb2, session_pb2, session_pb2_grpc

Accept = Callable[[MessageHeader], str | None]
FetchCall = grpc.aio.UnaryStreamCall[session_pb2.FetchStateRequest, frames_pb2.Frame]


async def store_state(
    stub: session_pb2_grpc.CoordinatorStub,
    own: PeerId,
    key: MessageKey,
    items: Iterable[tuple[str, Tensor]],
    *,
    silence_seconds: float = TRANSFER_SILENCE_SECONDS,
    pacers: Sequence[Pacer] = (),
    chaos: FaultPoints | None = None,
) -> int:
    """Sends tensors by name and returns their bytes when the coordinator has taken them all.

    ``items`` is consumed on another thread, a tensor at a time as the coordinator takes them; no tensor may change before this
    has returned. ``pacers`` bound how fast they go. Raises LinkError: the coordinator is gone, silent, or refuses (the disk is
    full, ...).
    """
    call = stub.StoreState()
    hello = frames_pb2.Hello(peer=own, generation=key.generation, protocol_version=PROTOCOL_VERSION)
    stream = MessageStream(
        _refuse_everything, credit=STATE_CREDIT, generation=key.generation, chunk_bytes=paced_chunk_bytes(pacers)
    )
    outbox = Outbox(own=own, other=COORDINATOR, stream=stream, wrap=lambda frame: frame, pacers=pacers)
    outbox.put(frames_pb2.Frame(hello=hello))
    pump = FramePump(
        other=COORDINATOR,
        duplex=call,
        outbox=outbox,
        silence_seconds=silence_seconds,
        on_event=_ignore_settled,
        chaos=chaos,
    )
    pumping = asyncio.create_task(pump.run())
    sending = asyncio.create_task(_send_all(outbox, key, iter(items)))
    try:
        await asyncio.wait((pumping, sending), return_when=asyncio.FIRST_COMPLETED)
        if pumping.done() and not sending.done():
            await pumping
            raise LinkError(COORDINATOR, "it closed the stream before all state was stored")
        num_bytes = await sending
        outbox.close()
        await pumping
        return num_bytes
    finally:
        pumping.cancel()
        sending.cancel()
        await asyncio.gather(pumping, sending, return_exceptions=True)
        call.cancel()


async def fetch_state(
    stub: session_pb2_grpc.CoordinatorStub,
    own: PeerId,
    generation: Generation,
    names: Sequence[str],
    accept: Accept,
    *,
    max_download: float | None = None,
    silence_seconds: float = TRANSFER_SILENCE_SECONDS,
    chaos: FaultPoints | None = None,
) -> dict[str, Tensor]:
    """The tensors called ``names``, at ``max_download`` bytes a second at most. ``accept`` judges each header (one tensor)
    before it is allocated.

    Damaged tensors are fetched again. Raises LinkError when some are missing or damaged after three attempts, and at once
    when the coordinator is gone or silent, or sends what is not accepted.
    """
    found: dict[str, Tensor] = {}
    problem = ""
    chaos = chaos or FaultPoints()
    for _ in range(MAX_ATTEMPTS):
        missing = [name for name in names if name not in found]
        if not missing:
            break
        limit = max_download or 0.0
        request = session_pb2.FetchStateRequest(peer=own, generation=generation, names=missing, max_bytes_per_second=limit)
        await chaos.passable(COORDINATOR)
        call = stub.FetchState(request)
        problem = await _fetch(call, accept, generation, set(missing), found, silence_seconds, chaos) or problem
    missing = [name for name in names if name not in found]
    if missing:
        raise LinkError(COORDINATOR, f"it did not send {', '.join(missing[:3])}: {problem or 'unknown'}", corrupt=bool(problem))
    return found


async def _send_all(outbox: Outbox[frames_pb2.Frame], key: MessageKey, items: Iterator[tuple[str, Tensor]]) -> int:
    num_bytes = 0
    flying: list[asyncio.Future[None]] = []
    while (encoded := await asyncio.to_thread(_next_encoded, key, items)) is not None:
        num_bytes += encoded.num_bytes
        flying.append(outbox.submit(encoded))
        if len(flying) >= STATE_CREDIT[Kind.STATE]:
            await flying.pop(0)
    for future in flying:
        await future
    return num_bytes


def _next_encoded(key: MessageKey, items: Iterator[tuple[str, Tensor]]) -> EncodedMessage | None:
    item = next(items, None)
    return None if item is None else encode_message(Message(key=key, tensors=(item,)))


async def _fetch(
    call: FetchCall,
    accept: Accept,
    generation: Generation,
    wanted: set[str],
    found: dict[str, Tensor],
    silence_seconds: float,
    chaos: FaultPoints,
) -> str:
    """Reads one answer to its end; what was wrong with it, or nothing."""
    refused: list[str] = []

    def judge(header: MessageHeader) -> str | None:
        names = {tensor.name for tensor in header.tensors}
        reason = accept(header) if names <= wanted else f"{', '.join(sorted(names - wanted))} was not asked for"
        if reason is not None:
            refused.append(reason)
        return reason

    stream = MessageStream(judge, generation=generation)
    problem = ""
    try:
        while isinstance(frame := await asyncio.wait_for(call.read(), silence_seconds), frames_pb2.Frame):
            await chaos.passable(COORDINATOR)
            for event in stream.handle(frame):
                if isinstance(event, Arrived):
                    found.update(decode_message(event.message).tensors)
            if refused:
                raise LinkError(COORDINATOR, f"it sent state that is refused: {refused[0]}")
            while (answer := stream.next_frame()) is not None:  # nothing goes back on this stream
                problem = answer.refused.reason or problem
    except TimeoutError:
        raise LinkError(COORDINATOR, f"nothing was heard from it for {silence_seconds:g} s") from None
    except STREAM_ERRORS as error:
        raise LinkError(COORDINATOR, f"the stream broke: {describe(error)}") from error
    finally:
        call.cancel()
    return problem


def _refuse_everything(header: MessageHeader) -> str | None:
    return f"nothing is expected here, {header.key} least of all"


def _ignore_settled(event: Arrived | GaveUp | CorruptSender) -> None:
    """The submission's future tells."""
