"""Every dtype, shape and layout survives the wire."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.compression.codec import RawCodec, decode_tensor, encode_tensor
from atoll.compression.context import CodecContext
from atoll.protocol.errors import WireError
from atoll.protocol.tensors import allocate, dtype_from_name, dtype_name, memory_order, tensor_from_bytes, tensor_to_bytes

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
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
]
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
CONTEXT = CodecContext(edge="value")
SHAPES = [(), (1,), (7,), (0,), (0, 3), (3, 5, 7), (2, 1, 4)]


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor of random bit patterns (a boolean one of proper booleans)."""
    generator = torch.Generator().manual_seed(1)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def bits(tensor: Tensor) -> bytes:
    """The elements in row-major order; compares NaN payloads too."""
    return bytes(tensor_to_bytes(tensor))


def round_trip(tensor: Tensor) -> Tensor:
    return decode_tensor(encode_tensor("value", tensor, RawCodec(), CONTEXT), RawCodec(), CONTEXT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip_keeps_dtype_shape_and_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(dtype, shape)
    encoded = encode_tensor("value", tensor, RawCodec(), CONTEXT)
    assert memoryview(encoded.data).nbytes == tensor.numel() * dtype.itemsize
    back = decode_tensor(encoded, RawCodec(), CONTEXT)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert bits(back) == bits(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(60.0).reshape(3, 4, 5).transpose(0, 2),
        torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.arange(60.0).reshape(3, 4, 5).permute(1, 2, 0),
    ],
    ids=["transposed", "channels last", "permuted"],
)
def test_a_dense_permuted_tensor_keeps_its_strides_without_a_copy(tensor: Tensor) -> None:
    encoded = encode_tensor("value", tensor, RawCodec(), CONTEXT)
    assert torch.frombuffer(encoded.data, dtype=torch.uint8).data_ptr() == tensor.data_ptr()
    back = round_trip(tensor)
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(60.0).reshape(6, 10)[::2, 1::3],
        torch.arange(5.0).reshape(5, 1).expand(5, 4),
        torch.arange(6.0).reshape(2, 3)[:, 1],
        torch.arange(4.0).requires_grad_() * 2,
    ],
    ids=["strided slice", "expanded", "column", "part of an autograd graph"],
)
def test_a_tensor_with_gaps_or_overlaps_travels_row_major(tensor: Tensor) -> None:
    back = round_trip(tensor)
    assert torch.equal(back, tensor)
    assert back.is_contiguous()
    assert not back.requires_grad


def test_lazy_conjugates_and_negatives_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(round_trip(tensor.conj()), tensor.conj())
    assert torch.equal(round_trip(tensor.conj().imag), tensor.conj().imag)


def test_a_contiguous_tensor_is_not_copied() -> None:
    tensor = torch.arange(4.0)
    assert torch.frombuffer(tensor_to_bytes(tensor), dtype=torch.float32).data_ptr() == tensor.data_ptr()


def test_what_was_received_is_writable_aligned_and_owns_its_memory() -> None:
    buffer = allocate(16)
    buffer[:] = bytes(tensor_to_bytes(torch.arange(4.0)))
    tensor = tensor_from_bytes(buffer, torch.float32, (4,))
    del buffer
    tensor += 1
    assert tensor.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert tensor.data_ptr() % 64 == 0


def test_read_only_bytes_become_a_copy() -> None:
    data = bytes(tensor_to_bytes(torch.arange(4.0)))
    tensor_from_bytes(data, torch.float32, (4,)).zero_()
    assert tensor_from_bytes(data, torch.float32, (4,)).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_wrong_size_is_refused() -> None:
    with pytest.raises(WireError, match="takes 12 bytes, got 8"):
        tensor_from_bytes(bytes(8), torch.float32, (3,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_names_of_dtypes_round_trip(dtype: torch.dtype) -> None:
    assert dtype_from_name(dtype_name(dtype)) is dtype


def test_what_cannot_travel_is_refused() -> None:
    with pytest.raises(WireError, match="unknown dtype 'float31'"):
        dtype_from_name("float31")
    with pytest.raises(WireError, match="qint8"):
        dtype_name(torch.qint8)
    with pytest.raises(WireError, match="sparse"):
        tensor_to_bytes(torch.eye(3).to_sparse())


def test_order_of_memory() -> None:
    assert memory_order(torch.zeros(2, 3)) == ()
    assert memory_order(torch.zeros(2, 3).t()) == (1, 0)
    assert memory_order(torch.zeros(()).expand(4)) == ()
