"""What a codec is, and how a message is encoded with one.

A codec turns a tensor into bytes and back, lossily or not. It may decline a tensor (by returning None): integers, booleans
and complex numbers are never compressed lossily, and a codec declines values that it could not restore within its bound. A
declined tensor travels raw, and its header says so: each tensor of a message names its own codec.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from atoll.protocol.messages import EncodedTensor
from atoll.protocol.tensors import (
    Buffer,
    from_memory_order,
    in_memory_order,
    memory_order,
    num_elements,
    tensor_from_bytes,
    tensor_to_bytes,
)


class Codec(Protocol):
    """Encodes tensors one at a time. Codecs have no state: the same tensor always gives the same bytes."""

    @property
    def name(self) -> str:
        """The name in tensor headers."""
        ...

    def encode(self, tensor: Tensor) -> Buffer | None:
        """The bytes, or None when this codec declines the tensor. The bytes may be a view of the tensor's memory."""
        ...

    def decode(self, data: Buffer, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A tensor of the original dtype and shape; raises WireError when ``data`` cannot be one."""
        ...

    def estimate(self, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        """About how many bytes :meth:`encode` will give."""
        ...


class RawCodec:
    """The elements as they are. Never declines, loses nothing, copies nothing where the tensor is contiguous on the CPU."""

    name = "raw"

    def encode(self, tensor: Tensor) -> Buffer:
        return tensor_to_bytes(tensor)

    def decode(self, data: Buffer, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        return tensor_from_bytes(data, dtype, shape)

    def estimate(self, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        return num_elements(shape) * dtype.itemsize


def encode_tensor(name: str, tensor: Tensor, codec: Codec) -> EncodedTensor:
    """The tensor under ``codec``, or raw where the codec declines it."""
    order = memory_order(tensor)
    plain = in_memory_order(tensor, order)
    data, used = codec.encode(plain), codec.name
    if data is None:
        data, used = tensor_to_bytes(plain), RawCodec.name
    return EncodedTensor(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), codec=used, data=data, order=order)


def decode_tensor(encoded: EncodedTensor, codec: Codec) -> Tensor:
    """The inverse of :func:`encode_tensor`, given the codec that ``encoded`` names."""
    shape = tuple(encoded.shape[dimension] for dimension in encoded.order) if encoded.order else encoded.shape
    return from_memory_order(codec.decode(encoded.data, encoded.dtype, shape), encoded.order)


def relative_error(original: Tensor, decoded: Tensor) -> float:
    """``|original - decoded| / |original|``, in the 2-norm over finite elements; 0 where there are none."""
    if not original.is_floating_point():
        return 0.0
    wanted, got = original.detach().double(), decoded.detach().double()
    finite = wanted.isfinite() & got.isfinite()
    wanted, got = wanted[finite], got[finite]
    norm = float(torch.linalg.vector_norm(wanted))
    return float(torch.linalg.vector_norm(wanted - got)) / norm if norm > 0 else 0.0
