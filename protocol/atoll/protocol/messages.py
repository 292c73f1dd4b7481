"""What travels between stages, as values: keys, tensors, and the header that announces them.

A :class:`Message` holds tensors; an :class:`EncodedMessage` holds their bytes under a codec. ``framing`` cuts the latter into
frames; ``compression`` turns one into the other. This module owns the conversion to and from protobuf and the structural
limits that every header must respect, whoever sent it.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from atoll.protocol.errors import WireError
from atoll.protocol.ids import Generation, MicrobatchIndex, StageIndex, StepNumber
from atoll.protocol.tensors import Buffer, dtype_from_name, dtype_name, num_elements
from atoll.protocol.v1 import frames_pb2

MAX_TENSORS = 4096  # a header must itself fit in one frame; no stage boundary comes near this
MAX_NUMBERS = 1024  # sizes and scales of one microbatch
CHUNK_BYTES = 512 * 1024  # an eighth of gRPC's default limit: small enough to let urgent messages in between soon
MIN_CHUNK_BYTES = 1024  # a header that cuts a message into absurdly many frames is refused
MAX_DIMENSIONS = 64  # torch's own limit
MAX_NAME_LENGTH = 1024  # parameter names are module paths


class Kind(IntEnum):
    """What a message carries; the numbers are those of ``frames.proto``."""

    BATCH = 1
    ACTIVATION = 2
    GRADIENT = 3
    TIED_GRADIENT = 4
    STATE = 5
    ASSIGNMENT = 6
    MEASUREMENT = 7
    PART = 8
    TOTAL = 9
    AGREEMENT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageKey:
    """Which message this is. Stages are those of the generation's plan."""

    generation: Generation
    step: StepNumber
    microbatch: MicrobatchIndex
    kind: Kind
    source: StageIndex
    target: StageIndex
    evaluation: bool = False

    def to_proto(self) -> frames_pb2.MessageKey:
        return frames_pb2.MessageKey(
            generation=self.generation,
            step=self.step,
            microbatch=self.microbatch,
            kind=self.kind.value,  # type: ignore[arg-type]  # the stubs know only their own enum
            source_stage=self.source,
            target_stage=self.target,
            evaluation=self.evaluation,
        )

    @classmethod
    def from_proto(cls, proto: frames_pb2.MessageKey) -> MessageKey:
        """Raises WireError for an unknown kind."""
        try:
            kind = Kind(proto.kind)
        except ValueError:
            raise WireError(f"unknown message kind {proto.kind}") from None
        return cls(
            generation=Generation(proto.generation),
            step=StepNumber(proto.step),
            microbatch=MicrobatchIndex(proto.microbatch),
            kind=kind,
            source=StageIndex(proto.source_stage),
            target=StageIndex(proto.target_stage),
            evaluation=proto.evaluation,
        )

    def __str__(self) -> str:
        return (
            f"{self.kind.name.lower().replace('_', ' ')} of microbatch {self.microbatch}, step {self.step}, "
            f"stage {self.source} to {self.target}, generation {self.generation}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """One tensor as the header announces it. ``order`` is its memory order, ``()`` for row-major."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    codec: str
    num_bytes: int
    order: tuple[int, ...] = ()

    def to_proto(self) -> frames_pb2.TensorHeader:
        return frames_pb2.TensorHeader(
            name=self.name,
            dtype=dtype_name(self.dtype),
            shape=self.shape,
            codec=self.codec,
            num_bytes=self.num_bytes,
            order=self.order,
        )

    @property
    def raw_bytes(self) -> int:
        """What the decoded tensor takes."""
        return num_elements(self.shape) * self.dtype.itemsize

    @classmethod
    def from_proto(cls, proto: frames_pb2.TensorHeader) -> TensorHeader:
        """Raises WireError where the header contradicts itself."""
        header = cls(
            name=proto.name,
            dtype=dtype_from_name(proto.dtype),
            shape=tuple(proto.shape),
            codec=proto.codec,
            num_bytes=proto.num_bytes,
            order=tuple(proto.order),
        )
        header._check()
        return header

    def _check(self) -> None:
        if len(self.shape) > MAX_DIMENSIONS or len(self.name) > MAX_NAME_LENGTH:
            raise WireError(f"tensor {self.name[:64]!r} has {len(self.shape)} dimensions or too long a name")
        if self.order and sorted(self.order) != list(range(len(self.shape))):
            raise WireError(f"tensor {self.name!r}: memory order {list(self.order)} is none of {len(self.shape)} dimensions")
        if self.num_bytes > self.raw_bytes or (self.codec == "raw" and self.num_bytes != self.raw_bytes):
            raise WireError(f"tensor {self.name!r}: {self.num_bytes} bytes announced for {self.dtype} of {list(self.shape)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedTensor:
    """A tensor's bytes under ``codec``. ``shape`` is the tensor's, ``data`` is in the memory order ``order``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    codec: str
    data: Buffer
    order: tuple[int, ...] = ()

    @property
    def header(self) -> TensorHeader:
        return TensorHeader(
            name=self.name,
            dtype=self.dtype,
            shape=self.shape,
            codec=self.codec,
            num_bytes=memoryview(self.data).nbytes,
            order=self.order,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedMessage:
    """A message ready to be cut into frames. ``checksum`` is None until :meth:`sealed` has computed it."""

    key: MessageKey
    tensors: tuple[EncodedTensor, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    checksum: int | None = None

    @property
    def num_bytes(self) -> int:
        return sum(memoryview(tensor.data).nbytes for tensor in self.tensors)

    def sealed(self) -> EncodedMessage:
        """The same message with its checksum: reads every byte, so call it off the event loop for a large message."""
        if self.checksum is not None:
            return self
        checksum = 0
        for tensor in self.tensors:
            checksum = zlib.crc32(tensor.data, checksum)
        return dataclasses.replace(self, checksum=checksum)

    def header(self, attempt: int = 0, chunk_bytes: int = CHUNK_BYTES) -> MessageHeader:
        """What announces this message; ``attempt`` counts from 0."""
        tensors = tuple(tensor.header for tensor in self.tensors)
        checksum = self.sealed().checksum
        assert checksum is not None
        return MessageHeader(
            key=self.key,
            tensors=tensors,
            numbers=self.numbers,
            num_bytes=self.num_bytes,
            checksum=checksum,
            attempt=attempt,
            chunk_bytes=chunk_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Named tensors and numbers under a key."""

    key: MessageKey
    tensors: tuple[tuple[str, Tensor], ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)

    def tensor(self, name: str) -> Tensor:
        """The tensor called ``name``; raises KeyError."""
        for found, tensor in self.tensors:
            if found == name:
                return tensor
        raise KeyError(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageHeader:
    """What a receiver knows of a message before it allocates anything."""

    key: MessageKey
    tensors: tuple[TensorHeader, ...]
    numbers: Mapping[str, float]
    num_bytes: int
    checksum: int
    attempt: int = 0
    chunk_bytes: int = CHUNK_BYTES

    @property
    def raw_bytes(self) -> int:
        """What all tensors take once they are decoded. Codecs may make little of much: a receiver bounds this, too."""
        return sum(tensor.raw_bytes for tensor in self.tensors)

    def to_proto(self, number: int) -> frames_pb2.MessageHeader:
        """The header of message ``number``, with its own checksum."""
        proto = frames_pb2.MessageHeader(
            key=self.key.to_proto(),
            tensors=[tensor.to_proto() for tensor in self.tensors],
            numbers=self.numbers,
            num_bytes=self.num_bytes,
            checksum=self.checksum,
            attempt=self.attempt,
            chunk_bytes=self.chunk_bytes,
        )
        proto.header_checksum = _header_checksum(proto, number)
        return proto

    @classmethod
    def from_proto(cls, proto: frames_pb2.MessageHeader) -> MessageHeader:
        """Raises WireError where the header breaks a structural limit or contradicts itself."""
        if len(proto.tensors) > MAX_TENSORS or len(proto.numbers) > MAX_NUMBERS:
            raise WireError(f"a message of {len(proto.tensors)} tensors and {len(proto.numbers)} numbers is too large")
        if not MIN_CHUNK_BYTES <= proto.chunk_bytes <= CHUNK_BYTES:
            raise WireError(f"chunks of {proto.chunk_bytes} bytes are not between {MIN_CHUNK_BYTES} and {CHUNK_BYTES}")
        tensors = tuple(TensorHeader.from_proto(tensor) for tensor in proto.tensors)
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise WireError("two tensors of one message have the same name")
        if sum(tensor.num_bytes for tensor in tensors) != proto.num_bytes:
            raise WireError(f"the tensors do not add up to the {proto.num_bytes} bytes announced")
        return cls(
            key=MessageKey.from_proto(proto.key),
            tensors=tensors,
            numbers=dict(proto.numbers),
            num_bytes=proto.num_bytes,
            checksum=proto.checksum,
            attempt=proto.attempt,
            chunk_bytes=proto.chunk_bytes,
        )


def header_is_whole(proto: frames_pb2.MessageHeader, number: int) -> bool:
    """Whether the header is the one that the sender made for message ``number``."""
    return proto.header_checksum == _header_checksum(proto, number)


def _header_checksum(proto: frames_pb2.MessageHeader, number: int) -> int:
    bare = frames_pb2.MessageHeader()
    bare.CopyFrom(proto)
    bare.ClearField("header_checksum")
    return zlib.crc32(bare.SerializeToString(deterministic=True), zlib.crc32(number.to_bytes(8, "little")))
