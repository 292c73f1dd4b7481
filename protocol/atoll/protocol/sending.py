"""The sending half of a message stream: what to hand out next, and what to keep until it is acknowledged.

Messages of one generation and kind go out in the order of submission, one at a time; a more urgent kind interleaves its
chunks. Each message costs one unit of its generation's and kind's credit, once, however often it must be sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.protocol.ids import Generation
from atoll.protocol.messages import CHUNK_BYTES, EncodedMessage, Kind
from atoll.protocol.v1 import frames_pb2

MAX_ATTEMPTS = 3  # a message that fails its checksum this often does so for a reason that sending again will not cure

_URGENCY: Mapping[Kind, int] = {
    Kind.GRADIENT: 0,
    Kind.TIED_GRADIENT: 0,
    Kind.PART: 0,
    Kind.TOTAL: 0,
    Kind.AGREEMENT: 0,
    Kind.ACTIVATION: 1,
    Kind.BATCH: 2,
    Kind.ASSIGNMENT: 2,
    Kind.MEASUREMENT: 2,
    Kind.STATE: 3,
}

_QueueKey = tuple[int, Generation, Kind]


def urgency(kind: Kind) -> int:
    """The smaller, the sooner: backward before forward before what keeps the run going, state in the background."""
    return _URGENCY[kind]


@dataclass(slots=True, eq=False)
class Outgoing:
    """A message on its way out and how far it has got. ``chunks`` are cut lazily, so nothing is copied before its turn."""

    number: int
    message: EncodedMessage
    chunk_bytes: int = CHUNK_BYTES
    attempt: int = 0
    announced: bool = False
    tensor: int = 0
    offset: int = 0
    charged: bool = False

    def restart(self) -> None:
        """Begin the next attempt."""
        self.attempt += 1
        self.announced = False
        self.tensor = self.offset = 0

    def next_frame(self) -> frames_pb2.Frame:
        """The header first, then the chunks."""
        if not self.announced:
            self.announced = True
            self._skip_empty()
            header = self.message.header(self.attempt, self.chunk_bytes).to_proto(self.number)
            return frames_pb2.Frame(message=self.number, header=header)
        return frames_pb2.Frame(message=self.number, chunk=self._next_chunk())

    def skip(self, num_bytes: int) -> None:
        """Leave out so many of the bytes that come next."""
        while num_bytes and not self.finished:
            step = min(num_bytes, memoryview(self.message.tensors[self.tensor].data).nbytes - self.offset)
            self.offset += step
            num_bytes -= step
            self._skip_empty()

    @property
    def finished(self) -> bool:
        """Whether this attempt has been handed out completely."""
        return self.announced and self.tensor == len(self.message.tensors)

    def _next_chunk(self) -> bytes:
        pieces: list[memoryview] = []
        room = self.chunk_bytes
        while room and not self.finished:
            data = memoryview(self.message.tensors[self.tensor].data).cast("B")
            piece = data[self.offset : self.offset + room]
            pieces.append(piece)
            room -= len(piece)
            self.offset += len(piece)
            self._skip_empty()
        return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)

    def _skip_empty(self) -> None:
        tensors = self.message.tensors
        while self.tensor < len(tensors) and self.offset == memoryview(tensors[self.tensor].data).nbytes:
            self.tensor += 1
            self.offset = 0


class SendQueue:
    """Every message of one stream that is not yet acknowledged. ``credit`` is what each generation starts with, by kind."""

    def __init__(self, credit: Mapping[Kind, int], chunk_bytes: int = CHUNK_BYTES) -> None:
        self.chunk_bytes = chunk_bytes
        self._initial_credit = dict(credit)
        self._credit: dict[tuple[Generation, Kind], int] = {}
        self._queues: dict[_QueueKey, deque[Outgoing]] = {}
        self._order: list[_QueueKey] = []
        self._known: dict[int, Outgoing] = {}
        self._next_number = 1

    def __len__(self) -> int:
        return len(self._known)

    def submit(self, message: EncodedMessage) -> int:
        """Queues a message; the number names it in what comes back."""
        outgoing = Outgoing(self._next_number, message.sealed(), self.chunk_bytes)
        self._next_number += 1
        self._known[outgoing.number] = outgoing
        self._queue(message).append(outgoing)
        return outgoing.number

    def most_urgent(self) -> int | None:
        """How urgent the next frame is; None when there is nothing that credit allows to send."""
        for key in self._order:
            queue = self._queues[key]
            if queue and self._may_send(queue[0]):
                return key[0]
        return None

    def next(self) -> tuple[frames_pb2.Frame, EncodedMessage] | None:
        """The next frame and the message it belongs to; None when there is nothing that credit allows to send."""
        for key in self._order:
            queue = self._queues[key]
            if queue and self._charge(queue[0]):
                outgoing = queue[0]
                frame = outgoing.next_frame()
                if outgoing.finished:
                    queue.popleft()
                return frame, outgoing.message
        return None

    def add_credit(self, generation: Generation, kind: Kind, messages: int) -> None:
        """The receiver has consumed that many messages."""
        if kind in self._initial_credit:
            self._credit[generation, kind] = self._available(generation, kind) + messages

    def acknowledge(self, number: int) -> EncodedMessage | None:
        """Forgets a message that has arrived; None for one that is not known (any more)."""
        outgoing = self._known.pop(number, None)
        if outgoing is None:
            return None
        queue = self._queue(outgoing.message)
        if outgoing in queue:
            queue.remove(outgoing)
        return outgoing.message

    def send_again(self, number: int) -> bool:
        """Queues another attempt ahead of its kin; False when the message is unknown or its attempts are used up."""
        outgoing = self._known.get(number)
        if outgoing is None or outgoing.attempt + 1 >= MAX_ATTEMPTS:
            return False
        queue = self._queue(outgoing.message)
        if outgoing not in queue:
            queue.appendleft(outgoing)
        outgoing.restart()
        return True

    def knows(self, number: int) -> bool:
        """Whether the message is still to be acknowledged."""
        return number in self._known

    def drop_before(self, generation: Generation) -> list[int]:
        """Forgets the messages of older generations; their numbers."""
        dropped = [number for number, outgoing in self._known.items() if outgoing.message.key.generation < generation]
        for number in dropped:
            del self._known[number]
        for key in [key for key in self._order if key[1] < generation]:
            self._order.remove(key)
            del self._queues[key]
        self._credit = {key: left for key, left in self._credit.items() if key[0] >= generation}
        return dropped

    def _queue(self, message: EncodedMessage) -> deque[Outgoing]:
        kind, generation = message.key.kind, message.key.generation
        key = (urgency(kind), generation, kind)
        if key not in self._queues:
            self._queues[key] = deque()
            self._order = sorted(self._queues)
        return self._queues[key]

    def _available(self, generation: Generation, kind: Kind) -> int:
        return self._credit.get((generation, kind), self._initial_credit[kind])

    def _may_send(self, outgoing: Outgoing) -> bool:
        kind, generation = outgoing.message.key.kind, outgoing.message.key.generation
        return outgoing.charged or kind not in self._initial_credit or self._available(generation, kind) > 0

    def _charge(self, outgoing: Outgoing) -> bool:
        if not self._may_send(outgoing):
            return False
        kind, generation = outgoing.message.key.kind, outgoing.message.key.generation
        if kind in self._initial_credit and not outgoing.charged:
            self._credit[generation, kind] = self._available(generation, kind) - 1
            outgoing.charged = True
        return True
