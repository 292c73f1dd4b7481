"""The learning rate of each step, and the factor that clips the gradient. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSchedule:
    """A linear warm-up over ``warmup`` steps, then a decay that reaches ``final`` times the highest rate at step ``steps``."""

    highest: float
    steps: int
    warmup: int = 0
    decay: Literal["cosine", "linear", "constant"] = "constant"
    final: float = 0.0

    def rate(self, step: int) -> float:
        """The learning rate of step ``step``, counted from 1."""
        if step < self.warmup:
            return self.highest * step / self.warmup
        if self.decay == "constant" or self.steps <= self.warmup:
            return self.highest
        progress = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        left = 0.5 * (1.0 + math.cos(math.pi * progress)) if self.decay == "cosine" else 1.0 - progress
        return self.highest * (self.final + (1.0 - self.final) * left)


def clip_factor(norm: float, largest: float | None) -> float:
    """What gradients of global norm ``norm`` are multiplied by so that their norm is at most ``largest``; 1.0 when it is."""
    if largest is None:
        return 1.0
    # As torch.nn.utils.clip_grad_norm_ has it, so that a plain loop clips alike.
    return min(1.0, largest / (norm + 1e-6))
