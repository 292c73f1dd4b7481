"""What a run with local steps must come to: one module a replica, trained by plain PyTorch loops in this process, and an outer
step by PyTorch's own SGD on what came of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from atoll.coordinator.data.feed import Batch, Feed, Microbatch
from atoll.coordinator.data.opening import open_feed
from atoll.coordinator.learning_rates import InnerRates
from atoll.coordinator.planning.dealing import deal
from atoll.coordinator.tracing.source import open_source
from atoll.protocol.ids import StepNumber
from atoll.protocol.job import Job
from support.reference import Trained, initialised, plain_optimizer


def train_with_local_steps(job: Job, cache: Path, replicas: Sequence[int]) -> Trained:
    """Trains ``job`` with so many ``replicas`` of the whole model in each of its steps; losses and weights as a run's."""
    source, feed = open_source(job.model), open_feed(job, cache)
    module = initialised(source, feed, job.training.seed)
    averaging = job.averaging
    outer = torch.optim.SGD(
        [parameter for parameter in module.parameters() if parameter.requires_grad],
        lr=averaging.outer_learning_rate,
        momentum=averaging.outer_momentum,
        nesterov=averaging.outer_momentum > 0.0,
        foreach=False,
    )
    losses = [_step(job, module, feed, outer, StepNumber(step + 1), count) for step, count in enumerate(replicas)]
    return Trained(losses=tuple(losses), norms=(), state=source.state_module(module).state_dict())


def _step(job: Job, module: nn.Module, feed: Feed, outer: torch.optim.Optimizer, step: StepNumber, count: int) -> float:
    batch = feed.batch(step)
    dealt = deal([1.0] * count, len(batch.microbatches))
    changes: list[list[torch.Tensor]] = []
    losses: dict[int, float] = {}
    for replica in range(count):
        inner = copy.deepcopy(module)
        own = [microbatch for microbatch in batch.microbatches if dealt[microbatch.index] == replica]
        share = _inner_steps(job, inner, own, batch, step, losses)
        pairs = zip(module.parameters(), inner.parameters(), strict=True)
        changes.append([(before.detach() - after.detach()) * share for before, after in pairs])
    for parameter, *parts in zip(module.parameters(), *changes, strict=True):
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        parameter.grad = total
    outer.step()
    outer.zero_grad(set_to_none=True)
    total_loss = weight = 0.0
    for microbatch in batch.microbatches:
        total_loss += microbatch.weight * losses[microbatch.index]
        weight += microbatch.weight
    return total_loss / weight


def _inner_steps(
    job: Job, module: nn.Module, own: list[Microbatch], batch: Batch, step: StepNumber, losses: dict[int, float]
) -> float:
    """One replica's way through its microbatches; returns its share of the step."""
    optimizer, rates = plain_optimizer(job, module), InnerRates(job)
    size = job.training.num_microbatches // job.averaging.local_steps
    share = 0.0
    for inner in range(job.averaging.local_steps):
        part = [microbatch for microbatch in own if microbatch.index // size == inner]
        weight = 0.0
        for microbatch in part:
            result = module(**microbatch.inputs)
            loss = result[0] if isinstance(result, tuple) else result
            scale = microbatch.weight / batch.total_weight
            (loss * scale).backward()
            weight += scale
            losses[microbatch.index] = float(loss.detach())
        if not part:
            continue
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / weight)
        for group in optimizer.param_groups:
            group["lr"] = rates.of(step, part[0].index)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        share += weight
    return share
