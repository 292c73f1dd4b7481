"""From the stages' reports of a step to its loss, its gradient norm and its clipping factor. Pure.

Sums run in an order that no placement changes: losses by microbatch, squared norms by the graph's list of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.coordinator.run.events import MicrobatchLoss, StageReported
from atoll.coordinator.run.schedule import clip_factor
from atoll.protocol.ids import PeerId

NORM_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a complete step came to; ``metrics`` are means, weighted as the loss is."""

    loss: float
    metrics: Mapping[str, float]
    grad_norm: float
    clip_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Why the reports make no step, and whose report it was (None: no single one's)."""

    peer: PeerId | None
    reason: str


def reckon(
    stages: Sequence[Sequence[StageReported]], weights: Sequence[float], trainable: Sequence[str], largest_norm: float | None
) -> StepOutcome | Blame:
    """The outcome of a step of which every replica of every stage has reported; ``weights`` are those of its microbatches.
    Replicas have the same gradients, so the norms of the first one count."""
    losses: list[MicrobatchLoss] = []
    norms: dict[str, float] = {}
    reports = [report for replicas in stages for report in replicas]
    for report in reports:
        losses += report.losses
    for report, *others in stages:
        apart = next((other for other in others if _differ(report, other)), None)
        if apart is not None:
            return Blame(peer=apart.peer, reason=f"its gradients are not those of {report.peer}, a replica of the same stage")
        for name, value in report.squared_norms:
            if name in norms:
                return Blame(peer=report.peer, reason=f"it reported the gradient norm of {name}, as another stage did")
            if not (math.isfinite(value) and value >= 0.0):
                return Blame(peer=report.peer, reason=f"the gradient of {name} is not finite")
            norms[name] = value
    unknown = norms.keys() - set(trainable)
    if unknown:
        culprit = next(report.peer for report in reports for name, _ in report.squared_norms if name in unknown)
        return Blame(peer=culprit, reason=f"it reported the gradient norm of {min(unknown)}, which is not trained")
    losses.sort(key=lambda entry: entry.microbatch)
    wrong = _wrong_losses(reports, losses, len(weights))
    if wrong is not None:
        return wrong
    total = 0.0
    for name in trainable:
        total += norms.get(name, 0.0)
    norm = math.sqrt(total)
    if not math.isfinite(norm):
        return Blame(peer=None, reason="the norm of the whole gradient is not finite")
    return StepOutcome(
        loss=_mean([entry.loss for entry in losses], weights),
        metrics=_means(losses, weights),
        grad_norm=norm,
        clip_factor=clip_factor(norm, largest_norm),
    )


def _differ(one: StageReported, other: StageReported) -> bool:
    """Whether two replicas, which summed the same gradients, have come to different ones: processors differ in the last bits of
    a norm at most."""
    ours, theirs = dict(one.squared_norms), dict(other.squared_norms)
    if ours.keys() != theirs.keys():
        return True
    return not all(math.isclose(ours[name], theirs[name], rel_tol=NORM_TOLERANCE) for name in ours)


def _wrong_losses(reports: Sequence[StageReported], losses: Sequence[MicrobatchLoss], num_microbatches: int) -> Blame | None:
    source = next((report.peer for report in reports if report.losses), None)
    if [entry.microbatch for entry in losses] != list(range(num_microbatches)):
        return Blame(
            peer=source, reason=f"it reported {len(losses)} losses, not one for each of {num_microbatches} microbatches"
        )
    for entry in losses:
        if not math.isfinite(entry.loss):
            return Blame(peer=source, reason=f"the loss of microbatch {entry.microbatch} is not finite")
    return None


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    # Plain additions, not sum(): newer Pythons compensate there, and a run must not depend on Python's version.
    total = whole = 0.0
    for value, weight in zip(values, weights, strict=True):
        total += weight * value
        whole += weight
    return total / whole


def _means(losses: Sequence[MicrobatchLoss], weights: Sequence[float]) -> dict[str, float]:
    names = set(losses[0].metrics).intersection(*(entry.metrics for entry in losses))
    return {name: _mean([entry.metrics[name] for entry in losses], weights) for name in sorted(names)}
