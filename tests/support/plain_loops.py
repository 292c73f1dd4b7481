"""The loop that anyone would write, over a hand-written model: what a cut graph's numbers must equal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from atoll.protocol.assignment import OptimizerSettings
from support.hand_models import HandModel
from support.pipelines import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What training told of each step (loss, norm), and what it left."""

    told: tuple[tuple[float, float], ...]
    state: Mapping[str, torch.Tensor]


def assert_same(first: Trained, second: Trained) -> None:
    """Fails unless both have the same bits."""
    assert first.told == second.told
    assert first.state.keys() == second.state.keys()
    assert [name for name in first.state if not torch.equal(first.state[name], second.state[name])] == []


def train_in_a_loop(
    model: HandModel,
    first: Mapping[str, torch.Tensor],
    steps: Sequence[Sequence[Sample]],
    optimizer: OptimizerSettings,
    *,
    learning_rate: float,
    clip_norm: float,
    bf16: bool = False,
) -> Trained:
    """Trains the model's plain function from the ``first`` values."""
    weights = {spec.name: first[spec.name].clone().requires_grad_() for spec in model.graph.parameters}
    buffers = {spec.name: first[spec.name].clone() for spec in model.graph.buffers}
    stepper = _optimizer(optimizer, list(weights.values()), learning_rate)
    told: list[tuple[float, float]] = []
    for samples in steps:
        total = sum(sample.weight for sample in samples)
        losses = []
        for sample in samples:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model.plain(weights, buffers, sample.inputs)
            torch.autograd.backward(loss * (sample.weight / total))
            losses.append(sample.weight * float(loss.detach()))
        told.append((sum(losses) / total, _clip([weights[name] for name in sorted(weights)], clip_norm)))
        stepper.step()
        stepper.zero_grad()
    return Trained(told=tuple(told), state={name: value.detach() for name, value in (weights | buffers).items()})


def _optimizer(settings: OptimizerSettings, weights: list[torch.Tensor], learning_rate: float) -> torch.optim.Optimizer:
    if settings.name == "adamw":
        return torch.optim.AdamW(
            weights,
            lr=learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            foreach=False,
        )
    return torch.optim.SGD(
        weights,
        lr=learning_rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.nesterov,
        foreach=False,
    )


def _clip(weights: Sequence[torch.Tensor], clip_norm: float) -> float:
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    norm = math.sqrt(sum(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2 for gradient in gradients))
    factor = min(1.0, clip_norm / (norm + 1e-6))
    for gradient in gradients:
        gradient.mul_(factor)
    return norm
