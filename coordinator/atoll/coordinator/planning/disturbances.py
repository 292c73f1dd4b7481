"""What a simulated step may suffer: works and messages that take longer or shorter, and seats that stand still. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.coordinator.planning.pipeline import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """Works take longer or shorter by a log-normal factor with median 1; ``compute`` and ``network`` are its sigma."""

    compute: float = 0.0
    network: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """Seat ``stage`` computes nothing from ``start_seconds`` on, for ``seconds``; what it was doing takes that much
    longer."""

    stage: int
    start_seconds: float
    seconds: float


class Disturbances:
    """Jitter and outages of one step; without either, everything takes what it takes."""

    def __init__(self, pipeline: Pipeline, jitter: Jitter | None, outages: tuple[Outage, ...]) -> None:
        chosen = jitter or Jitter()
        self._outages = sorted(outages, key=lambda outage: outage.start_seconds)
        self._compute = _factors(chosen.compute, (chosen.seed, 0), 3 * len(pipeline.stages), pipeline.num_microbatches)
        num_sums = sum(group.num_replicas * (group.num_replicas - 1) for group in pipeline.groups if group is not None)
        num_connections = 2 * len(pipeline.links) + len(pipeline.exchanges) + num_sums
        messages = max(2, pipeline.num_microbatches) if num_sums else pipeline.num_microbatches
        self._network = _factors(chosen.network, (chosen.seed, 1), num_connections, messages)
        self._num_stages = len(pipeline.stages)
        self.calm = self._compute is None and not outages

    @property
    def calm_network(self) -> bool:
        """Whether every message takes its own time."""
        return self._network is None

    def seconds(self, seconds: float, *, kind: int, stage: int, microbatch: int) -> float:
        """What a work (``kind`` 0 forward, 1 backward, 2 accumulate) of ``seconds`` takes."""
        if self._compute is None:
            return seconds
        return seconds * float(self._compute[kind * self._num_stages + stage, microbatch])

    def standstill(self, stage: int, start: float, end: float) -> float:
        """For how long the stage stands still while it does a work from ``start`` that would end at ``end``."""
        total = 0.0
        for outage in self._outages:
            over = outage.start_seconds + outage.seconds
            if outage.stage == stage and outage.start_seconds < end + total and start < over:
                total += over - max(start, outage.start_seconds)
        return total

    def stretch(self, connection: int, microbatch: int) -> float:
        """How many times longer a message takes on the wire."""
        return 1.0 if self._network is None else float(self._network[connection, microbatch])


def _factors(sigma: float, seed: tuple[int, int], rows: int, columns: int) -> np.ndarray | None:
    if sigma == 0.0:
        return None
    return np.exp(sigma * np.random.default_rng(seed).standard_normal((rows, columns)))
