"""Codecs keep shape and dtype, stay within their bound, and decline what they must not touch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.compression.codec import decode_tensor, encode_tensor, relative_error
from atoll.compression.registry import codec, codec_names, decode_message, encode_message, is_lossless
from atoll.protocol.errors import WireError
from atoll.protocol.ids import Generation, MicrobatchIndex, StageIndex, StepNumber
from atoll.protocol.messages import Kind, Message, MessageKey

BOUNDS = {"raw": 0.0, "fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}
VALUES = {
    "normal": lambda shape: torch.randn(shape, generator=torch.Generator().manual_seed(0)),
    "constant": lambda shape: torch.full(shape, 0.3),
    "zeros": lambda shape: torch.zeros(shape),
    "huge": lambda shape: torch.full(shape, 1e30),
    "largest": lambda shape: torch.full(shape, torch.finfo(torch.float32).max),
    "tiny": lambda shape: torch.full(shape, 1e-3),
}


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("shape", [(), (1,), (7,), (0,), (3, 5, 7)], ids=str)
@pytest.mark.parametrize("values", VALUES)
def test_error_stays_within_the_bound(name: str, shape: tuple[int, ...], values: str) -> None:
    tensor = VALUES[values](shape)
    encoded = encode_tensor("value", tensor, codec(name))
    back = decode_tensor(encoded, codec(encoded.codec))
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert not back.isnan().any()
    assert relative_error(tensor, back) <= BOUNDS[name]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_two_bytes_an_element(name: str, dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5, dtype=dtype)
    encoded = encode_tensor("value", tensor, codec(name))
    assert encoded.codec == name
    assert memoryview(encoded.data).nbytes == codec(name).estimate(dtype, (3, 5)) == 30


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([True, False]),
        torch.tensor([2**62, -1]),
        torch.tensor([1 + 1e-9j]),
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.tensor([1.0], dtype=torch.float16),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_what_is_not_longer_floating_point_travels_raw(name: str, tensor: Tensor) -> None:
    encoded = encode_tensor("value", tensor, codec(name))
    assert encoded.codec == "raw"
    assert codec(name).estimate(tensor.dtype, tuple(tensor.shape)) == memoryview(encoded.data).nbytes
    assert torch.equal(decode_tensor(encoded, codec("raw")), tensor)


@pytest.mark.parametrize("name", codec_names())
def test_infinities_and_nan_arrive(name: str) -> None:
    tensor = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0])
    encoded = encode_tensor("value", tensor, codec(name))
    assert encoded.codec == codec(name).name
    assert torch.equal(decode_tensor(encoded, codec(name)).nan_to_num(nan=5.0), tensor.nan_to_num(nan=5.0))


def test_a_value_beyond_the_short_type_makes_the_tensor_raw() -> None:
    tensor = torch.tensor([1.0, 70000.0])
    encoded = encode_tensor("value", tensor, codec("fp16"))
    assert encoded.codec == "raw"
    assert torch.equal(decode_tensor(encoded, codec("raw")), tensor)


def test_layout_survives_a_lossy_codec() -> None:
    tensor = torch.randn(4, 6).t()
    encoded = encode_tensor("value", tensor, codec("bf16"))
    back = decode_tensor(encoded, codec("bf16"))
    assert back.stride() == tensor.stride()
    assert torch.equal(back, tensor.bfloat16().float())


def test_bytes_that_no_encoder_made_are_refused() -> None:
    with pytest.raises(WireError, match="never encodes"):
        codec("bf16").decode(bytes(8), torch.int64, (4,))
    with pytest.raises(WireError, match="takes 8 bytes"):
        codec("bf16").decode(bytes(6), torch.float32, (4,))
    with pytest.raises(WireError, match="unknown codec 'zip'"):
        codec("zip")


@given(st.lists(st.floats(width=32), max_size=40), st.sampled_from(codec_names()))
def test_any_values(values: list[float], name: str) -> None:
    tensor = torch.tensor(values)
    encoded = encode_tensor("value", tensor, codec(name))
    back = decode_tensor(encoded, codec(encoded.codec))
    assert torch.equal(back.isfinite(), tensor.isfinite())
    assert torch.equal(back.isnan(), tensor.isnan())
    finite = tensor.isfinite()
    wanted, got = tensor[finite].double(), back[finite].double()
    smallest = torch.finfo(torch.float16).smallest_normal if name == "fp16" else torch.finfo(torch.bfloat16).smallest_normal
    assert bool(((wanted - got).abs() <= BOUNDS[name] * wanted.abs().clamp(min=smallest)).all())


def test_whole_messages() -> None:
    key = MessageKey(
        generation=Generation(1),
        step=StepNumber(2),
        microbatch=MicrobatchIndex(0),
        kind=Kind.ACTIVATION,
        source=StageIndex(0),
        target=StageIndex(1),
    )
    message = Message(key=key, tensors=(("hidden", torch.randn(3)), ("mask", torch.tensor([1, 0]))), numbers={"scale": 0.5})
    encoded = encode_message(message, "bf16")
    assert [tensor.codec for tensor in encoded.tensors] == ["bf16", "raw"]
    assert not is_lossless(encoded)
    assert is_lossless(encode_message(message))
    back = decode_message(encoded)
    assert back.key == key
    assert back.numbers == {"scale": 0.5}
    assert torch.equal(back.tensor("mask"), message.tensor("mask"))
    assert torch.equal(back.tensor("hidden"), message.tensor("hidden").bfloat16().float())
    with pytest.raises(KeyError):
        back.tensor("absent")


def test_relative_error() -> None:
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(torch.tensor([1]), torch.tensor([2])) == 0.0
