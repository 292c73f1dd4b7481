"""Integers and booleans arrive as they were, in the bytes that their range needs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.compression.codec import decode_tensor, encode_tensor
from atoll.compression.context import CodecContext
from atoll.compression.registry import codec
from atoll.protocol.errors import WireError
from atoll.protocol.tensors import tensor_to_bytes

CONTEXT = CodecContext(edge="value")
HEADER = 9
DTYPES = {
    torch.int8: (-(2**7), 2**7 - 1),
    torch.int16: (-(2**15), 2**15 - 1),
    torch.int32: (-(2**31), 2**31 - 1),
    torch.int64: (-(2**63), 2**63 - 1),
    torch.uint8: (0, 2**8 - 1),
    torch.uint16: (0, 2**16 - 1),
    torch.uint32: (0, 2**32 - 1),
    torch.uint64: (0, 2**64 - 1),
    torch.bool: (0, 1),
}


def packed_bytes(tensor: torch.Tensor) -> int:
    """Round trip under a lossy codec; how many bytes crossed, or -1 for raw."""
    encoded = encode_tensor("value", tensor, codec("bf16"), CONTEXT)
    back = decode_tensor(encoded, codec(encoded.codec), CONTEXT)
    assert (back.dtype, back.shape, back.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert bytes(tensor_to_bytes(back)) == bytes(tensor_to_bytes(tensor))
    return -1 if encoded.codec == "raw" else memoryview(encoded.data).nbytes


@given(st.sampled_from(sorted(DTYPES, key=str)), st.data())
def test_any_integers(dtype: torch.dtype, data: st.DataObject) -> None:
    low, high = DTYPES[dtype]
    first = data.draw(st.integers(low, high))
    last = data.draw(st.integers(first, high))
    values = data.draw(st.lists(st.integers(first, last), max_size=70))
    tensor = torch.tensor(values, dtype=dtype)
    assert packed_bytes(tensor) < max(1, tensor.numel() * dtype.itemsize)


@pytest.mark.parametrize(
    ("low", "high", "bits"),
    [(7, 7, 1), (-5, -4, 1), (0, 2, 8), (0, 255, 8), (-100, 156, 16), (0, 50256, 16), (0, 128255, 24), (0, 2**33, 40)],
)
def test_bytes_of_a_range(low: int, high: int, bits: int) -> None:
    tensor = torch.full((1000,), low, dtype=torch.int64)
    tensor[500] = high
    assert packed_bytes(tensor) == HEADER + 1000 * bits // 8


def test_booleans_take_a_bit() -> None:
    assert packed_bytes(torch.arange(1001) % 3 == 0) == HEADER + 126


def test_what_would_not_become_shorter_travels_raw() -> None:
    assert packed_bytes(torch.tensor(True)) == -1
    assert packed_bytes(torch.empty(0, 3, dtype=torch.int64)) == -1
    assert packed_bytes(torch.tensor([-(2**63), 2**63 - 1] * 100)) == -1


def test_a_permuted_tensor_keeps_its_layout() -> None:
    assert packed_bytes(torch.arange(600).reshape(20, 30).t()) == HEADER + 2 * 600


def test_raw_touches_nothing() -> None:
    encoded = encode_tensor("value", torch.zeros(1000, dtype=torch.int64), codec("raw"), CONTEXT)
    assert encoded.codec == "raw"


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        (b"", torch.int64),
        (bytes([1]) + bytes(8), torch.int64),
        (bytes([8]) + bytes(8 + 3), torch.int64),
        (bytes([64]) + bytes(8 + 32), torch.int64),
        (bytes([0]) + bytes(8), torch.int64),
        (bytes([8]) + bytes(8 + 4), torch.float32),
    ],
)
def test_bytes_that_no_encoder_made_are_refused(data: bytes, dtype: torch.dtype) -> None:
    with pytest.raises(WireError, match="cannot be"):
        codec("packed").decode(data, dtype, (4,), CONTEXT)
