"""What codecs cost on a link: how much of a message crosses, and how fast it is encoded and decoded.

A message's checksum is worked out at both ends whatever the codec, so even raw bytes take a processor's time.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from atoll.compression.registry import codec
from atoll.coordinator.planning.segments import CodecCost

TYPICAL_SHAPE = (4, 256, 1024)
"""Of what crosses a cut: samples, positions, width. Codecs that work in blocks have their usual overhead on it."""
CHECKSUM_BYTES_PER_SECOND = 6e9
"""One thread of an ordinary processor; as on the following lines, bytes of the message that it is about."""
ENCODED_BYTES_PER_SECOND: Mapping[str, float] = {
    "raw": float("inf"),
    "packed": 2e9,
    "fp32": 5e9,
    "bf16": 5e9,
    "fp16": 5e9,
    "int8": 2e9,
    "int4": 1e9,
    "int3": 8e8,
    "int2": 1e9,
    "transform": 1.3e8,
    "transform-1.5": 1.3e8,
    "transform-1": 1.3e8,
    "transform-0.5": 1.3e8,
}
"""Bytes of the tensor, without the checksum. ``benchmarks/codec_speed.py`` measures them; these leave some room, for a
thread that encodes seldom finds its caches warm."""
DECODED_BYTES_PER_SECOND: Mapping[str, float] = {
    "raw": float("inf"),
    "packed": 2e9,
    "fp32": 5e9,
    "bf16": 5e9,
    "fp16": 5e9,
    "int8": 3e9,
    "int4": 1e9,
    "int3": 8e8,
    "int2": 1e9,
    "transform": 2e8,
    "transform-1.5": 2e8,
    "transform-1": 2e8,
    "transform-0.5": 2e8,
}
OTHER_BYTES_PER_SECOND = 3e8
"""What a codec is taken to do of which nothing is known."""


def codec_cost(name: str) -> CodecCost:
    """The cost of the codec called ``name`` for tensors in single precision. Raises WireError for an unknown one."""
    plain = prod(TYPICAL_SHAPE) * torch.float32.itemsize
    ratio = codec(name).mean_bytes(TYPICAL_SHAPE, torch.float32) / plain
    checksum = ratio / CHECKSUM_BYTES_PER_SECOND
    return CodecCost(
        name=name,
        ratio=ratio,
        encode_bytes_per_second=1.0 / (checksum + 1.0 / ENCODED_BYTES_PER_SECOND.get(name, OTHER_BYTES_PER_SECOND)),
        decode_bytes_per_second=1.0 / (checksum + 1.0 / DECODED_BYTES_PER_SECOND.get(name, OTHER_BYTES_PER_SECOND)),
    )
