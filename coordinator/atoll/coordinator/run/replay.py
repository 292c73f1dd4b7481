"""A step that was done again beside what the journal has of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.coordinator.events import ReplayedEvent
from atoll.coordinator.run.instructions import WriteCommit


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """What the journal has of a step, as far as doing it again must give the same."""

    loss: float
    grad_norm: float
    samples: str


def compare(again: WriteCommit, journaled: CommittedStep) -> ReplayedEvent:
    """What to tell of it."""
    found = CommittedStep(loss=again.loss, grad_norm=again.grad_norm, samples=again.samples)
    return ReplayedEvent(step=again.step, loss=again.loss, seconds=again.seconds, equal=found == journaled)


def is_alarming(again: WriteCommit, journaled: CommittedStep, *, lossless: bool) -> bool:
    """Whether a step that is not equal should not have become so: with other samples, or though its links lost nothing."""
    return lossless or again.samples != journaled.samples


def difference(again: WriteCommit, journaled: CommittedStep) -> str:
    """What is not the same, in a sentence; only for steps that are not equal."""
    if again.samples != journaled.samples:
        return f"step {again.step} was done again with other samples than the first time: the data has changed meanwhile"
    return (
        f"step {again.step}, done again, has loss {again.loss!r} and gradient norm {again.grad_norm!r}, and had "
        f"{journaled.loss!r} and {journaled.grad_norm!r}: due to codecs that lose bits, or a device that sums in any order"
    )
