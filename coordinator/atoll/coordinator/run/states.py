"""The states of a run, which may follow which, and what a run is set to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from atoll.coordinator.run.absences import PatienceSettings
from atoll.coordinator.run.broken_links import BrokenLinkSettings
from atoll.coordinator.run.deadlines import Deadlines
from atoll.coordinator.run.restraint import RestraintSettings
from atoll.coordinator.run.schedule import LearningRateSchedule


class RunState(StrEnum):
    WAITING = "waiting"
    PLANNING = "planning"
    LOADING = "loading"
    TRAINING = "training"
    FINISHING = "finishing"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        return self in (RunState.FINISHED, RunState.STOPPED, RunState.FAILED)


class Phase(StrEnum):
    """What a training or finishing run is doing; IDLE in every other state."""

    IDLE = "idle"
    STEP = "step"
    EVALUATION = "evaluation"
    VOIDING = "voiding"
    STORING = "storing"
    KEEPING = "keeping"

    @property
    def open(self) -> bool:
        """Whether stages are computing."""
        return self in (Phase.STEP, Phase.EVALUATION)


_ENDED_EARLY = frozenset({RunState.STOPPED, RunState.FAILED})
TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    RunState.WAITING: frozenset({RunState.PLANNING, *_ENDED_EARLY}),
    RunState.PLANNING: frozenset({RunState.WAITING, RunState.LOADING, *_ENDED_EARLY}),
    RunState.LOADING: frozenset({RunState.WAITING, RunState.TRAINING, *_ENDED_EARLY}),
    RunState.TRAINING: frozenset({RunState.WAITING, RunState.LOADING, RunState.FINISHING, *_ENDED_EARLY}),
    RunState.FINISHING: frozenset({RunState.WAITING, RunState.FINISHED, *_ENDED_EARLY}),
    RunState.FINISHED: frozenset(),
    RunState.STOPPED: frozenset(),
    RunState.FAILED: frozenset(),
}

PHASES: dict[RunState, frozenset[Phase]] = {
    RunState.TRAINING: frozenset({Phase.STEP, Phase.EVALUATION, Phase.VOIDING, Phase.STORING}),
    RunState.FINISHING: frozenset({Phase.STORING, Phase.KEEPING}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """``evaluate_every`` None: never. ``evaluation_steps`` is how many steps' worth of samples an evaluation has at most;
    with ``evaluate_without_codecs`` each is done twice.
    A snapshot is taken every ``snapshot_every`` steps (None: as often as pays), and each part of it kept by ``copies`` more
    peers; with ``has_store`` it is put into the job's store as well.
    A step that is void ``max_voids`` times in a row, or stages that fail to load as often, end the run; faults of links between
    peers do not count, for these may come back. A peer that ran out of memory is planned with ``memory_factor`` of what it was
    to need, and left out after ``max_shortages`` such times."""

    steps: int
    schedule: LearningRateSchedule
    min_peers: int = 1
    largest_norm: float | None = None
    evaluate_every: int | None = None
    evaluation_steps: int = 1
    evaluate_without_codecs: bool = False
    max_voids: int = 3
    memory_factor: float = 0.8
    max_shortages: int = 5
    snapshot_every: int | None = None
    copies: int = 0
    has_store: bool = False
    patience: PatienceSettings = field(default_factory=PatienceSettings)
    links: BrokenLinkSettings = field(default_factory=BrokenLinkSettings)
    restraint: RestraintSettings = field(default_factory=RestraintSettings)
    deadlines: Deadlines = field(default_factory=Deadlines)
