"""Tensors are encoded on the device that they are on: what leaves it are the bytes to send, and little else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from atoll.compression.codec import decode_tensor, encode_tensor
from atoll.compression.context import CodecContext, Direction
from atoll.compression.lowrank import PowerSGD
from atoll.compression.masks import Masks
from atoll.compression.registry import codec, codec_names
from atoll.protocol.ids import StepNumber
from support.pretend_device import DeviceTensor, pretended_device

SHAPE = (8, 128, 128)
NAMES = (*codec_names(), "sparse-12.5")
ENTROPY_CODED = [name for name in NAMES if name.startswith("transform")]
SMALL = 16  # bytes for the first rate control and the like


def randn(seed: int = 0) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def values(name: str, seed: int = 0) -> Tensor:
    return randn(seed).mul(100).long() if name == "packed" else randn(seed)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("name", NAMES)
def test_what_leaves_the_device_is_what_is_sent(name: str, direction: Direction) -> None:
    """The same bytes as on the CPU. Symbols of the transform codec leave it in a byte each, to be entropy-coded, and once in
    many messages a covariance, of which a basis is made."""
    context = CodecContext(edge="3:0", direction=direction, samples=tuple(range(SHAPE[0])))
    there, here = codec(name), codec(name)
    for step in range(3):
        tensor, turn = values(name, step), replace(context, step=StepNumber(step))
        with pretended_device() as (put, traffic):
            encoded = encode_tensor("3:0", put(tensor), there, turn)
        expected = encode_tensor("3:0", tensor, here, turn)
        assert encoded.codec == expected.codec
        assert bytes(encoded.data) == bytes(expected.data)
        sent = memoryview(encoded.data).nbytes
        if name in ENTROPY_CODED:
            attempts = 8 if step == 0 else 3
            once = 4 * SHAPE[-1] ** 2
            assert sum(traffic.down) <= attempts * tensor.numel() + once + SMALL * SHAPE[-1]
        else:
            assert sum(traffic.down) <= sent
        assert traffic.scalars <= 60


def test_a_gradient_on_the_device_finds_the_mask_that_was_decoded_on_the_cpu() -> None:
    masks, activation, gradient = Masks(), randn(), randn(1)
    sender, receiver = codec("topk-10"), codec("topk-10", masks)
    forward = CodecContext(edge="3:0")
    crossed = decode_tensor(encode_tensor("3:0", activation, sender, forward), receiver, forward) != 0
    backward = replace(forward, direction=Direction.BACKWARD)
    with pretended_device() as (put, traffic):
        encoded = encode_tensor("3:0", put(gradient), receiver, backward)
    assert sum(traffic.down) <= memoryview(encoded.data).nbytes
    assert torch.equal(decode_tensor(encoded, sender, backward) != 0, crossed)


def test_low_rank_factors_are_made_on_the_device() -> None:
    replica = PowerSGD(rank=2)
    with pretended_device() as (put, traffic):
        gradient = put(torch.randn(40, 60))
        for _ in range(2):
            second = replica.second("weight", replica.first("weight", gradient))
            assert isinstance(replica.mean("weight", second), DeviceTensor)
            replica.commit()
    assert traffic.down == []


def test_the_pretended_device_is_not_the_cpu() -> None:
    with pretended_device() as (put, traffic):
        tensor = put(torch.arange(6.0))
        assert tensor.device.type != "cpu"
        with pytest.raises(RuntimeError, match="same device"):
            tensor + torch.ones(6)
        assert torch.equal((tensor * 2).cpu(), torch.arange(6.0) * 2)
        assert float(tensor.sum()) == 15.0
        assert (traffic.down, traffic.scalars) == ([24], 1)
        with pytest.raises((RuntimeError, TypeError)):
            tensor.numpy()
