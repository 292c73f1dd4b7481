"""The largest elements alone: places in their shortest form, gradients through the mask of their activations, AdaTopK."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from atoll.compression import places
from atoll.compression.context import CodecContext, Direction
from atoll.compression.masks import Masks
from atoll.compression.registry import MessageCoder, codec, is_codec, sparse_name
from atoll.compression.sparsity import TopKCodec, adaptive_ratios
from atoll.protocol.errors import WireError
from atoll.protocol.ids import MicrobatchIndex, StageIndex, StepNumber
from atoll.protocol.messages import Kind, Message, MessageKey
from support.messages import key_of

FORWARD = CodecContext(edge="4:0")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 7, 8, 254, 255, 256, 65535, 65536, 200_000])
@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.1, 0.5, 1.0])
def test_places_come_back_in_the_shortest_form(size: int, share: float) -> None:
    count = round(share * size)
    wanted = torch.randperm(size, generator=torch.Generator().manual_seed(1))[:count].sort().values
    data = places.to_bytes(wanted, size)
    assert len(data) == places.num_bytes(count, size) <= -(-size // 8)
    assert torch.equal(places.from_bytes(data, count, size), wanted)


def test_places_that_lie_together_are_no_other_size() -> None:
    wanted = torch.arange(255, 510)  # all of one piece
    data = places.to_bytes(wanted, 20_000)
    assert len(data) == places.num_bytes(255, 20_000) == 255 + -(-20_000 // 255)
    assert torch.equal(places.from_bytes(data, 255, 20_000), wanted)


@pytest.mark.parametrize(("size", "count"), [(64, 8), (20_000, 255), (200_000, 20)])
def test_bytes_that_are_no_places_are_refused(size: int, count: int) -> None:
    for filler in (0, 3, 255):
        with pytest.raises(WireError):
            places.from_bytes(torch.full((places.num_bytes(count, size),), filler, dtype=torch.uint8), count, size)
    with pytest.raises(WireError):
        places.from_bytes(torch.zeros(3, dtype=torch.uint8), count, size)


@pytest.mark.parametrize("share", [0.5, 0.1, 0.01, 0.0005])
def test_the_largest_elements_cross_and_the_others_are_zero(share: float) -> None:
    tensor, chosen = randn(50, 400), TopKCodec("topk", share=share, masks=Masks())
    data = chosen.encode(tensor, FORWARD)
    assert data is not None
    assert memoryview(data).nbytes == chosen.num_bytes((50, 400), torch.float32)
    back = TopKCodec("topk", share=share, masks=Masks()).decode(data, torch.float32, (50, 400), FORWARD)
    edge = tensor.abs().flatten().sort(descending=True).values[round(share * 20_000) - 1]
    assert torch.equal(back != 0, tensor.abs() >= edge)
    assert float((back - tensor)[back != 0].abs().max()) <= float(tensor.abs().max()) / 127.5 / 2 * 1.01


class Link:
    """Two peers, the first of which sends activations."""

    def __init__(self) -> None:
        self.left, self.right = MessageCoder(), MessageCoder()

    def forward(self, tensor: Tensor, name: str = "topk-10", **key: int) -> Tensor:
        encoded = self.left.encode(Message(key=key_of(Kind.ACTIVATION, **key), tensors=(("4:0", tensor),)), name)
        return self.right.decode(encoded).tensor("4:0")

    def backward(self, tensor: Tensor, name: str = "topk-10", **key: int) -> tuple[Tensor, int]:
        """What arrives, and its bytes. The sender looks at what it lost, as the guard of a link does."""
        message = Message(key=_back(key_of(Kind.GRADIENT, **key)), tensors=(("4:0", tensor),))
        encoded = self.right.encode(message, name)
        back = self.left.decode(encoded).tensor("4:0")
        for _, _, decoded in self.right.lossy(message, encoded):
            assert torch.equal(decoded, back)
        return back, encoded.num_bytes


def _back(key: MessageKey) -> MessageKey:
    return dataclasses.replace(key, source=StageIndex(1), target=StageIndex(0))


def test_a_gradient_goes_where_its_activation_went_without_places() -> None:
    link = Link()
    crossed = [link.forward(randn(40, 60, seed=microbatch), microbatch=microbatch) != 0 for microbatch in range(3)]
    for microbatch in (1, 0, 2):
        gradient = randn(40, 60, seed=9 + microbatch)
        back, size = link.backward(gradient, microbatch=microbatch)
        assert torch.equal(back != 0, crossed[microbatch])
        assert torch.allclose(back, gradient * crossed[microbatch], atol=0.02)
        assert size == codec("topk-10").mean_bytes((40, 60), torch.float32, Direction.BACKWARD)
        assert size < codec("topk-10").num_bytes((40, 60), torch.float32) / 1.8


def test_a_gradient_may_have_fewer_elements_than_its_activation() -> None:
    link, gradient = Link(), randn(40, 60, seed=5)
    crossed = link.forward(randn(40, 60)) != 0
    back, _ = link.backward(gradient, "topk-1")
    largest = (gradient * crossed).abs().flatten().topk(24).indices.sort().values
    assert torch.equal(back.flatten().nonzero().squeeze(1), largest)


@pytest.mark.parametrize("before", ["another codec", "nothing", "another step", "another shape"])
def test_without_the_mask_a_gradient_has_its_own(before: str) -> None:
    link, gradient = Link(), randn(40, 60, seed=5)
    if before == "another codec":
        link.forward(randn(40, 60), "int8", step=2)
    elif before == "another step":
        link.forward(randn(40, 60), step=1)
    elif before == "another shape":
        link.forward(randn(60, 40), step=2)
    back, size = link.backward(gradient, step=2)
    assert torch.equal(back.flatten().nonzero().squeeze(1), gradient.abs().flatten().topk(240).indices.sort().values)
    assert size == codec("topk-10").num_bytes((40, 60), torch.float32)


def test_a_new_generation_knows_no_masks_and_a_receiver_without_one_refuses() -> None:
    link, gradient = Link(), randn(40, 60, seed=5)
    link.forward(randn(40, 60))
    key = _back(key_of(Kind.GRADIENT))
    encoded = link.right.encode(Message(key=key, tensors=(("4:0", gradient),)), "topk-10")
    with pytest.raises(WireError, match="no mask of 4:0 in microbatch 0 of step 1"):
        MessageCoder().decode(encoded)
    _, size = link.backward(gradient, generation=2)
    assert size == codec("topk-10").num_bytes((40, 60), torch.float32)


def test_masks_are_those_of_microbatches_in_flight() -> None:
    masks = Masks()
    sender = TopKCodec("topk-10", share=0.1, masks=masks)
    for step in range(1, 5):
        for microbatch in range(8):
            turn = dataclasses.replace(FORWARD, step=StepNumber(step), microbatch=MicrobatchIndex(microbatch))
            sender.encode(randn(40, 60), turn)
            sender.encode(randn(40, 60), dataclasses.replace(turn, evaluation=True))
            if microbatch >= 2 and step != 2:  # step 2 was given up
                earlier = MicrobatchIndex(microbatch - 2)
                sender.encode(randn(40, 60), dataclasses.replace(turn, microbatch=earlier, direction=Direction.BACKWARD))
                assert len(masks) <= 3
    assert len(masks) == 2


def test_the_slowest_link_of_adatopk_sends_a_hundredth_of_its_bytes_and_fast_ones_all() -> None:
    seconds = (2.0, 0.002, 1.0, 1.999, 2.0 / 300)
    ratios = adaptive_ratios(seconds, 100.0)
    assert ratios == pytest.approx((300.0, 1.0, 150.0, 299.85, 1.0))
    assert adaptive_ratios((), 100.0) == ()
    assert adaptive_ratios((0.0, 0.0), 100.0) == (1.0, 1.0)
    names = [sparse_name(ratio) for ratio in ratios]
    assert names == ["sparse-300", "raw", "sparse-150", "sparse-299.85", "raw"]
    shape = (8, 250, 300)
    assert codec(names[0]).num_bytes(shape, torch.float32) == pytest.approx(4 * 600_000 / 100)
    data = codec(names[0]).encode(randn(*shape), FORWARD)
    assert data is not None
    assert memoryview(data).nbytes == 24_000
    assert int((codec(names[0]).decode(data, torch.float32, shape, FORWARD) != 0).sum()) == 2000


def test_names_with_a_number() -> None:
    assert all(is_codec(name) for name in ("sparse-300", "sparse-2.5", "topk-10", "raw"))
    for name in ("sparse-", "sparse-0", "sparse-1e9", "sparse--3", "sparse-nan", "sparse-3x", "adatopk"):
        assert not is_codec(name)
        with pytest.raises(WireError, match="unknown codec"):
            codec(name)
