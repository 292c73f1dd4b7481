"""Tensors to bytes and back, without pickle and, on the CPU, without a copy.

A tensor's bytes are its elements in memory order, little-endian as every supported machine has them. A dense tensor whose
dimensions are permuted in memory (channels last, a transpose) keeps that order on the far side: kernels choose their
algorithm by strides, and with it the last bits of their result, so a value that crosses a cut must not change its layout.

Receive buffers are aligned as torch aligns its own memory, for the same reason.

This module owns dtypes, layout and buffers; what the bytes mean under a lossy codec is the business of ``compression``.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from atoll.protocol.errors import WireError

Buffer: TypeAlias = bytes | bytearray | memoryview

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.complex32,
        torch.complex64,
        torch.complex128,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
    )
}
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name on the wire, for example ``"bfloat16"``; raises WireError for one that cannot travel."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise WireError(f"tensors of dtype {dtype} cannot be sent") from None


def dtype_from_name(name: str) -> torch.dtype:
    """The inverse of :func:`dtype_name`; raises WireError for an unknown name."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise WireError(f"unknown dtype {name!r}") from None


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions from outermost to innermost in memory, for a dense tensor that is not row-major; else ``()``.

    A tensor with gaps or overlaps (a slice, an expanded one) has no order of its own either and travels row-major.
    """
    if tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension]))
    return order if tensor.permute(order).is_contiguous() else ()


def in_memory_order(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """The tensor with its dimensions permuted as :func:`memory_order` said, so that its bytes are in sequence."""
    return tensor.permute(order) if order else tensor


def from_memory_order(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """The inverse of :func:`in_memory_order`."""
    if not order:
        return tensor
    inverse = [0] * len(order)
    for position, dimension in enumerate(order):
        inverse[dimension] = position
    return tensor.permute(inverse)


def tensor_to_bytes(tensor: Tensor) -> memoryview:
    """The elements in row-major order: a view of the tensor's own memory where it is contiguous and on the CPU, else a copy.

    The memory must not change before the bytes have been used.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise WireError(f"only plain dense tensors can be sent, not {tensor.layout} of {tensor.dtype}")
    dtype_name(tensor.dtype)
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def tensor_from_bytes(buffer: Buffer, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor over ``buffer``'s own memory where that is writable, else over a copy; raises WireError on a wrong size."""
    view = memoryview(buffer)
    expected = num_elements(shape) * dtype.itemsize
    if view.nbytes != expected:
        raise WireError(f"{dtype} of shape {list(shape)} takes {expected} bytes, got {view.nbytes}")
    if expected == 0:
        return torch.empty(shape, dtype=dtype)
    if view.readonly:
        copy = allocate(expected)
        copy[:] = view.cast("B")
        view = copy
    return torch.frombuffer(view, dtype=torch.uint8).view(dtype).reshape(shape)


def allocate(num_bytes: int) -> memoryview:
    """A writable buffer aligned as torch aligns a tensor's memory."""
    return torch.empty(num_bytes, dtype=torch.uint8).numpy().data


def num_elements(shape: tuple[int, ...]) -> int:
    """The product of the sizes; 1 for a scalar."""
    count = 1
    for size in shape:
        count *= size
    return count
