"""Differences from what was last seen of a sample: both ends in step, bounded memory, and what happens without a value."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from atoll.compression.codec import relative_error
from atoll.compression.context import CodecContext, Direction
from atoll.compression.delta import DeltaCodec
from atoll.compression.registry import MessageCoder
from atoll.compression.sample_memory import SampleMemory
from atoll.protocol.errors import MissingState, WireError
from atoll.protocol.ids import StepNumber
from atoll.protocol.messages import EncodedMessage, Kind, Message
from atoll.protocol.samples import MOST_SAMPLES, sample_numbers, samples_of, without_samples
from atoll.protocol.tensors import Buffer
from support.messages import key_of

SHAPE = (4, 16, 32)
ROW_BYTES = 16 * 32 * 2


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def context(step: int = 1, samples: tuple[int, ...] = (7, 3, 12, 5), way: Direction = Direction.FORWARD) -> CodecContext:
    return CodecContext(edge="2:0", direction=way, step=StepNumber(step), samples=samples)


class Ends:
    """The sender and the receiver of one edge."""

    def __init__(self, memory_bytes: int = 2**20, bits: int = 4) -> None:
        self.sender, self.receiver = (DeltaCodec("delta", bits=bits, memory_bytes=memory_bytes) for _ in range(2))

    def trip(self, tensor: Tensor, where: CodecContext) -> tuple[Tensor, int]:
        """What arrives, and its bytes."""
        data = self.encoded(tensor, where)
        back = self.receiver.decode(data, tensor.dtype, tuple(tensor.shape), where)
        assert torch.equal(self.sender.decode(data, tensor.dtype, tuple(tensor.shape), where), back)
        return back, memoryview(data).nbytes

    def encoded(self, tensor: Tensor, where: CodecContext) -> bytes:
        data: Buffer | None = self.sender.encode(tensor, where)
        assert data is not None
        return bytes(data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 2])
def test_later_epochs_take_fewer_bits_and_errors_do_not_add_up(bits: int, dtype: torch.dtype) -> None:
    """Samples whose activations change by a tenth from epoch to epoch, met in another order and other company each time."""
    ends, values = Ends(bits=bits), {sample: randn(16, 32, seed=sample) for sample in range(12)}
    errors, sizes = [], []
    for epoch in range(6):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(epoch)).tolist()
        for first in range(0, 12, 4):
            samples = tuple(order[first : first + 4])
            tensor = torch.stack([values[sample] for sample in samples]).to(dtype)
            back, size = ends.trip(tensor, context(3 * epoch + first, samples))
            assert back.dtype == dtype
            errors.append(relative_error(tensor, back) ** 2)
            sizes.append(size)
        for sample in values:
            values[sample] = values[sample] + 0.1 * randn(16, 32, seed=100 * epoch + sample)
    assert max(errors[:3]) < 1e-4
    assert max(errors[3:]) < {4: 3e-4, 2: 5e-3}[bits]
    assert set(sizes[:3]) == {ends.sender.num_bytes(SHAPE, torch.float32)}
    assert set(sizes[3:]) == {ends.sender.mean_bytes(SHAPE, torch.float32)}
    assert sizes[3] < {4: 0.54, 2: 0.31}[bits] * sizes[0]


def test_a_microbatch_may_hold_samples_that_were_met_and_others() -> None:
    ends, tensor = Ends(), randn(*SHAPE)
    ends.trip(tensor, context(1))
    back, size = ends.trip(tensor, context(2, samples=(7, 99, 12, 98)))
    assert relative_error(tensor, back) < 0.09  # the values held of 7 and 12 are nearly these
    assert ends.sender.mean_bytes(SHAPE, torch.float32) < size < ends.sender.num_bytes(SHAPE, torch.float32)
    assert relative_error(tensor, ends.trip(tensor, context(3, samples=(7, 99, 12, 98)))[0]) < 0.01


def test_a_sample_of_another_length_is_sent_whole() -> None:
    ends = Ends()
    ends.trip(randn(*SHAPE), context(1))
    for step in (2, 3):
        tensor = randn(4, 8, 32, seed=step)
        back, _ = ends.trip(tensor, context(step))
        assert relative_error(tensor, back) < 0.2


@pytest.mark.parametrize(
    "where",
    [
        context(way=Direction.BACKWARD),
        dataclasses.replace(context(), evaluation=True),
        context(samples=()),
        context(samples=(1, 2, 3)),
        context(samples=(1, 2, 3, 3)),
    ],
    ids=["gradients", "evaluation", "nobody named samples", "another number of them", "one twice"],
)
def test_without_samples_that_matter_tensors_are_integers_of_8_bits(where: CodecContext) -> None:
    ends = Ends()
    for _ in range(2):
        back, size = ends.trip(randn(*SHAPE), where)
        assert relative_error(randn(*SHAPE), back) ** 2 < 4e-5
        assert size == ends.sender.mean_bytes(SHAPE, torch.float32, Direction.BACKWARD)


def test_what_has_no_room_is_sent_whole_and_both_ends_know() -> None:
    ends = Ends(memory_bytes=2 * ROW_BYTES)
    sizes = [ends.trip(randn(*SHAPE), context(step))[1] for step in range(1, 5)]
    assert sizes[0] > sizes[1] == sizes[2] == sizes[3] > ends.sender.mean_bytes(SHAPE, torch.float32)


def test_a_full_disk_at_the_sender_makes_it_send_whole_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends()

    def full(self: SampleMemory, sample: int, row: Tensor) -> bool:
        raise OSError("the disk is full")

    ends.trip(randn(*SHAPE), context(1))
    with monkeypatch.context() as patch:
        patch.setattr(SampleMemory, "keep", full)
        data = ends.encoded(randn(*SHAPE), context(2))
    ends.receiver.decode(data, torch.float32, SHAPE, context(2))
    _, size = ends.trip(randn(*SHAPE), context(3))
    assert size == ends.sender.num_bytes(SHAPE, torch.float32)


def test_a_message_that_overtook_an_earlier_one_waits_for_it() -> None:
    ends, tensor = Ends(), randn(*SHAPE)
    first, second = (ends.encoded(tensor + step, context(step)) for step in (1, 2))
    with pytest.raises(MissingState, match="version 0 of sample 7 is here, it differs from 1"):
        ends.receiver.decode(second, torch.float32, SHAPE, context(2))
    ends.receiver.decode(first, torch.float32, SHAPE, context(1))
    back = ends.receiver.decode(second, torch.float32, SHAPE, context(2))
    assert torch.equal(back, ends.sender.decode(second, torch.float32, SHAPE, context(2)))
    with pytest.raises(WireError, match="version 2 of sample 7 is here"):
        ends.receiver.decode(second, torch.float32, SHAPE, context(2))


def test_ends_that_hold_other_values_notice() -> None:
    ends, other = Ends(), Ends()
    ends.trip(randn(*SHAPE), context(1))
    other.trip(randn(*SHAPE, seed=1), context(1))
    data = ends.encoded(randn(*SHAPE), context(2))
    with pytest.raises(WireError, match="what is held here of the samples"):
        other.receiver.decode(data, torch.float32, SHAPE, context(2))


class Link:
    """Whole messages, as a step sends them."""

    def __init__(self) -> None:
        self.left, self.right = MessageCoder(), MessageCoder()

    def encoded(self, tensor: Tensor, step: int, generation: int, samples: tuple[int, ...], name: str) -> EncodedMessage:
        key = key_of(Kind.ACTIVATION, step=step, generation=generation)
        return self.left.encode(Message(key=key, tensors=(("2:0", tensor),), numbers=sample_numbers(samples)), name)

    def send(
        self, tensor: Tensor, step: int, generation: int = 1, samples: tuple[int, ...] = (7, 3, 12, 5), name: str = "delta-4"
    ) -> int:
        encoded = self.encoded(tensor, step, generation, samples, name)
        assert relative_error(tensor, self.right.decode(encoded).tensor("2:0")) < 0.02
        return encoded.num_bytes


def test_after_a_void_step_both_ends_begin_anew() -> None:
    """A message of the void step was encoded and never arrived. The replay is under a new generation."""
    link, tensor = Link(), randn(*SHAPE)
    whole = link.send(tensor, 1)
    assert link.send(tensor, 2) < 0.6 * whole
    link.encoded(tensor, 3, 1, (7, 3, 12, 5), "delta-4")  # lost, and with it what the receiver holds
    assert link.send(tensor, 3, generation=2) == whole
    assert link.send(tensor, 4, generation=2) < 0.6 * whole


def test_only_codecs_that_need_them_send_the_samples() -> None:
    link = Link()
    for name, expected in (("delta-4", (7, 3, 12, 5)), ("int8", ()), ("raw", ())):
        encoded = link.encoded(randn(*SHAPE), 1, 1, (7, 3, 12, 5), name)
        assert samples_of(encoded.numbers) == expected
        assert link.right.decode(encoded).tensor("2:0").shape == SHAPE


def test_samples_among_numbers() -> None:
    numbers = {"scale": 0.5} | sample_numbers((9, 2**40, 0))
    assert samples_of(numbers) == (9, 2**40, 0)
    assert without_samples(numbers) == {"scale": 0.5}
    assert sample_numbers(range(MOST_SAMPLES + 1)) == {}
    assert samples_of({"sample:1": 3.0}) == samples_of({"sample:0": 0.5}) == samples_of({"sample:0": float("nan")}) == ()


def test_memory_holds_so_many_bytes_and_those_that_came_first() -> None:
    memory = SampleMemory(10 * 64)
    kept = [memory.keep(sample, torch.full((32,), float(sample))) for sample in range(12)]
    assert kept == [True] * 10 + [False] * 2
    assert len(memory) == 10
    assert torch.equal(memory.read([3, 9]), torch.tensor([[3.0], [9.0]]).expand(2, 32).bfloat16())
    assert memory.keep(3, torch.zeros(32))
    assert (memory.version(3, 32), memory.version(3, 16), memory.version(11, 32)) == (2, 0, 0)
    assert not memory.read([3]).any()
    memory.drop(3)
    assert memory.version(3, 32) == 0
    memory.clear()
    assert len(memory) == 0
    assert memory.keep(11, torch.ones(32))
