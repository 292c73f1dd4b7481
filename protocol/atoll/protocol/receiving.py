"""The receiving half of a message stream: headers checked before anything is allocated, chunks assembled, sums compared.

A message is refused *finally* when its header is not what the owner expects, and *for now* when it is damaged: then the sender
sends it again. Bytes go straight into one aligned buffer a tensor, so decoding raw tensors costs no further copy.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from atoll.protocol.errors import CorruptMessage, WireError
from atoll.protocol.ids import Generation
from atoll.protocol.messages import EncodedMessage, EncodedTensor, Kind, MessageHeader
from atoll.protocol.tensors import allocate
from atoll.protocol.v1 import frames_pb2

Accept = Callable[[MessageHeader], str | None]
"""The owner's judgement of a header: None to receive the message, a reason to refuse it for good."""


class Refusal(WireError):
    """A message that will never be accepted."""


@dataclass(slots=True, eq=False)
class Incoming:
    """A message of which some bytes are here."""

    header: MessageHeader
    buffers: list[memoryview] = field(default_factory=list)
    tensor: int = 0
    offset: int = 0
    received: int = 0
    checksum: int = 0

    def allocate(self) -> None:
        """Makes room for all of it; raises Refusal when the machine has none."""
        try:
            self.buffers = [allocate(tensor.num_bytes) for tensor in self.header.tensors]
        except (MemoryError, RuntimeError) as error:  # torch's allocator raises RuntimeError
            raise Refusal(f"no memory for {self.header.num_bytes} bytes") from error

    @property
    def complete(self) -> bool:
        return self.received == self.header.num_bytes

    def add(self, chunk: bytes) -> None:
        """Appends a chunk; raises CorruptMessage when it cannot be the next one."""
        due = min(self.header.num_bytes - self.received, self.header.chunk_bytes)
        if len(chunk) != due:
            raise CorruptMessage(f"a chunk of {len(chunk)} bytes where {due} were due")
        self.received += len(chunk)
        self.checksum = zlib.crc32(chunk, self.checksum)
        rest = memoryview(chunk)
        while rest:
            buffer = self.buffers[self.tensor]
            piece = rest[: len(buffer) - self.offset]
            buffer[self.offset : self.offset + len(piece)] = piece
            rest = rest[len(piece) :]
            self.offset += len(piece)
            if self.offset == len(buffer):
                self.tensor += 1
                self.offset = 0

    def message(self) -> EncodedMessage:
        """The whole message; raises CorruptMessage when the checksum disagrees."""
        if self.checksum != self.header.checksum:
            raise CorruptMessage(f"checksum {self.checksum:08x} where the header says {self.header.checksum:08x}")
        tensors = tuple(
            EncodedTensor(
                name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, codec=tensor.codec, data=buffer, order=tensor.order
            )
            for tensor, buffer in zip(self.header.tensors, self.buffers, strict=True)
        )
        return EncodedMessage(key=self.header.key, tensors=tensors, numbers=self.header.numbers, checksum=self.header.checksum)


class Assembler:
    """The messages of one stream that are partly here, and how many whole ones the owner has yet to consume."""

    def __init__(self, accept: Accept, credit: Mapping[Kind, int], max_message_bytes: int) -> None:
        self._accept = accept
        self._credit = dict(credit)
        self._max_message_bytes = max_message_bytes
        self._open: dict[int, Incoming] = {}
        self._rest: Incoming | None = None
        self._held: dict[tuple[Generation, Kind], int] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, number: int, proto: frames_pb2.MessageHeader) -> EncodedMessage | None:
        """Takes a header; the message itself where it has no bytes.

        The header is undamaged. Raises Refusal when the message is not wanted.
        """
        self.drop(number)
        try:
            header = MessageHeader.from_proto(proto)
        except WireError as error:
            raise Refusal(str(error)) from error
        self._check(header)
        incoming = self._continued(header)
        if incoming is None:
            incoming = Incoming(header)
            incoming.allocate()
        self._open[number] = incoming
        self._hold(header, 1)
        return self._finish(number) if incoming.complete else None

    def go_on_with(self, rest: Incoming) -> None:
        """The next message is one of which a part is here already: its chunks begin where that ends."""
        self._rest = rest

    def take_unfinished(self) -> list[Incoming]:
        """What is here of messages that broke off, for :meth:`go_on_with` on another stream."""
        unfinished = [incoming for incoming in self._open.values() if incoming.received]
        for number in list(self._open):
            self.drop(number)
        return unfinished

    def add(self, number: int, chunk: bytes) -> EncodedMessage | None:
        """Takes a chunk; the message when this was its last. Chunks of a message that is not wanted (any more) are skipped.

        Raises CorruptMessage when the message is damaged; it has then been dropped.
        """
        incoming = self._open.get(number)
        if incoming is None:
            return None
        try:
            incoming.add(chunk)
            return self._finish(number) if incoming.complete else None
        except CorruptMessage:
            self.drop(number)
            raise

    def drop(self, number: int) -> None:
        """Forgets what is here of a message."""
        incoming = self._open.pop(number, None)
        if incoming is not None:
            self._hold(incoming.header, -1)

    def release(self, generation: Generation, kind: Kind, messages: int) -> None:
        """The owner has consumed messages, so the sender may send as many more."""
        key = (generation, kind)
        if key in self._held:
            self._held[key] = max(0, self._held[key] - messages)

    def drop_before(self, generation: Generation) -> list[int]:
        """Forgets the unfinished messages of older generations; their numbers."""
        dropped = [number for number, incoming in self._open.items() if incoming.header.key.generation < generation]
        for number in dropped:
            del self._open[number]
        self._held = {key: count for key, count in self._held.items() if key[0] >= generation}
        return dropped

    def _continued(self, header: MessageHeader) -> Incoming | None:
        rest, self._rest = self._rest, None
        if rest is None:
            return None
        if (rest.header.tensors, rest.header.checksum) != (header.tensors, header.checksum):
            raise Refusal("it goes on with a message that is another one than the part that is here")
        rest.header = header
        return rest

    def _finish(self, number: int) -> EncodedMessage:
        message = self._open[number].message()
        del self._open[number]
        return message

    def _check(self, header: MessageHeader) -> None:
        largest = max(header.num_bytes, header.raw_bytes)
        if largest > self._max_message_bytes:
            raise Refusal(f"{largest} bytes, the limit is {self._max_message_bytes}")
        limit = self._credit.get(header.key.kind)
        if limit is not None and self._held.get((header.key.generation, header.key.kind), 0) >= limit:
            raise Refusal(f"more than the {limit} messages that were granted")
        reason = self._accept(header)
        if reason is not None:
            raise Refusal(reason)

    def _hold(self, header: MessageHeader, count: int) -> None:
        if header.key.kind in self._credit:
            key = (header.key.generation, header.key.kind)
            self._held[key] = self._held.get(key, 0) + count
