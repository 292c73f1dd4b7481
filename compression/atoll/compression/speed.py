"""How fast a codec is on this machine: measured, never believed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from atoll.compression.codec import Codec
from atoll.compression.context import CodecContext

_WIDTH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpeed:
    """Bytes of fp32 tensors a second, in one thread, of which ``ratio`` remain, by the codec's own estimate: what one takes
    that keeps to a rate or an error depends on the values, and no made-up ones are like those of a training."""

    encode_bytes_per_second: float
    decode_bytes_per_second: float
    ratio: float = 1.0

    def pays_below(self, ratio: float) -> float:
        """The bytes a second of the link below which encoding, sending ``ratio`` of the bytes and decoding, one after the
        other, take less time than sending all bytes; infinite where the codec costs nothing."""
        seconds = 1.0 / self.encode_bytes_per_second + 1.0 / self.decode_bytes_per_second
        return (1.0 - ratio) / seconds if seconds > 0 else math.inf


def measure_speed(codec: Codec, clock: Callable[[], float], *, num_elements: int, repetitions: int) -> CodecSpeed:
    """The fastest of some repetitions on random numbers, whose columns differ in strength, after one to warm up. ``clock`` is
    in seconds.

    A codec with state keeps what it learns while warming up.
    """
    shape = (num_elements // _WIDTH, _WIDTH) if num_elements % _WIDTH == 0 else (num_elements,)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(1, -1, shape[-1])
    context = CodecContext(edge="speed")
    codec.reset()
    encoding, decoding = math.inf, math.inf
    for repetition in range(repetitions + 1):
        started = clock()
        data = codec.encode(tensor, context)
        encoded = clock()
        if data is None:  # it does nothing to such tensors
            return CodecSpeed(encode_bytes_per_second=math.inf, decode_bytes_per_second=math.inf)
        resumed = clock()
        codec.decode(data, tensor.dtype, shape, context)
        ended = clock()
        if repetition:
            encoding, decoding = min(encoding, encoded - started), min(decoding, ended - resumed)
    num_bytes = tensor.numel() * tensor.dtype.itemsize
    return CodecSpeed(
        encode_bytes_per_second=num_bytes / encoding if encoding > 0 else math.inf,
        decode_bytes_per_second=num_bytes / decoding if decoding > 0 else math.inf,
        ratio=codec.mean_bytes(shape, tensor.dtype) / num_bytes,
    )
