"""Shorter floating-point types: within their rounding, and never an infinity for a finite number."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.compression.codec import decode_tensor, encode_tensor, relative_error
from atoll.compression.context import CodecContext
from atoll.compression.registry import codec
from atoll.protocol.errors import WireError

CONTEXT = CodecContext(edge="value")
BOUNDS = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}


def round_trip(name: str, tensor: Tensor) -> tuple[Tensor, str, int]:
    """What arrives, the codec that was used, and the bytes it took."""
    encoded = encode_tensor("value", tensor, codec(name), CONTEXT)
    back = decode_tensor(encoded, codec(encoded.codec), CONTEXT)
    return back, encoded.codec, memoryview(encoded.data).nbytes


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_two_bytes_an_element(name: str, dtype: torch.dtype) -> None:
    back, used, num_bytes = round_trip(name, torch.randn(3, 5, dtype=dtype))
    assert (back.dtype, used, num_bytes) == (dtype, name, 30)


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_what_would_not_become_shorter_travels_raw(name: str, dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, -2.0]).to(dtype)
    back, used, _ = round_trip(name, tensor)
    assert used == "raw"
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("name", BOUNDS)
def test_infinities_and_nan_arrive(name: str) -> None:
    tensor = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0], dtype=torch.float64)
    back, used, _ = round_trip(name, tensor)
    assert used == name
    assert torch.equal(back, tensor) or torch.equal(back.nan_to_num(nan=5.0), tensor.nan_to_num(nan=5.0))


@pytest.mark.parametrize(("name", "value"), [("fp16", 70000.0), ("fp32", 1e39), ("bf16", 3.4e38)])
def test_a_value_beyond_the_short_type_makes_the_tensor_raw(name: str, value: float) -> None:
    tensor = torch.tensor([1.0, value], dtype=torch.float64)
    back, used, _ = round_trip(name, tensor)
    assert used == "raw"
    assert torch.equal(back, tensor)


def test_bytes_that_no_encoder_made_are_refused() -> None:
    with pytest.raises(WireError, match="never encodes"):
        codec("bf16").decode(bytes(8), torch.int64, (4,), CONTEXT)
    with pytest.raises(WireError, match="takes 8 bytes"):
        codec("bf16").decode(bytes(6), torch.float32, (4,), CONTEXT)


@given(st.lists(st.floats(width=32), max_size=40), st.sampled_from(sorted(BOUNDS)))
def test_any_values(values: list[float], name: str) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    back, _, _ = round_trip(name, tensor)
    assert torch.equal(back.isfinite(), tensor.isfinite())
    assert torch.equal(back.isnan(), tensor.isnan())
    finite = tensor.isfinite()
    wanted, got = tensor[finite].double(), back[finite].double()
    smallest = torch.finfo(torch.float16).smallest_normal if name == "fp16" else torch.finfo(torch.bfloat16).smallest_normal
    assert bool(((wanted - got).abs() <= BOUNDS[name] * wanted.abs().clamp(min=smallest)).all())


def test_relative_error() -> None:
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, float("inf"), 4.0]), torch.tensor([3.0, float("inf"), 4.5])) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3e30, 4e30]), torch.tensor([3e30, 4.5e30])) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(torch.tensor([1]), torch.tensor([2])) == 0.0
