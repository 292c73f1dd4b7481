"""Activations as differences from what crossed last for the same samples: AQ-SGD (Wang et al., 2022), for jobs of many epochs.

A sample's activation changes little from one epoch to the next, so its change takes fewer bits than it does, and the errors of
many epochs do not add up: each difference is taken from what the receiver really has. Gradients have no such memory: they
travel as 8-bit integers, and so do activations of an evaluation, of samples that nobody named, and of those that are met the
first time or are not held.

Both ends hold the same values, for the sender makes its own from the bytes that it sends. A message says which samples it is a
difference for, from which version of their values, and has a checksum of these; after it both ends hold the new ones, or none
where the sender has no room. A message that overtook one with an earlier version raises :class:`MissingState`: it can be
decoded after that one. Any other difference between the ends is an error: the step is void, and in the next generation both
hold nothing. So it is after every void step and every move: one epoch is then sent in 8 bits again.

On the wire: whether samples matter; if so, a word for each sample and the checksum; whole samples; differences.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.compression.context import CodecContext, Direction
from atoll.compression.quantization import BlockCodec
from atoll.compression.sample_memory import SampleMemory
from atoll.protocol.errors import MissingState, WireError
from atoll.protocol.tensors import Buffer, num_elements

MEMORY_BYTES = 2**31
"""What an end holds of one edge, at most: a million positions of width 1024."""

_HEADER = struct.Struct("<B")
_CHECKSUM = struct.Struct("<I")
_WORD = struct.Struct("<I")  # twice the version of the value that it is a difference from, 0 for none; plus one if kept
_PLAIN, _BY_SAMPLE = 0, 1
_SMALLEST = 64  # values of a sample, a block of integers


@dataclass(frozen=True, slots=True)
class _Parts:
    """Which rows of a tensor are whole and which are differences, by their place in it."""

    whole: list[int]
    changed: list[int]

    @classmethod
    def of(cls, versions: list[int]) -> _Parts:
        places = range(len(versions))
        return cls([place for place in places if not versions[place]], [place for place in places if versions[place]])


class DeltaCodec:
    """``bits`` a value of a difference. Declines what is not real floating point, tensors that it would not make shorter, and
    those with an infinity, a NaN or a magnitude above some 1e34. Samples are what a tensor's first dimension counts."""

    has_state = True
    fixed_rate = False

    def __init__(self, name: str, *, bits: int, memory_bytes: int = MEMORY_BYTES) -> None:
        self.name = name
        self._whole = BlockCodec("int8", bits=8, block=64, rotated=False)
        self._change = BlockCodec(f"int{bits}", bits=bits, block=64, rotated=True)
        self._memory = SampleMemory(memory_bytes)
        self._last: tuple[bytes, Tensor] | None = None

    def encode(self, tensor: Tensor, context: CodecContext) -> Buffer | None:
        shape = tuple(tensor.shape)
        if not self._shortens(shape, tensor.dtype):
            return None
        if not _counts_samples(shape, context):
            coded = self._whole.encode(tensor, context)
            return None if coded is None else _HEADER.pack(_PLAIN) + bytes(coded)
        rows = tensor.detach().reshape(shape[0], -1).float()
        versions = [self._memory.version(sample, rows.shape[1]) for sample in context.samples]
        parts = _Parts.of(versions)
        base = self._base(context, parts)
        whole: Buffer | None = b""
        change: Buffer | None = b""
        if parts.whole:
            whole = self._whole.encode(_some(rows, parts.whole), context)
        if parts.changed:
            change = self._change.encode(_some(rows, parts.changed) - base.to(rows.device), context)
        if whole is None or change is None:
            return None
        if len(whole) + len(change) + self._overhead(shape) > self.num_bytes(shape, tensor.dtype):
            return None
        decoded = self._combine(parts, base, rows.shape, context, memoryview(whole), memoryview(change))
        kept = [self._has_room(sample, row) for sample, row in zip(context.samples, decoded, strict=True)]
        words = b"".join(_WORD.pack(2 * version + held) for version, held in zip(versions, kept, strict=True))
        data = b"".join([_HEADER.pack(_BY_SAMPLE), words, _CHECKSUM.pack(_checksum(base)), whole, change])
        self._last = data, _as(decoded, tensor.dtype, shape)
        return data

    def decode(self, data: Buffer, dtype: torch.dtype, shape: tuple[int, ...], context: CodecContext) -> Tensor:
        view = memoryview(data).cast("B")
        if not self._shortens(shape, dtype) or not view.nbytes:
            raise WireError(f"{self.name} never encodes {dtype} of shape {list(shape)} in {view.nbytes} bytes")
        if view[0] == _PLAIN:
            return self._whole.decode(view[_HEADER.size :], dtype, shape, context)
        if self._last is not None and self._last[0] == view:
            return self._last[1].clone()
        if view[0] != _BY_SAMPLE or not _counts_samples(shape, context) or view.nbytes < self._overhead(shape):
            raise WireError(f"{self.name} cannot be decoded for {len(context.samples)} samples of a tensor of {list(shape)}")
        words = [word for (word,) in _WORD.iter_unpack(view[_HEADER.size : _HEADER.size + _WORD.size * shape[0]])]
        rest = view[_HEADER.size + _WORD.size * shape[0] :]
        parts = _Parts.of([word // 2 for word in words])
        size = num_elements(shape) // shape[0]
        self._check_versions(context, [word // 2 for word in words], size)
        base = self._base(context, parts)
        if _CHECKSUM.unpack_from(rest)[0] != _checksum(base):
            raise WireError(f"{self.name}: what is held here of the samples is not what {context.edge} is a difference from")
        rest = rest[_CHECKSUM.size :]
        edge = self._whole.num_bytes((size * len(parts.whole),), torch.float32) if parts.whole else 0
        decoded = self._combine(parts, base, torch.Size((shape[0], size)), context, rest[:edge], rest[edge:])
        self._keep(context, words, decoded)
        return _as(decoded, dtype, shape)

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Of samples that are met the first time."""
        raw = num_elements(shape) * dtype.itemsize
        if not dtype.is_floating_point or dtype.itemsize == 1:
            return raw
        return min(raw, self._overhead(shape) + self._whole.num_bytes(shape, dtype))

    def mean_bytes(self, shape: tuple[int, ...], dtype: torch.dtype, direction: Direction = Direction.FORWARD) -> int:
        """Of activations met before, as most are in a job of many epochs."""
        most = self.num_bytes(shape, dtype)
        if not self._shortens(shape, dtype):
            return most
        if direction is Direction.BACKWARD:
            return min(most, _HEADER.size + self._whole.num_bytes(shape, dtype))
        return min(most, self._overhead(shape) + self._change.num_bytes(shape, torch.float32))

    def reset(self) -> None:
        self._memory.clear()
        self._last = None

    def _overhead(self, shape: tuple[int, ...]) -> int:
        if not _has_samples(shape):
            return _HEADER.size
        return _HEADER.size + _WORD.size * shape[0] + _CHECKSUM.size

    def _shortens(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return self.num_bytes(shape, dtype) < num_elements(shape) * dtype.itemsize

    def _base(self, context: CodecContext, parts: _Parts) -> Tensor:
        """What is held of the samples that change."""
        return self._memory.read([context.samples[place] for place in parts.changed]) if parts.changed else torch.empty(0, 0)

    def _combine(
        self, parts: _Parts, base: Tensor, shape: torch.Size, context: CodecContext, whole: memoryview, change: memoryview
    ) -> Tensor:
        """All rows, as the receiver will have them."""
        rows = torch.empty(shape)
        if parts.whole:
            rows[parts.whole] = self._whole.decode(whole, torch.float32, (len(parts.whole), shape[1]), context)
        elif whole.nbytes:
            raise WireError(f"{self.name}: {whole.nbytes} bytes of no sample")
        if parts.changed:
            rows[parts.changed] = base.float() + self._change.decode(change, torch.float32, tuple(base.shape), context)
        elif change.nbytes:
            raise WireError(f"{self.name}: {change.nbytes} bytes follow the last sample")
        return rows

    def _has_room(self, sample: int, row: Tensor) -> bool:
        """Holds the sample's new value, if it can; where the disk is full it goes whole the next time."""
        try:
            return self._memory.keep(sample, row)
        except OSError:
            self._memory.drop(sample)
            return False

    def _check_versions(self, context: CodecContext, versions: list[int], size: int) -> None:
        for sample, version in zip(context.samples, versions, strict=True):
            held = self._memory.version(sample, size)
            if version > held:
                raise MissingState(f"{context.edge}: version {held} of sample {sample} is here, it differs from {version}")
            if 0 < version < held:
                raise WireError(f"{context.edge}: version {held} of sample {sample} is here, it differs from {version}")

    def _keep(self, context: CodecContext, words: list[int], decoded: Tensor) -> None:
        for sample, word, row in zip(context.samples, words, decoded, strict=True):
            if not word % 2:
                self._memory.drop(sample)
                continue
            try:
                kept = self._memory.keep(sample, row)
            except OSError as error:
                raise WireError(f"{self.name} has no room for samples: {error}; make room or choose another codec") from error
            if not kept:
                raise WireError(f"{self.name}: its sender holds more samples than are allowed")


def _has_samples(shape: tuple[int, ...]) -> bool:
    """Whether the first dimension may count samples that are worth the words about them."""
    return len(shape) > 1 and num_elements(shape) >= _SMALLEST * shape[0] > 0


def _counts_samples(shape: tuple[int, ...], context: CodecContext) -> bool:
    if context.direction is Direction.BACKWARD or context.evaluation or not _has_samples(shape):
        return False
    return len(context.samples) == shape[0] == len(set(context.samples))


def _some(rows: Tensor, places: list[int]) -> Tensor:
    return rows[torch.tensor(places).to(rows.device)]


def _checksum(base: Tensor) -> int:
    return zlib.crc32(base.view(torch.uint8).numpy().data) if base.numel() else 0


def _as(rows: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if dtype == torch.float16:
        largest = torch.finfo(dtype).max
        rows = rows.clamp(-largest, largest)
    return rows.to(dtype, copy=True).reshape(shape)
