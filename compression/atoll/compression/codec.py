"""What a codec is, and how one tensor is encoded with it.

A codec turns a tensor into bytes and back, lossily or not. It may decline a tensor (by returning None): integers, booleans
and complex numbers are never compressed lossily, and a codec declines values that it could not restore within its bound, and
tensors that it would not make shorter. A declined tensor of integers is packed, any other travels raw; its header says so,
for each tensor of a message names its own codec.

The bytes depend on the tensor, the context and the codec's state alone.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from atoll.compression.context import CodecContext, Direction
from atoll.compression.integers import PackedCodec
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
    """Encodes tensors one at a time.

    An instance with state (``has_state``) belongs to one edge, one direction and one end of a link, and to one generation:
    whoever holds it calls :meth:`reset` on both ends when that ends. The receiver's instance only decodes, in the
    order in which the messages were encoded.
    """

    @property
    def name(self) -> str:
        """The name in tensor headers and job files; it never changes its meaning."""
        ...

    @property
    def has_state(self) -> bool:
        """Whether what was encoded before has a part in the bytes."""
        ...

    @property
    def fixed_rate(self) -> bool:
        """Whether :meth:`num_bytes` is exact; else it is an upper bound."""
        ...

    def encode(self, tensor: Tensor, context: CodecContext) -> Buffer | None:
        """The bytes of a row-major tensor on any device, or None when this codec declines it.

        The bytes may be a view of the tensor's memory. This instance can decode what it has encoded last, with no effect on
        what it encodes next.
        """
        ...

    def decode(self, data: Buffer, dtype: torch.dtype, shape: tuple[int, ...], context: CodecContext) -> Tensor:
        """A tensor of the original dtype and shape on the CPU; raises WireError when ``data`` cannot be one."""
        ...

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """How many bytes a tensor takes on the wire, in its raw form where the codec declines all tensors of this kind."""
        ...

    def mean_bytes(self, shape: tuple[int, ...], dtype: torch.dtype, direction: Direction = Direction.FORWARD) -> int:
        """How many bytes a tensor takes in the mean over a run, for predictions; at most :meth:`num_bytes`. ``direction``
        matters to codecs that spare one of them something."""
        ...

    def reset(self) -> None:
        """Forgets all state."""
        ...


class RawCodec:
    """The elements as they are. Never declines, loses nothing, copies nothing where the tensor is contiguous on the CPU."""

    name = "raw"
    has_state = False
    fixed_rate = True

    def encode(self, tensor: Tensor, context: CodecContext) -> Buffer:
        return tensor_to_bytes(tensor)

    def decode(self, data: Buffer, dtype: torch.dtype, shape: tuple[int, ...], context: CodecContext) -> Tensor:
        return tensor_from_bytes(data, dtype, shape)

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return num_elements(shape) * dtype.itemsize

    def mean_bytes(self, shape: tuple[int, ...], dtype: torch.dtype, direction: Direction = Direction.FORWARD) -> int:
        return self.num_bytes(shape, dtype)

    def reset(self) -> None:
        """There is no state."""


def encode_tensor(name: str, tensor: Tensor, codec: Codec, context: CodecContext) -> EncodedTensor:
    """The tensor under ``codec``, or losslessly where the codec declines it."""
    order = memory_order(tensor)
    plain = in_memory_order(tensor, order)
    candidates: tuple[Codec, ...] = (codec, PackedCodec())
    for candidate in candidates:
        data, used = candidate.encode(plain, context), candidate.name
        if data is not None:
            break
    else:
        data, used = tensor_to_bytes(plain), RawCodec.name
    return EncodedTensor(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), codec=used, data=data, order=order)


def decode_tensor(encoded: EncodedTensor, codec: Codec, context: CodecContext) -> Tensor:
    """The inverse of :func:`encode_tensor`, given the codec that ``encoded`` names."""
    shape = tuple(encoded.shape[dimension] for dimension in encoded.order) if encoded.order else encoded.shape
    return from_memory_order(codec.decode(encoded.data, encoded.dtype, shape, context), encoded.order)


def error_and_norm(original: Tensor, decoded: Tensor) -> tuple[float, float]:
    """``|original - decoded|`` and ``|original|``, 2-norms over the finite elements of floating-point tensors. An
    element that became infinite counts in the norm and not as error."""
    if not original.is_floating_point():
        return 0.0, 0.0
    wanted = original.detach().to(decoded.device, torch.promote_types(original.dtype, torch.float32), copy=True)
    difference = (wanted - decoded).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    wanted.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    error, norm = (torch.linalg.vector_norm(part, dtype=torch.float64) for part in (difference, wanted))
    return float(error), float(norm)


def relative_error(original: Tensor, decoded: Tensor) -> float:
    """The quotient of :func:`error_and_norm`; 0 where there is nothing to lose."""
    error, norm = error_and_norm(original, decoded)
    return error / norm if norm > 0 else 0.0
