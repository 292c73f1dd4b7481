"""Whole messages: each tensor has its codec, and state belongs to an edge, a direction and a generation."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from torch import Tensor

from atoll.compression import registry
from atoll.compression.bases import Bases
from atoll.compression.codec import error_and_norm
from atoll.compression.context import CodecContext, Direction, context_of
from atoll.compression.masks import Masks
from atoll.compression.registry import MessageCoder, codec, decode_message, encode_message, is_raw
from atoll.protocol.errors import WireError
from atoll.protocol.ids import StageIndex
from atoll.protocol.messages import Kind, Message
from atoll.protocol.tensors import Buffer, tensor_from_bytes, tensor_to_bytes
from support.messages import key_of


class Difference:
    """A lossless codec with state: sends what changed since the last tensor of its edge."""

    name = "difference"
    has_state = True
    fixed_rate = True

    def __init__(self) -> None:
        self.sent: Tensor | None = None
        self.received: Tensor | None = None

    def encode(self, tensor: Tensor, context: CodecContext) -> Buffer:
        difference = tensor if self.sent is None else tensor - self.sent
        self.received, self.sent = self.sent, tensor.clone()
        return tensor_to_bytes(difference)

    def decode(self, data: Buffer, dtype: torch.dtype, shape: tuple[int, ...], context: CodecContext) -> Tensor:
        difference = tensor_from_bytes(data, dtype, shape)
        self.received = difference if self.received is None else difference + self.received
        return self.received.clone()

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return torch.Size(shape).numel() * dtype.itemsize

    def mean_bytes(self, shape: tuple[int, ...], dtype: torch.dtype, direction: Direction = Direction.FORWARD) -> int:
        return self.num_bytes(shape, dtype)

    def reset(self) -> None:
        self.sent = self.received = None


@pytest.fixture
def with_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MAKERS", {**registry._MAKERS, "difference": lambda *_: Difference()})


def message_of(value: float, kind: Kind = Kind.ACTIVATION, generation: int = 1, edge: str = "0:0") -> Message:
    return Message(key=key_of(kind, generation=generation), tensors=((edge, torch.full((4,), value)),))


def sent(encoded_by: MessageCoder, message: Message) -> float:
    """The first number on the wire."""
    return float(torch.frombuffer(encoded_by.encode(message, "difference").tensors[0].data, dtype=torch.float32)[0])


def test_each_tensor_names_its_codec() -> None:
    tensors = (("hidden", torch.randn(3)), ("mask", torch.arange(100)), ("flag", torch.tensor(True)))
    message = Message(key=key_of(), tensors=tensors, numbers={"scale": 0.5})
    encoded = encode_message(message, "bf16")
    assert [tensor.codec for tensor in encoded.tensors] == ["bf16", "packed", "raw"]
    assert not is_raw(encoded)
    assert is_raw(encode_message(message))
    back = decode_message(encoded)
    assert back.key == message.key
    assert back.numbers == {"scale": 0.5}
    assert torch.equal(back.tensor("mask"), message.tensor("mask"))
    assert torch.equal(back.tensor("hidden"), message.tensor("hidden").bfloat16().float())
    with pytest.raises(KeyError):
        back.tensor("absent")


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(WireError, match="unknown codec 'zip'"):
        codec("zip")


def test_the_error_of_a_message() -> None:
    coder = MessageCoder()
    tensors = (("exact", torch.ones(4)), ("rounded", torch.full((4,), 1.0 + 2.0**-8)), ("mask", torch.arange(100)))
    message = Message(key=key_of(), tensors=tensors)
    lossy = {name: error_and_norm(*pair) for name, *pair in coder.lossy(message, coder.encode(message, "bf16"))}
    assert lossy["exact"] == (0.0, 2.0)
    assert lossy["rounded"] == pytest.approx((2 * 2.0**-8, 2 * (1.0 + 2.0**-8)))
    assert set(lossy) == {"exact", "rounded"}
    assert list(coder.lossy(message, coder.encode(message))) == []


@pytest.mark.usefixtures("with_difference")
def test_a_codec_with_state_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Difference] = []

    def make(masks: Masks, bases: Bases) -> Difference:
        made.append(Difference())
        return made[-1]

    monkeypatch.setitem(registry._MAKERS, "difference", make)
    coder = MessageCoder()
    for value in (1.0, 3.0):
        message = message_of(value)
        encoded = coder.encode(message, "difference")
        assert [float(decoded[0]) for _, _, decoded in coder.lossy(message, encoded)] == [value]
    assert len(made) == 1


@pytest.mark.usefixtures("with_difference")
def test_state_belongs_to_an_edge_and_a_direction() -> None:
    left, right = MessageCoder(), MessageCoder()
    for number, value in enumerate((1.0, 3.0, 6.0)):
        for message in (
            message_of(value),
            message_of(10 * value, edge="1:0"),
            message_of(100 * value, Kind.GRADIENT),
        ):
            back = right.decode(left.encode(message, "difference"))
            assert torch.equal(back.tensors[0][1], message.tensors[0][1]), number
    assert sent(left, message_of(7.0)) == 1.0


@pytest.mark.usefixtures("with_difference")
def test_a_newer_generation_begins_anew_on_both_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    left, right = MessageCoder(), MessageCoder()
    right.decode(left.encode(message_of(1.0), "difference"))
    left.encode(message_of(2.0), "difference")  # lost on the way
    assert not caplog.records
    message = message_of(5.0, generation=2)
    assert torch.equal(right.decode(left.encode(message, "difference")).tensors[0][1], message.tensors[0][1])
    assert caplog.messages == ["generation 2: 1 codecs forget what they learned"] * 2
    assert sent(left, message_of(9.0, generation=1)) == 9.0  # a straggler neither sees the state nor changes it
    assert sent(left, message_of(6.0, generation=2)) == 1.0


def test_the_seed_is_made_of_what_both_ends_know_and_not_of_the_placement() -> None:
    key = key_of()
    context = context_of(key, "3:0", 5)
    assert context == CodecContext(edge="3:0", run_seed=5, step=key.step, microbatch=key.microbatch)
    moved = dataclasses.replace(key_of(generation=9), source=StageIndex(4), target=StageIndex(7))
    assert context_of(moved, "3:0", 5).seed == context.seed
    others = [
        dataclasses.replace(context, edge="3:1"),
        dataclasses.replace(context, direction=Direction.BACKWARD),
        dataclasses.replace(context, run_seed=6),
        dataclasses.replace(context, evaluation=True),
        context_of(key_of(step=2), "3:0", 5),
        context_of(key_of(microbatch=1), "3:0", 5),
        context_of(key_of(Kind.GRADIENT), "3:0", 5),
    ]
    assert len({context.seed, *(other.seed for other in others)}) == 7  # the two backward ones are the same
