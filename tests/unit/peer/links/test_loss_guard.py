"""What the guard makes of an activation's error and the gradient that comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from atoll.compression.registry import MessageCoder
from atoll.peer.links.loss_guard import SAMPLED_STEPS, LossGuard
from atoll.peer.links.usage import KEPT, Usage, UsageTable
from atoll.protocol.courtesy import Courtesy
from atoll.protocol.ids import Generation, MicrobatchIndex, PeerId, StageIndex, StepNumber
from atoll.protocol.messages import Kind, Message, MessageKey

OWN, OTHER = PeerId("own"), PeerId("other")
ROWS, WIDTH = 4, 512


class Sender:
    """One end of a link that sends through a codec and gets gradients back."""

    def __init__(self, codec: str) -> None:
        self.codec = codec
        self.guard = LossGuard()
        self.table = UsageTable(OWN, Courtesy())
        self.coder = MessageCoder()

    def send(self, key: MessageKey, tensor: Tensor) -> Tensor:
        """What the codec took away."""
        message = Message(key=key, tensors=(("0:0", tensor),))
        usage = self.table.of(OTHER, key.kind)
        usage.encoded(self.codec, message)
        encoded = self.coder.encode(message, self.codec)
        self.guard.sent(OTHER, self.coder, message, encoded, usage)
        return tensor - self.coder.decode(encoded).tensor("0:0")

    def receive(self, key: MessageKey, gradient: Tensor) -> Usage:
        """What is known of the activations after their gradient."""
        self.guard.received(OTHER, Message(key=key, tensors=(("0:0", gradient),)), self.table)
        return self.table.of(OTHER, Kind.ACTIVATION)


def key_of(kind: Kind = Kind.ACTIVATION, step: int = 1, microbatch: int = 0) -> MessageKey:
    ends = (0, 1) if kind is Kind.ACTIVATION else (1, 0)
    return MessageKey(
        generation=Generation(1),
        step=StepNumber(step),
        microbatch=MicrobatchIndex(microbatch),
        kind=kind,
        source=StageIndex(ends[0]),
        target=StageIndex(ends[1]),
    )


def tensor(seed: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_slope_and_curvature_are_products_of_error_and_gradient() -> None:
    sender, gradient = Sender("int4"), tensor(2)
    error = sender.send(key_of(), tensor(1))
    usage = sender.receive(key_of(Kind.GRADIENT), gradient)
    products = (error * gradient).sum(1)
    assert usage.num_guarded == 1
    assert usage.slope == pytest.approx(float(products.sum()), rel=1e-3)
    assert usage.curvature == pytest.approx(float(products.square().sum()), rel=1e-3)
    assert usage.relative_error == pytest.approx(float(error.norm() / tensor(1).norm()), rel=1e-3)


def test_only_the_gradient_of_the_sample_counts_and_only_once() -> None:
    sender, answer = Sender("int8"), key_of(Kind.GRADIENT)
    sender.send(key_of(), tensor(1))
    for other in (
        replace(answer, microbatch=MicrobatchIndex(1)),
        replace(answer, step=StepNumber(2)),
        replace(answer, generation=Generation(2)),
        replace(answer, source=StageIndex(2)),
    ):
        assert not sender.guard.awaits(OTHER, other)
        assert sender.receive(other, tensor(2)).num_guarded == 0
    assert sender.guard.awaits(OTHER, answer)
    assert sender.receive(answer, tensor(2)).num_guarded == 1
    assert not sender.guard.awaits(OTHER, answer)
    assert sender.receive(answer, tensor(2)).num_guarded == 1


def test_one_microbatch_in_several_steps_is_kept_and_no_evaluation() -> None:
    sender = Sender("int8")
    sender.send(replace(key_of(), evaluation=True), tensor(1))
    assert not sender.guard.awaits(OTHER, replace(key_of(Kind.GRADIENT), evaluation=True))
    for step in range(1, 2 * SAMPLED_STEPS + 1):
        for microbatch in range(2):
            sender.send(key_of(step=step, microbatch=microbatch), tensor(step))
            sampled = step % SAMPLED_STEPS == 1 and microbatch == 0
            assert sender.guard.awaits(OTHER, key_of(Kind.GRADIENT, step, microbatch)) is sampled
        sender.receive(key_of(Kind.GRADIENT, step), tensor(0))


def test_the_mean_fades_and_begins_anew_with_another_codec() -> None:
    sender, slopes = Sender("int8"), []
    for step in (1, 1 + SAMPLED_STEPS):
        error = sender.send(key_of(step=step), tensor(step))
        slopes.append(float((error * tensor(9)).sum()))
        usage = sender.receive(key_of(Kind.GRADIENT, step), tensor(9))
    assert usage.slope == pytest.approx(KEPT * slopes[0] + (1 - KEPT) * slopes[1], rel=1e-3)
    sender.codec = "int4"
    sender.send(key_of(step=2 + SAMPLED_STEPS), tensor(5))
    assert (usage.num_guarded, usage.slope, usage.curvature, usage.codec) == (0, 0.0, 0.0, "int4")


def test_a_codec_that_loses_nothing_leaves_nothing_to_wait_for() -> None:
    sender = Sender("raw")
    sender.send(key_of(), tensor(1))
    assert not sender.guard.awaits(OTHER, key_of(Kind.GRADIENT))


def test_of_gradients_the_error_and_the_bias_are_kept() -> None:
    sender = Sender("int2")
    sender.send(key_of(Kind.GRADIENT), tensor(1))
    usage = sender.table.of(OTHER, Kind.GRADIENT)
    assert usage.num_guarded == 1
    assert 0.3 < usage.relative_error < 0.8
    assert abs(usage.bias) < 0.1  # dither has none, but for chance


def test_gradients_leave_a_waiting_activation_alone() -> None:
    sender = Sender("int8")
    sender.send(key_of(), tensor(1))
    for step, sent in ((1, torch.zeros(ROWS, WIDTH)), (1 + SAMPLED_STEPS, tensor(3))):
        sender.send(key_of(Kind.GRADIENT, step), sent)
        assert sender.guard.awaits(OTHER, key_of(Kind.GRADIENT))
    assert sender.table.of(OTHER, Kind.GRADIENT).num_guarded == 1


def test_a_gradient_of_zeros_leaves_nothing_to_wait_for() -> None:
    sender, sent = Sender("int8"), key_of(Kind.GRADIENT)
    sender.send(sent, torch.zeros(ROWS, WIDTH))
    assert not sender.guard.awaits(OTHER, replace(sent, source=sent.target, target=sent.source))
    assert sender.table.of(OTHER, Kind.GRADIENT).num_guarded == 0


def test_infinite_numbers_do_not_spoil_the_mean() -> None:
    sender = Sender("int8")
    sender.send(key_of(), tensor(1))
    usage = sender.receive(key_of(Kind.GRADIENT), torch.full((ROWS, WIDTH), float("inf")))
    assert (usage.slope, usage.curvature) == (0.0, 0.0)
