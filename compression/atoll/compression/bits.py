"""Codes of 2, 3, 4 or 8 bits, and booleans, to bytes and back, with operations on whole tensors.

A row of codes is cut into as many parts as a word holds codes, and word i takes the i-th code of each part. Words of 2, 4 and 8
bits' codes are bytes; eight codes of three bits are a word of three bytes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_CODES_IN_A_WORD = {2: 4, 3: 8, 4: 2, 8: 1}


def pack(codes: Tensor, bits: int, packed: Tensor) -> None:
    """Writes 32-bit ``codes``, a row a block, into ``packed``, bytes; overwrites part of ``codes``."""
    parts = codes.chunk(_CODES_IN_A_WORD[bits], dim=1)
    words = parts[0]
    for place, part in enumerate(parts[1:], start=1):
        words.add_(part, alpha=1 << (bits * place))
    if bits == 3:
        triples = words.contiguous().view(torch.uint8).view(len(codes), -1, 4)[..., :3]
        packed.view(triples.shape).copy_(triples)
    else:
        packed.copy_(words)


def unpack(packed: Tensor, bits: int, codes: Tensor) -> None:
    """The inverse; ``codes`` are floating-point numbers."""
    if bits == 8:
        codes.copy_(packed)
        return
    words = _triples(packed) if bits == 3 else packed
    parts = codes.chunk(_CODES_IN_A_WORD[bits], dim=1)
    mask = (1 << bits) - 1
    for place, part in enumerate(parts):
        shifted = words.bitwise_right_shift(bits * place) if place else words
        part.copy_(shifted if place == len(parts) - 1 else shifted.bitwise_and(mask))


def pack_booleans(bits: Tensor) -> Tensor:
    """Booleans as bits of bytes, the first one the lowest, on their own device."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))
    whole = torch.zeros(-(-len(bits) // 8), 8, dtype=torch.uint8, device=bits.device)
    whole.view(-1)[: len(bits)] = bits
    weights = torch.arange(8, device=bits.device)
    return whole.bitwise_left_shift(weights.to(torch.uint8)).sum(1, dtype=torch.uint8)


def unpack_booleans(packed: Tensor, count: int) -> Tensor:
    """The first ``count`` bits of bytes on the CPU."""
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count, bitorder="little")).bool()


def _triples(packed: Tensor) -> Tensor:
    words = torch.zeros(len(packed), packed.shape[1] // 3, 4, dtype=torch.uint8, device=packed.device)
    words[..., :3] = packed.view(len(packed), -1, 3)
    return words.view(torch.int32).squeeze(-1)
