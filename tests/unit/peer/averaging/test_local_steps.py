"""Local steps and the outer step: as torch's own SGD would take it, and nothing that lasts before its commit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from atoll.peer.averaging.local_steps import LocalSteps, OuterOptimizer, mean_change


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def put(model: nn.Module, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def replica(seed: int) -> tuple[nn.Module, Callable[[], None]]:
    """A model, the same for each seed, and an inner step on data of its own."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(seed)

    def step() -> None:
        inputs = torch.randn(8, 4, generator=data)
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :3] * 2).square().mean().backward()
        optimizer.step()

    return model, step


def test_outer_steps_are_those_of_sgd_with_nesterovs_momentum() -> None:
    settings = LocalSteps(every=3)
    replicas = [replica(1), replica(2)]
    outer = OuterOptimizer(settings, weights_of(replicas[0][0]))
    reference, _ = replica(1)
    sgd = torch.optim.SGD(reference.parameters(), lr=settings.learning_rate, momentum=settings.momentum, nesterov=True)
    for step in range(1, 13):
        for _, inner in replicas:
            inner()
        if not settings.is_outer(step):
            continue
        changes = [outer.change(weights_of(model)) for model, _ in replicas]
        mean = mean_change(changes, [300, 100])
        for name, parameter in reference.named_parameters():
            parameter.grad = (changes[0][name] * 300 + changes[1][name] * 100) / 400
        sgd.step()
        weights = outer.step(mean)
        outer.commit()
        for model, _ in replicas:
            put(model, weights)
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-6, atol=1e-6)


def test_one_replica_whose_outer_step_is_a_plain_one_trains_as_if_alone() -> None:
    (alone, alone_step), (model, step) = replica(1), replica(1)
    outer = OuterOptimizer(LocalSteps(every=2, learning_rate=1.0, momentum=0.0), weights_of(model))
    for number in range(1, 9):
        alone_step()
        step()
        if number % 2 == 0:
            put(model, outer.step(outer.change(weights_of(model))))
            outer.commit()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_void_step_leaves_everything_as_it_was() -> None:
    model, step = replica(1)
    outer = OuterOptimizer(LocalSteps(every=1), weights_of(model))
    step()
    change = outer.change(weights_of(model))
    first = outer.step({name: value * 5 for name, value in change.items()})
    outer.void()
    with pytest.raises(AssertionError, match="no outer step"):
        outer.commit()
    second = outer.step(change)
    outer.commit()
    assert not torch.equal(first["weight"], second["weight"])
    assert all(torch.equal(outer.state()[name], second[name]) for name in second)


def test_state_moves_to_another_replica() -> None:
    model, step = replica(1)
    outer = OuterOptimizer(LocalSteps(every=1), weights_of(model))
    other = OuterOptimizer(LocalSteps(every=1), weights_of(model))
    for _ in range(2):
        step()
        outer.step(outer.change(weights_of(model)))
        outer.commit()
    other.load(outer.state())
    change = outer.change(weights_of(model))
    assert all(torch.equal(a, b) for a, b in zip(outer.step(change).values(), other.step(change).values(), strict=True))
