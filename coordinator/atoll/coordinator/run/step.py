"""The step that is being run: which stages have reported, and what is still missing. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.coordinator.planning.plan import Plan
from atoll.coordinator.run.events import BatchPrepared, StageReported
from atoll.coordinator.run.reckoning import Blame, StepOutcome, reckon
from atoll.protocol.ids import Generation, PeerId, StepNumber


class OpenStep:
    """One attempt at one step, or at the evaluation after it, under one generation."""

    def __init__(self, step: StepNumber, generation: Generation, plan: Plan, *, evaluation: bool, started: float) -> None:
        self.step = step
        self.generation = generation
        self.evaluation = evaluation
        self.started = started
        self.peers = plan.peers
        self._groups = tuple(stage.replicas for stage in plan.stages)
        self._reports: dict[PeerId, StageReported] = {}

    @property
    def missing(self) -> tuple[PeerId, ...]:
        """The peers that have not reported, in stage order."""
        return tuple(peer for peer in self.peers if peer not in self._reports)

    def add(self, report: StageReported) -> None:
        """Take a report; one of another step or generation, of a peer without a stage, or a second one is nothing to us."""
        same = (report.generation, report.step, report.evaluation) == (self.generation, self.step, self.evaluation)
        if same and report.peer in self.peers:
            self._reports.setdefault(report.peer, report)

    def outcome(self, batch: BatchPrepared, trainable: Sequence[str], largest_norm: float | None) -> StepOutcome | Blame:
        """What the step came to; all peers must have reported."""
        stages = [[self._reports[peer] for peer in replicas] for replicas in self._groups]
        return reckon(stages, batch.weights, trainable, largest_norm)
