"""Integers and booleans in as few bytes as their values need, without loss."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from atoll.compression.bits import pack_booleans, unpack_booleans
from atoll.compression.context import CodecContext, Direction
from atoll.protocol.errors import WireError
from atoll.protocol.tensors import Buffer, allocate, num_elements, tensor_from_bytes

_HEADER = struct.Struct("<Bq")  # bits of an element, the smallest value
_WORD_BYTES = 8


class PackedCodec:
    """Elements as differences from the tensor's smallest: one bit each where two neighbouring values are all there is, else
    as few whole bytes as the largest difference needs. The width and the smallest value go first.

    Declines what is not of integers or booleans, and what would not become shorter.
    """

    name = "packed"
    has_state = False
    fixed_rate = False

    def encode(self, tensor: Tensor, context: CodecContext) -> Buffer | None:
        if not _is_integral(tensor.dtype) or tensor.numel() == 0:
            return None
        words = _to_words(tensor.detach().reshape(-1))
        smallest, largest = (int(value) for value in torch.aminmax(words))
        bits = _bits_for(largest - smallest)
        num_bytes = _num_bytes(words.numel(), bits)
        if num_bytes >= tensor.numel() * tensor.dtype.itemsize:
            return None
        data = allocate(num_bytes)
        _HEADER.pack_into(data, 0, bits, smallest)
        torch.frombuffer(data, dtype=torch.uint8)[_HEADER.size :].copy_(_packed(words.sub_(smallest), bits))
        return data

    def decode(self, data: Buffer, dtype: torch.dtype, shape: tuple[int, ...], context: CodecContext) -> Tensor:
        count, view = num_elements(shape), memoryview(data).cast("B")
        if not _is_integral(dtype) or view.nbytes < _HEADER.size:
            raise WireError(f"packed {dtype} of shape {list(shape)} cannot be {view.nbytes} bytes")
        bits, smallest = _HEADER.unpack_from(view)
        if bits not in _WIDTHS or view.nbytes != _num_bytes(count, bits):
            raise WireError(f"packed {dtype} of shape {list(shape)} in {bits} bits an element cannot be {view.nbytes} bytes")
        body = tensor_from_bytes(view[_HEADER.size :], torch.uint8, (view.nbytes - _HEADER.size,))
        return _from_words(_unpack(body, bits, count).add_(smallest), dtype).reshape(shape)

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """That of raw: the values decide how much shorter it gets."""
        return num_elements(shape) * dtype.itemsize

    def mean_bytes(self, shape: tuple[int, ...], dtype: torch.dtype, direction: Direction = Direction.FORWARD) -> int:
        return self.num_bytes(shape, dtype)

    def reset(self) -> None:
        """There is no state."""


_WIDTHS = (1, *range(8, 8 * _WORD_BYTES, 8))


def _is_integral(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _bits_for(span: int) -> int:
    return 1 if span <= 1 else -(-span.bit_length() // 8) * 8


def _num_bytes(count: int, bits: int) -> int:
    return _HEADER.size + -(-count * bits // 8)


def _to_words(flat: Tensor) -> Tensor:
    """A copy as 64-bit integers; the largest unsigned ones become negative, which sums and differences undo."""
    return flat.view(torch.int64).clone() if flat.dtype is torch.uint64 else flat.to(torch.int64, copy=True)


def _from_words(words: Tensor, dtype: torch.dtype) -> Tensor:
    return words.view(dtype) if dtype is torch.uint64 else words.to(dtype)


def _packed(words: Tensor, bits: int) -> Tensor:
    if bits == 1:
        return pack_booleans(words.bool())
    return words.view(torch.uint8).view(-1, _WORD_BYTES)[:, : bits // 8].reshape(-1)


def _unpack(body: Tensor, bits: int, count: int) -> Tensor:
    if bits > 1:
        words = torch.zeros(count, _WORD_BYTES, dtype=torch.uint8)
        words[:, : bits // 8] = body.view(-1, bits // 8)
        return words.view(torch.int64).reshape(-1)
    return unpack_booleans(body, count).to(torch.int64)
