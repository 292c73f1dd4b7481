"""What holds for every codec: all that are registered are tested, and a new one needs an entry in CLAIMS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.compression.codec import Codec, decode_tensor, encode_tensor, relative_error
from atoll.compression.context import CodecContext, Direction
from atoll.compression.registry import codec, codec_names
from atoll.compression.speed import measure_speed
from atoll.protocol.codec_names import ADAPTIVE
from atoll.protocol.errors import WireError
from atoll.protocol.ids import MicrobatchIndex, StepNumber
from atoll.protocol.job import CODECS
from atoll.protocol.tensors import Buffer, num_elements

CONTEXT = CodecContext(edge="12:0", run_seed=3, step=StepNumber(5), microbatch=MicrobatchIndex(1))
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.uint8, torch.bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """``within(original, decoded)``: whether the error is within the codec's bound, for any finite values. ``squared_error``:
    the most that is lost of normally distributed numbers, as a fraction of their squared norm. ``steps`` of a dithered codec:
    how many steps of its quantiser lie between the largest magnitude of a block and 0."""

    within: Callable[[Tensor, Tensor], bool]
    squared_error: float
    steps: float | None = None


def exact(original: Tensor, decoded: Tensor) -> bool:
    return torch.equal(original, decoded)


def relative(bound: float, smallest: float) -> Callable[[Tensor, Tensor], bool]:
    """Each number within a relative bound, or what remains of that below the smallest normal number."""

    def within(original: Tensor, decoded: Tensor) -> bool:
        allowed = bound * original.abs().clamp(min=smallest)
        return bool(((original - decoded).abs() <= allowed).all())

    return within


def blockwise(steps: float, *, rotated: bool, block: int = 64) -> Callable[[Tensor, Tensor], bool]:
    """Half a step in each code. After a rotation the largest code is at most the block's norm, and the error's norm is kept."""

    def within(original: Tensor, decoded: Tensor) -> bool:
        rows = -(-original.numel() // block)
        padded = torch.zeros(2, rows * block, dtype=torch.float64)
        padded[0, : original.numel()] = original
        padded[1, : original.numel()] = original - decoded
        wanted, error = padded.view(2, rows, block)
        if rotated:
            half_step, error = wanted.norm(dim=1) / steps / 2, error.norm(dim=1) / block**0.5
        else:
            half_step, error = wanted.abs().amax(1) / steps / 2, error.abs().amax(1)
        return bool((error <= half_step * (1 + 2.0**-6) + 1e-33).all())

    return within


def altogether(bound: float) -> Callable[[Tensor, Tensor], bool]:
    """The squared norm of the error within a fraction of the tensor's."""

    def within(original: Tensor, decoded: Tensor) -> bool:
        allowed = bound * original.square().sum() + original.numel() * 1e-66
        return bool((original - decoded).square().sum() <= allowed)

    return within


CLAIMS = {
    "raw": Claim(within=exact, squared_error=0.0),
    "packed": Claim(within=exact, squared_error=0.0),
    "fp32": Claim(within=relative(2.0**-24, torch.finfo(torch.float32).smallest_normal), squared_error=1e-14),
    "bf16": Claim(within=relative(2.0**-8, torch.finfo(torch.bfloat16).smallest_normal), squared_error=4e-6),
    "fp16": Claim(within=relative(2.0**-11, torch.finfo(torch.float16).smallest_normal), squared_error=6e-8),
    "int8": Claim(within=blockwise(127.5, rotated=False), squared_error=4e-5, steps=127.5),
    "int4": Claim(within=blockwise(7.5, rotated=True), squared_error=1.1e-2, steps=7.5),
    "int3": Claim(within=blockwise(3.5, rotated=True), squared_error=5e-2, steps=3.5),
    "int2": Claim(within=blockwise(1.5, rotated=True), squared_error=0.27, steps=1.5),
    "transform": Claim(within=altogether(0.41), squared_error=0.12),
    "transform-1.75": Claim(within=altogether(0.6), squared_error=0.18),
    "transform-1.5": Claim(within=altogether(0.8), squared_error=0.27),
    "transform-1": Claim(within=altogether(1.0), squared_error=0.55),
    "transform-0.7": Claim(within=altogether(1.0), squared_error=0.7),
    "transform-0.5": Claim(within=altogether(1.0), squared_error=0.85),
    "topk-10": Claim(within=altogether(1.0), squared_error=0.58),
    "topk-1": Claim(within=altogether(1.0), squared_error=0.93),
    "delta-4": Claim(within=blockwise(127.5, rotated=False), squared_error=4e-5, steps=127.5),
    "delta-2": Claim(within=blockwise(127.5, rotated=False), squared_error=4e-5, steps=127.5),
    "sparse-12.5": Claim(within=altogether(1.0), squared_error=0.62),
}
NAMES = (*codec_names(), "sparse-12.5")
DITHERED = [name for name, claim in CLAIMS.items() if claim.steps]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


VALUES: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "normal": lambda shape: randn(*shape),
    "heavy tails": lambda shape: randn(*shape).pow(5),
    "constant": lambda shape: torch.full(shape, 0.3),
    "zeros": lambda shape: torch.zeros(shape),
    "mostly zeros": lambda shape: randn(*shape).relu().sub(2).relu(),
    "huge": lambda shape: torch.full(shape, 1e30),
    "largest": lambda shape: torch.full(shape, torch.finfo(torch.float32).max),
    "small": lambda shape: 1e-30 * randn(*shape),
    "subnormal": lambda shape: torch.full(shape, 1e-40),
    "all magnitudes": lambda shape: torch.logspace(-44, 38, num_elements(shape)).reshape(shape),
}
SHAPES = [(), (1,), (7,), (0,), (0, 3), (3, 5, 7), (64,), (65,), (2, 1, 129), (5, 7000)]


@dataclass(frozen=True, slots=True)
class Trip:
    """What became of a tensor; ``used`` is the codec that its header names."""

    back: Tensor
    used: str
    data: Buffer

    @property
    def num_bytes(self) -> int:
        return memoryview(self.data).nbytes


def trip(chosen: Codec, tensor: Tensor, context: CodecContext = CONTEXT) -> Trip:
    """Encodes, copies as the wire does, and decodes with another instance."""
    encoded = encode_tensor("12:0", tensor, chosen, context)
    back = decode_tensor(replace(encoded, data=bytes(encoded.data)), codec(encoded.codec), context)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    return Trip(back, encoded.codec, encoded.data)


def assert_within_the_claim(name: str, tensor: Tensor, result: Trip) -> None:
    """Either the bound of the codec holds, or that of a lossless one; and what was finite is finite."""
    claim = CLAIMS[result.used]
    assert result.used in (name, "raw", "packed")
    if not tensor.is_floating_point():
        assert torch.equal(tensor, result.back)
        return
    finite = tensor.isfinite()
    assert torch.equal(result.back.isfinite(), finite)
    if not bool(finite.all()):
        assert torch.equal(result.back.isnan(), tensor.isnan())
        assert torch.equal(result.back.isposinf(), tensor.isposinf())
        tensor, result = tensor[finite], replace(result, back=result.back[finite])
    back = result.back.double()
    if tensor.dtype in (torch.float16, torch.bfloat16):  # the result is rounded once more, to the tensor's own type
        spacing = torch.finfo(tensor.dtype).eps * tensor.double().abs().amax().item() if tensor.numel() else 0.0
        back = torch.where((back - tensor.double()).abs() <= spacing, tensor.double(), back)
    assert claim.within(tensor.double().reshape(-1), back.reshape(-1))


def test_every_codec_makes_a_claim_and_every_codec_of_a_job_exists() -> None:
    assert set(CLAIMS) == set(NAMES)
    assert set(CODECS) - {"auto", ADAPTIVE} == set(codec_names()) - {"packed"}
    assert all(codec(name).name == name for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("values", VALUES)
def test_the_error_is_within_the_bound(name: str, shape: tuple[int, ...], values: str) -> None:
    tensor = VALUES[values](shape)
    assert_within_the_claim(name, tensor, trip(codec(name), tensor))


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name: str) -> None:
    tensor = randn(4, 64)
    tensor[2] = 0.0
    assert torch.equal(trip(codec(name), tensor).back[2], torch.zeros(64))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_infinities_and_nan_arrive(name: str, special: float, dtype: torch.dtype) -> None:
    tensor = randn(300).to(dtype)
    tensor[[0, 130, 299]] = special
    assert_within_the_claim(name, tensor, trip(codec(name), tensor))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=40)
def test_any_tensor(name: str, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
    dtype = data.draw(st.sampled_from(FLOATS + INTEGERS))
    width = {torch.float16: 16, torch.float64: 64}.get(dtype, 32)
    count = num_elements(shape)
    numbers = st.integers(0, 1) if dtype in INTEGERS else st.floats(width=width)  # type: ignore[arg-type]
    tensor = torch.tensor(data.draw(st.lists(numbers, min_size=count, max_size=count)), dtype=dtype).reshape(shape)
    assert_within_the_claim(name, tensor, trip(codec(name), tensor))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_error_on_normal_numbers(name: str, dtype: torch.dtype) -> None:
    tensor = randn(64, 1000).to(dtype)
    result = trip(codec(name), tensor)
    rounding = 0.0 if result.used == "raw" else torch.finfo(dtype).eps ** 2
    assert relative_error(tensor, result.back) ** 2 <= CLAIMS[name].squared_error + rounding


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_size_is_as_estimated(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    chosen = codec(name)
    tensor = (10 * randn(*shape)).to(dtype)
    result, estimate = trip(chosen, tensor), chosen.num_bytes(shape, dtype)
    assert result.num_bytes <= estimate
    assert chosen.mean_bytes(shape, dtype) <= estimate
    assert estimate <= num_elements(shape) * dtype.itemsize
    if chosen.fixed_rate and dtype.is_floating_point and tensor.numel():
        assert result.num_bytes == estimate == chosen.mean_bytes(shape, dtype)
        assert result.used == (name if estimate < num_elements(shape) * dtype.itemsize else "raw")


@pytest.mark.parametrize("name", NAMES)
def test_a_resend_is_identical(name: str) -> None:
    tensor = randn(3, 20000)
    first, second = trip(codec(name), tensor), trip(codec(name), tensor.clone())
    assert bytes(first.data) == bytes(second.data)
    assert torch.equal(first.back, second.back)


@pytest.mark.parametrize("name", DITHERED)
def test_another_microbatch_step_edge_or_direction_rounds_otherwise(name: str) -> None:
    tensor = randn(3, 64)
    contexts = [
        CONTEXT,
        replace(CONTEXT, microbatch=MicrobatchIndex(2)),
        replace(CONTEXT, step=StepNumber(6)),
        replace(CONTEXT, edge="13:0"),
        replace(CONTEXT, direction=Direction.BACKWARD),
        replace(CONTEXT, run_seed=4),
    ]
    assert len({tuple(trip(codec(name), tensor, context).back.reshape(-1).tolist()) for context in contexts}) == len(contexts)


@pytest.mark.parametrize("name", DITHERED)
@pytest.mark.parametrize("values", ["normal", "heavy tails", "constant"])
def test_rounding_has_no_bias(name: str, values: str) -> None:
    """The mean over many microbatches comes as near to the tensor as independent errors of mean 0 would."""
    tensor, count, chosen = VALUES[values]((512,)), 300, codec(name)
    total, squared = torch.zeros(512, dtype=torch.float64), 0.0
    for microbatch in range(count):
        error = (trip(chosen, tensor, replace(CONTEXT, microbatch=MicrobatchIndex(microbatch))).back - tensor).double()
        total += error
        squared += float(error.square().mean())
    mean = total / count
    expected = (squared / count / count) ** 0.5
    assert float(mean.square().mean()) ** 0.5 < 1.2 * expected
    assert abs(float(mean.mean())) < 4 * expected / 512**0.5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "tensor",
    [
        randn(40, 60).t(),
        randn(2, 30, 8, 8).contiguous(memory_format=torch.channels_last),
        randn(60, 100)[::2, 1::3],
        randn(50, 1).expand(50, 40),
        randn(30, 70).requires_grad_() * 2,
    ],
    ids=["transposed", "channels last", "strided slice", "expanded", "part of an autograd graph"],
)
def test_memory_order_is_kept_and_the_tensor_is_left_alone(name: str, tensor: Tensor) -> None:
    before = tensor.detach().clone()
    result = trip(codec(name), tensor)
    assert torch.equal(tensor, before)
    assert not result.back.requires_grad
    assert result.back.stride() == (tensor.stride() if before.stride() == tensor.stride() else before.contiguous().stride())
    assert relative_error(tensor, result.back) ** 2 <= 1.2 * CLAIMS[name].squared_error + 1e-14


@pytest.mark.parametrize("name", NAMES)
def test_the_sender_can_decode_its_last_with_no_effect_on_what_follows(name: str) -> None:
    curious, plain, receiver = codec(name), codec(name), codec(name)
    for microbatch in range(4):
        tensor, context = randn(40, 60, seed=microbatch), replace(CONTEXT, microbatch=MicrobatchIndex(microbatch))
        data, same = curious.encode(tensor, context), plain.encode(tensor, context)
        if data is None or same is None:
            assert data is same
            continue
        assert bytes(data) == bytes(same)
        back = receiver.decode(data, tensor.dtype, tuple(tensor.shape), context)
        assert torch.equal(curious.decode(data, tensor.dtype, tuple(tensor.shape), context), back)


@pytest.mark.parametrize("name", NAMES)
def test_reset_makes_a_codec_as_new(name: str) -> None:
    used, data = codec(name), randn(4, 300)
    used.encode(randn(4, 300, seed=1), CONTEXT)
    used.reset()
    assert trip(used, data).data == trip(codec(name), data).data


@pytest.mark.parametrize("name", NAMES)
@given(data=st.binary(max_size=200), elements=st.integers(0, 300), dtype=st.sampled_from(FLOATS + INTEGERS))
@settings(max_examples=40)
def test_bytes_that_no_encoder_made_are_refused_or_decoded(name: str, data: bytes, elements: int, dtype: torch.dtype) -> None:
    """A checksum guards against damage; a hostile sender must not crash the receiver either."""
    try:
        back = codec(name).decode(data, dtype, (elements,), CONTEXT)
    except WireError:
        return
    assert (back.dtype, tuple(back.shape)) == (dtype, (elements,))


@pytest.mark.parametrize("name", [name for name in NAMES if codec(name).fixed_rate])
def test_a_wrong_size_is_refused(name: str) -> None:
    chosen = codec(name)
    size = chosen.num_bytes((300,), torch.float64)
    for wrong in (0, size - 1, size + 1, 10 * size):
        with pytest.raises(WireError):
            chosen.decode(bytes(wrong), torch.float64, (300,), CONTEXT)


@pytest.mark.parametrize("name", NAMES)
def test_the_cost_is_measured(name: str) -> None:
    ticks = iter(range(1000))
    speed = measure_speed(codec(name), lambda: float(next(ticks)), num_elements=1000, repetitions=2)
    if name in ("fp32", "packed"):  # normal fp32 numbers are left as they are
        assert speed.encode_bytes_per_second == speed.decode_bytes_per_second == float("inf")
    else:
        assert speed.encode_bytes_per_second == speed.decode_bytes_per_second == 4000.0
        assert speed.pays_below(0.25) == pytest.approx(1500.0)
