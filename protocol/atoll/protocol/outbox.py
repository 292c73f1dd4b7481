"""What one end of a gRPC stream has to say next: the owner's own messages, then frames by urgency.

An :class:`Outbox` joins a :class:`MessageStream` to the stream that carries it, be it a link (whose items are frames) or a
session (whose items wrap frames and control messages alike). One task awaits :meth:`Outbox.next` and writes; whoever reads
feeds frames to :meth:`Outbox.handle`. The outbox owns the waiting and the outcome of each submission, not the transport.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from atoll.protocol.errors import LinkError
from atoll.protocol.framing import Acknowledged, Arrived, CorruptSender, GaveUp, MessageStream
from atoll.protocol.ids import Generation, PeerId
from atoll.protocol.messages import EncodedMessage, Kind
from atoll.protocol.pacing import Allowance, Pacer
from atoll.protocol.v1 import frames_pb2

Item = TypeVar("Item", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch(Generic[Item]):
    """One item to write. ``message`` is the one that the item is a frame of, if any."""

    item: Item
    message: EncodedMessage | None = None


class Outbox(Generic[Item]):
    """For one event loop. ``own`` and ``other`` name the two ends in errors; ``wrap`` makes an item of a frame. Chunks wait for
    their turn at all of ``pacers``."""

    def __init__(
        self,
        *,
        own: PeerId,
        other: PeerId,
        stream: MessageStream,
        wrap: Callable[[frames_pb2.Frame], Item],
        pacers: Sequence[Pacer] = (),
    ) -> None:
        self._own = own
        self._other = other
        self._stream = stream
        self._wrap = wrap
        self._control: deque[Item] = deque()
        self._outcomes: dict[int, asyncio.Future[None]] = {}
        self._wake = asyncio.Event()
        self._allowance = Allowance(pacers, self._wake.set)
        self._error: LinkError | None = None
        self._closed = False

    @property
    def num_unacknowledged(self) -> int:
        """Messages that the other end has not acknowledged."""
        return self._stream.num_unacknowledged

    @property
    def num_unfinished(self) -> int:
        """Messages from the other end of which only a part is here."""
        return self._stream.num_unfinished

    @property
    def is_expecting(self) -> bool:
        """Whether the other end owes us something: an acknowledgement, or the rest of a message."""
        return self.num_unacknowledged > 0 or self.num_unfinished > 0

    def put(self, item: Item) -> None:
        """Queues one of the owner's own items, ahead of every frame and after earlier items; ignored once closed."""
        if not self._closed:
            self._control.append(item)
            self._wake.set()

    def submit(self, message: EncodedMessage) -> asyncio.Future[None]:
        """Queues a message. The future is done when the other end has it, or fails with the LinkError that prevented it;
        it is cancelled when the message's generation is over. Nobody needs to await it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        if self._error is not None:
            future.set_exception(self._error)
        elif message.key.generation < self._stream.generation:
            future.cancel()
        else:
            self._outcomes[self._stream.submit(message)] = future
            self._wake.set()
        return future

    def handle(self, frame: frames_pb2.Frame) -> list[Arrived | GaveUp | CorruptSender]:
        """Takes a frame from the other end and settles submissions; what remains is for the owner to look at."""
        remaining: list[Arrived | GaveUp | CorruptSender] = []
        for event in self._stream.handle(frame):
            if isinstance(event, Acknowledged):
                self._settle(event.number, None)
                continue
            if isinstance(event, GaveUp):
                self._settle(event.number, self.error_of(event))
            remaining.append(event)
        self._wake.set()
        return remaining

    def error_of(self, event: GaveUp | CorruptSender) -> LinkError:
        """The event as an error that names the end that sent the message, if it was damaged, else the one that refused it."""
        if isinstance(event, CorruptSender):
            return LinkError(self._other, event.reason, corrupt=True)
        return LinkError(self._own if event.corrupt else self._other, event.reason, corrupt=event.corrupt)

    def grant(self, generation: Generation, kind: Kind, messages: int = 1) -> None:
        """The owner has consumed messages; the other end may send as many more."""
        self._stream.grant(generation, kind, messages)
        self._wake.set()

    def advance(self, generation: Generation) -> None:
        """Drops what belongs to older generations."""
        for number in self._stream.advance(generation):
            future = self._outcomes.pop(number, None)
            if future is not None:
                future.cancel()
        self._wake.set()

    def fail(self, error: LinkError) -> None:
        """Ends all submissions, now and later, with ``error``."""
        self._error = error
        self._allowance.withdraw()
        for number in list(self._outcomes):
            self._settle(number, error)

    def close(self) -> None:
        """Nothing more will be submitted: once all has been written, :meth:`next` says so."""
        self._closed = True
        self._wake.set()

    async def next(self) -> Dispatch[Item] | None:
        """Waits for something to write; None when the outbox is closed and nothing is left."""
        while True:
            self._wake.clear()
            if self._control:
                item = self._control.popleft()
                self._allowance.spend(item.ByteSize())
                return Dispatch(item=item)
            found = self._next_frame()
            if found is not None:
                return found
            if self._closed and self._stream.num_unacknowledged == 0:
                return None
            try:
                await self._wake.wait()
            except asyncio.CancelledError:
                self._allowance.withdraw()
                raise

    def _next_frame(self) -> Dispatch[Item] | None:
        """An answer, or a frame whose turn has come."""
        answering = self._stream.has_answers
        if not answering:
            urgency = self._stream.most_urgent()
            if urgency is None or not self._allowance.ready(self._stream.chunk_bytes, urgency):
                return None
        found = self._stream.next_frame_of()
        assert found is not None, "there is an answer, or a message that credit allows to send"
        frame, message = found
        if answering:
            self._allowance.spend(frame.ByteSize())
        else:
            self._allowance.use(frame.ByteSize())
        return Dispatch(item=self._wrap(frame), message=message)

    def _settle(self, number: int, error: LinkError | None) -> None:
        future = self._outcomes.pop(number, None)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def _retrieve(future: asyncio.Future[None]) -> None:
    """Marks a failure as seen: the owner hears of it through events as well."""
    if not future.cancelled():
        future.exception()
