"""Memory for what a stage holds as long as it lives, and that using it changes no number."""

from __future__ import annotations

import pytest
import torch

from atoll.peer.stage.gradient_home import GradientHome
from atoll.peer.stage.lasting import lasting_copy, lasting_zeros, lasting_zeros_like
from atoll.peer.stage.optimizer import Optimizer, pieces, squared_norm
from atoll.protocol.assignment import OptimizerSettings

LARGE = (1100, 1000)
CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(3,), (256, 256), (0, 4), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_zeros_of_any_size(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = lasting_zeros(shape, dtype, CPU)
    assert (tuple(found.shape), found.dtype) == (shape, dtype)
    assert not found.any()
    assert found.is_contiguous()
    assert not found.requires_grad


def test_the_memory_layout_stays() -> None:
    images = torch.randn(4, 64, 32, 32).contiguous(memory_format=torch.channels_last)
    assert lasting_zeros_like(images).stride() == images.stride()
    assert torch.equal(lasting_copy(images), images)
    assert lasting_copy(images.requires_grad_()).data_ptr() != images.data_ptr()


def test_memory_outlives_its_views() -> None:
    view = lasting_zeros(LARGE, torch.float32, CPU)[5:7].fill_(3.0)
    assert view.sum() == 6.0 * LARGE[1]


def test_a_gradient_goes_home_with_its_bits() -> None:
    leaf = torch.ones(4, requires_grad=True)
    leaf.register_hook(GradientHome(leaf))  # type: ignore[no-untyped-call]
    slopes = torch.tensor([0.0, -0.0, 1e-45, float("nan")])
    torch.autograd.backward(leaf, slopes)
    first = leaf.grad
    assert first is not None
    assert first.view(torch.int32).tolist() == slopes.view(torch.int32).tolist()
    torch.autograd.backward(leaf, slopes)
    assert leaf.grad is first
    leaf.grad = None
    torch.autograd.backward(leaf, torch.ones(4))
    assert leaf.grad is first
    assert first.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "settings",
    [
        OptimizerSettings(name="adamw", weight_decay=0.1),
        OptimizerSettings(name="sgd", weight_decay=0.1),
        OptimizerSettings(name="sgd", momentum=0.9, nesterov=True, weight_decay=0.1),
    ],
)
def test_an_update_in_pieces_has_the_bits_of_torchs_own(settings: OptimizerSettings) -> None:
    torch.manual_seed(0)
    ours, theirs = (torch.randn(LARGE, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    assert len(list(pieces(ours))) > 1
    optimizer, reference = Optimizer(settings), torchs(settings, theirs)
    optimizer.prepare({"weight": ours})
    for _ in range(3):
        ours.grad = torch.randn(LARGE)
        theirs.grad = ours.grad.clone()
        optimizer.update({"weight": ours}, 1e-2)
        reference.step()
        assert torch.equal(ours, theirs)
    for moment, value in ((moment, value) for _, moment, value in optimizer.state()):
        assert torch.equal(value, reference.state[theirs][moment]), moment


def torchs(settings: OptimizerSettings, weight: torch.Tensor) -> torch.optim.Optimizer:
    decay = settings.weight_decay
    if settings.name == "adamw":
        return torch.optim.AdamW([weight], lr=1e-2, weight_decay=decay, foreach=False)
    return torch.optim.SGD(
        [weight], lr=1e-2, momentum=settings.momentum, nesterov=settings.nesterov, weight_decay=decay, foreach=False
    )


def test_the_norm_of_a_large_gradient() -> None:
    gradient = torch.randn(LARGE, generator=torch.Generator().manual_seed(2))
    assert squared_norm(gradient) == pytest.approx(float(gradient.double().square().sum()), rel=1e-12)
    assert squared_norm(gradient.t()) == pytest.approx(squared_norm(gradient), rel=1e-12)
