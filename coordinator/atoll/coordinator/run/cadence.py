"""Every how many steps a snapshot is taken. Pure.

Taking one costs some training, and the more rarely it is done the more steps are done again after a loss. The best time between
two is Young's, in Daly's better approximation: with a cost of C seconds and a loss every M seconds, about sqrt(2 C M)
(J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006). Both are measured; until a
loss was seen, one an hour is expected, and that expectation weighs as much as one hour of watching.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

EXPECTED_SECONDS = 3600.0
"""Between two losses, before any was seen."""
LEAST_COST_SHARE = 0.02
"""Of a step: what a snapshot costs at least, for reading the state and writing it take processor and memory from computing even
where no wait for it is seen."""
FIRST_STEP = 2
"""The first snapshot shows what one costs; the very first step pays for buffers and caches, and would spoil that."""
REMEMBERED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What snapshots have cost of late and what a step takes, in seconds; None: not seen yet."""

    snapshot_seconds: float | None
    step_seconds: float


def best_interval_seconds(cost_seconds: float, between_losses_seconds: float) -> float:
    """The time to train between two snapshots that wastes least, by Daly."""
    if cost_seconds >= 2.0 * between_losses_seconds:
        return between_losses_seconds
    ratio = cost_seconds / (2.0 * between_losses_seconds)
    first = math.sqrt(2.0 * cost_seconds * between_losses_seconds)
    return first * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost_seconds


def best_steps(costs: Costs, between_losses_seconds: float) -> int:
    """The number of steps between two snapshots, at least 1."""
    if costs.snapshot_seconds is None or costs.step_seconds <= 0.0:
        return FIRST_STEP
    cost = max(costs.snapshot_seconds, LEAST_COST_SHARE * costs.step_seconds)
    return max(1, round(best_interval_seconds(cost, between_losses_seconds) / costs.step_seconds))


class Cadence:
    """``every``: the number of steps that the job asks for, None to find the best one. Told of steps, losses and costs."""

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._costs: deque[float] = deque(maxlen=REMEMBERED)
        self._trained_seconds = 0.0
        self._num_losses = 0

    def trained(self, seconds: float) -> None:
        """A step was done that took so long."""
        self._trained_seconds += seconds

    def lost(self) -> None:
        """A peer that held a stage was lost."""
        self._num_losses += 1

    def cost(self, seconds: float) -> None:
        """By how much a snapshot has held training up."""
        self._costs.append(max(0.0, seconds))

    @property
    def between_losses_seconds(self) -> float:
        return (EXPECTED_SECONDS + self._trained_seconds) / (1 + self._num_losses)

    def steps(self, step_seconds: float) -> int:
        """Between two snapshots."""
        if self._every is not None:
            return self._every
        cost = statistics.median(self._costs) if self._costs else None
        return best_steps(Costs(snapshot_seconds=cost, step_seconds=step_seconds), self.between_losses_seconds)
