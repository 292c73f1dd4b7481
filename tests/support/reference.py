"""What a run must come to: the original module trained by a plain PyTorch loop in this process.

The loop uses nothing of the pipeline. It shares with it the first values of the weights (replayed from the op graph, since
they are a function of the run's seed and each tensor's name), the samples, the learning rate of each step, and the published
rule for weighing losses and clipping.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from atoll.coordinator.data.feed import Batch, Feed
from atoll.coordinator.data.opening import open_feed
from atoll.coordinator.run.schedule import LearningRateSchedule, clip_factor
from atoll.coordinator.tracing.source import ModelSource, open_source
from atoll.coordinator.tracing.trace import trace
from atoll.peer.stage.initialisation import initial_value
from atoll.protocol.graph import BufferSpec, ParameterSpec
from atoll.protocol.ids import StepNumber
from atoll.protocol.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The losses of the steps and the state dict after the last one."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    state: dict[str, torch.Tensor]


def train_plainly(job: Job, cache: Path) -> Trained:
    """Trains ``job`` without Atoll's pipeline."""
    source, feed = open_source(job.model), open_feed(job, cache)
    module = initialised(source, feed, job.training.seed)
    optimizer = plain_optimizer(job, module)
    schedule = _schedule(job)
    losses: list[float] = []
    norms: list[float] = []
    for step in range(1, job.training.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        losses.append(_accumulate(module, feed.batch(StepNumber(step)), bf16=job.training.precision == "bf16"))
        norms.append(_clip(module, job.training.clip_norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state = source.state_module(module).state_dict()
    return Trained(losses=tuple(losses), norms=tuple(norms), state=state)


def initialised(source: ModelSource, feed: Feed, run_seed: int) -> nn.Module:
    """The job's module with a run's first values."""
    graph = trace(source.build(), feed.example_inputs(), feed.dynamic_dimensions)
    module = source.build_real()
    inner = source.state_module(module)
    tensors = dict(inner.named_parameters(remove_duplicate=False)) | dict(inner.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        specs: tuple[ParameterSpec | BufferSpec, ...] = (*graph.parameters, *graph.buffers)
        for spec in specs:
            if spec.initialisation is not None and spec.name in tensors:
                tensors[spec.name].copy_(initial_value(spec, run_seed))
    return module


def plain_optimizer(job: Job, module: nn.Module) -> torch.optim.Optimizer:
    """PyTorch's own, as the job says."""
    settings = job.training.optimizer
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if settings.name == "adamw":
        return torch.optim.AdamW(
            parameters, lr=1.0, betas=settings.betas, eps=settings.epsilon, weight_decay=settings.weight_decay, foreach=False
        )
    return torch.optim.SGD(
        parameters,
        lr=1.0,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
        foreach=False,
    )


def _schedule(job: Job) -> LearningRateSchedule:
    schedule = job.training.schedule
    return LearningRateSchedule(
        highest=job.training.optimizer.learning_rate,
        steps=job.training.steps,
        warmup=schedule.warmup,
        decay=schedule.decay,
        final=schedule.final,
    )


def _accumulate(module: nn.Module, batch: Batch, *, bf16: bool) -> float:
    total = whole = 0.0
    for microbatch in batch.microbatches:
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            result = module(**microbatch.inputs)
        loss = result[0] if isinstance(result, tuple) else result
        (loss * (microbatch.weight / batch.total_weight)).backward()
        total += microbatch.weight * float(loss.detach())
        whole += microbatch.weight
    return total / whole


def _clip(module: nn.Module, largest: float | None) -> float:
    squares = 0.0
    gradients = list(_gradients(module))
    for gradient in gradients:
        squares += float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
    norm = math.sqrt(squares)
    factor = clip_factor(norm, largest)
    if factor != 1.0:
        for gradient in gradients:
            gradient.mul_(factor)
    return norm


def _gradients(module: nn.Module) -> Iterator[torch.Tensor]:
    for parameter in module.parameters():
        if parameter.grad is not None:
            yield parameter.grad
