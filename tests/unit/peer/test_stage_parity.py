"""Placement never changes numbers: however a graph is cut, losses, weights and buffers are a plain loop's, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from atoll.coordinator.tracing.slicing import slice_graph
from atoll.peer.stage import StageSettings
from atoll.protocol.assignment import OptimizerSettings
from support.hand_models import HandModel, convolutional, transformer
from support.pipelines import HandPipeline, Sample

STEPS, MICROBATCHES, LEARNING_RATE, CLIP_NORM = 4, 3, 3e-2, 0.5
ADAMW = OptimizerSettings(name="adamw", weight_decay=0.1, beta1=0.9, beta2=0.95)
SGD = OptimizerSettings(name="sgd", weight_decay=0.01, momentum=0.9, nesterov=True)


def settings(**changes: object) -> StageSettings:
    values: dict[str, object] = {"run_seed": 7, "device": torch.device("cpu"), "optimizer": ADAMW}
    return StageSettings(**(values | changes))  # type: ignore[arg-type]


def steps_of(model: HandModel) -> list[list[Sample]]:
    """The same microbatches for everyone, with different numbers of rows, each weighted by its rows."""
    generator = torch.Generator().manual_seed(0)
    sizes = (4, 2, 3)
    return [
        [
            Sample(inputs=model.sample(sizes[index % 3], generator), weight=float(sizes[index % 3]))
            for index in range(MICROBATCHES)
        ]
        for _ in range(STEPS)
    ]


def train(
    model: HandModel, cuts: tuple[int, ...], used: StageSettings, in_flight: int = 1
) -> tuple[list[float], dict[str, torch.Tensor]]:
    pipeline = HandPipeline(slice_graph(model.graph, cuts), used, in_flight)
    losses = [pipeline.step(number, samples, LEARNING_RATE, CLIP_NORM) for number, samples in enumerate(steps_of(model), 1)]
    return [value for pair in losses for value in pair], pipeline.state()


def plain_loop(model: HandModel, used: StageSettings) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loop that anyone would write."""
    state = HandPipeline(slice_graph(model.graph, ()), used).state()
    weights = {spec.name: state[spec.name].requires_grad_() for spec in model.graph.parameters}
    buffers = {spec.name: state[spec.name] for spec in model.graph.buffers}
    chosen = used.optimizer
    optimizer: torch.optim.Optimizer
    if chosen.name == "adamw":
        betas = (chosen.beta1, chosen.beta2)
        optimizer = torch.optim.AdamW(weights.values(), LEARNING_RATE, betas, weight_decay=chosen.weight_decay, foreach=False)
    else:
        optimizer = torch.optim.SGD(
            weights.values(),
            LEARNING_RATE,
            chosen.momentum,
            weight_decay=chosen.weight_decay,
            nesterov=chosen.nesterov,
            foreach=False,
        )
    told: list[float] = []
    for samples in steps_of(model):
        total = sum(sample.weight for sample in samples)
        losses = []
        for sample in samples:
            with torch.autocast("cpu", torch.bfloat16, enabled=used.precision == "bf16"):
                loss = model.plain(weights, buffers, sample.inputs)
            (loss * (sample.weight / total)).backward()
            losses.append(float(loss.detach()))
        norm = math.sqrt(
            sum(float(torch.linalg.vector_norm(weights[name].grad, dtype=torch.float64)) ** 2 for name in sorted(weights))
        )
        factor = min(1.0, CLIP_NORM / (norm + 1e-6))
        if factor != 1.0:
            for weight in weights.values():
                weight.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
        told += [sum(sample.weight * loss for sample, loss in zip(samples, losses, strict=True)) / total, norm]
    return told, {name: value.detach() for name, value in (weights | buffers).items()}


def assert_same(
    first: tuple[list[float], dict[str, torch.Tensor]], second: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys()
    different = [name for name in first[1] if not torch.equal(first[1][name], second[1][name])]
    assert not different


def spread(model: HandModel, stages: int) -> tuple[int, ...]:
    """``stages - 1`` of the model's cuts, far from one another."""
    return tuple(model.cuts[round(number * (len(model.cuts) - 1) / max(1, stages - 2))] for number in range(stages - 1))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("make", [transformer, convolutional])
def test_any_cut_equals_a_plain_loop(make, stages: int) -> None:
    model = make()
    assert_same(train(model, spread(model, stages), settings()), plain_loop(model, settings()))
