"""Codecs that send floating-point numbers in a shorter floating-point type."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.compression.context import CodecContext, Direction
from atoll.protocol.errors import WireError
from atoll.protocol.tensors import Buffer, num_elements, tensor_from_bytes, tensor_to_bytes


class CastCodec:
    """Rounds to ``wire`` and back.

    Declines what is not real floating point, what is no longer than ``wire`` already, and tensors with a finite element that
    the shorter type can only express as an infinity. Infinities and NaN arrive as they are.
    """

    has_state = False
    fixed_rate = True

    def __init__(self, name: str, wire: torch.dtype) -> None:
        self.name = name
        self._wire = wire

    def encode(self, tensor: Tensor, context: CodecContext) -> Buffer | None:
        if not self._shortens(tensor.dtype):
            return None
        short = tensor.detach().to(self._wire)
        return None if _overflows(short, tensor) else tensor_to_bytes(short)

    def decode(self, data: Buffer, dtype: torch.dtype, shape: tuple[int, ...], context: CodecContext) -> Tensor:
        if not self._shortens(dtype):
            raise WireError(f"{self.name} never encodes {dtype}")
        return tensor_from_bytes(data, self._wire, shape).to(dtype)

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return num_elements(shape) * (self._wire.itemsize if self._shortens(dtype) else dtype.itemsize)

    def mean_bytes(self, shape: tuple[int, ...], dtype: torch.dtype, direction: Direction = Direction.FORWARD) -> int:
        return self.num_bytes(shape, dtype)

    def reset(self) -> None:
        """There is no state."""

    def _shortens(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype.itemsize > self._wire.itemsize


def _overflows(short: Tensor, original: Tensor) -> bool:
    """Whether a finite number became an infinity. The extremes tell in most cases, at a tenth of the cost."""
    if short.numel() == 0 or all(bool(extreme.isfinite()) for extreme in torch.aminmax(short)):
        return False
    return bool((short.isinf() & original.isfinite()).any())
