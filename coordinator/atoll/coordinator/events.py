"""What a run tells the outside: the events of ``--json``, of ``metrics.jsonl`` and of the live view.

Names and keys are a contract with users' scripts; add keys freely, never rename one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Root of all events; ``kind`` is the value of the key ``event``."""

    kind: ClassVar[str] = ""

    def as_dict(self) -> dict[str, Any]:
        """The event as it is written to JSON, ``event`` first."""
        return {"event": self.kind, **dataclasses.asdict(self)}

    def to_json(self, **more: float) -> str:
        """One line of JSON; floats as Python prints them, a value that is not finite as null; ``more`` are further keys."""
        return json.dumps(_finite({**self.as_dict(), **more}), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEvent(Event):
    """``state``: joined, loading, ready, spare, left, lost."""

    kind: ClassVar[str] = "peer"
    name: str
    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """``first`` and ``last`` are module paths; ``parameters`` counts elements."""

    stage: int
    peers: tuple[str, ...]
    first: str
    last: str
    parameters: int
    predicted_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEvent(Event):
    """``bottleneck`` is a sentence about what will hold the pipeline back, ``microbatch`` the samples in a microbatch."""

    kind: ClassVar[str] = "plan"
    generation: int
    stages: tuple[StageSummary, ...]
    predicted_step_seconds: float
    bottleneck: str = ""
    microbatch: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent(Event):
    """A committed step; ``samples`` is a hash of its sample ids, ``metrics`` what the model returns beside its loss."""

    kind: ClassVar[str] = "step"
    step: int
    loss: float
    tokens: int
    tokens_per_second: float
    seconds: float
    learning_rate: float
    grad_norm: float
    generation: int
    samples: str
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class VoidEvent(Event):
    kind: ClassVar[str] = "void"
    step: int
    reason: str
    peer: str
    stage: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedEvent(Event):
    """The plan was changed after ``step``, and the stages have their state: ``bytes`` of it changed hands, the rest was where
    it is needed. Training stood still for ``seconds``, of which the slowest peer fetched for ``fetch_seconds``; ``reason`` says
    why the plan was changed."""

    kind: ClassVar[str] = "moved"
    generation: int
    step: int
    bytes: int
    seconds: float
    fetch_seconds: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotEvent(Event):
    """The state after ``step`` is on peers' disks, as a whole: ``bytes`` of it, without copies, ``seconds`` after the
    step's commit; computing waited ``stalled_seconds`` for it. With a ``failure`` a part or a copy of it could not be made."""

    kind: ClassVar[str] = "snapshot"
    step: int
    bytes: int
    seconds: float
    stalled_seconds: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredEvent(Event):
    """The run stood at ``from_step``, what was learned was lost with a peer, and the stages have the state after ``step`` now
    (0: the first values): ``bytes`` of it came from other peers. Training stood still for ``seconds``."""

    kind: ClassVar[str] = "restored"
    step: int
    from_step: int
    reason: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedEvent(Event):
    """A committed step was done again, on the way from a snapshot to where the run was; ``equal``: loss, gradient norm and
    samples are those of the journal, bit for bit."""

    kind: ClassVar[str] = "replayed"
    step: int
    loss: float
    seconds: float
    equal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredEvent(Event):
    """``step`` is the first that was committed after a loss; ``seconds`` passed since the lost peer was last heard. Of these:
    until its loss was noticed, from then until the last plan, until all stages had their state, until ``replayed_steps`` steps
    were done again, and until the new step was committed."""

    kind: ClassVar[str] = "recovered"
    step: int
    reason: str
    replayed_steps: int
    noticed_seconds: float
    planned_seconds: float
    moved_seconds: float
    replayed_seconds: float
    step_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEvent(Event):
    """``loss_without_codecs`` is what the loss was with links that lose nothing, where the job asks for it."""

    kind: ClassVar[str] = "evaluation"
    step: int
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    loss_without_codecs: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEvent(Event):
    """Totals since the peers started; ``direction`` is forward or backward. ``raw_bytes`` is what would have crossed without a
    codec. Of the present codec: the ``relative_error`` of what crosses, and, of activations, the part of the loss that it is
    estimated to cost (``damage``, None while that is not known)."""

    kind: ClassVar[str] = "link"
    source: str
    target: str
    direction: str
    codec: str
    bytes: int
    seconds_busy: float
    relative_error: float
    raw_bytes: int = 0
    damage: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementEvent(Event):
    """What the planner counts on; ``what`` is segments (the seconds are those of the whole model on ``peer``, for one
    microbatch, the update once a step) or link (from ``peer`` to ``target``). ``estimated``: it could not be measured, and
    ``reason`` says why."""

    kind: ClassVar[str] = "measurement"
    what: str
    peer: str
    target: str = ""
    estimated: bool
    reason: str = ""
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    accumulate_seconds: float | None = None
    update_seconds: float | None = None
    bytes_per_second: float | None = None
    round_trip_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionEvent(Event):
    """A prediction of the plan beside what was measured; ``what`` is step_seconds; of ``peer`` memory_bytes or, in a step,
    compute_seconds; from ``peer`` to ``target`` bytes_per_second or, in a step, transfer_seconds."""

    kind: ClassVar[str] = "prediction"
    what: str
    peer: str
    predicted: float
    measured: float
    target: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PausedEvent(Event):
    """The run cannot go on for now, and what it lacks."""

    kind: ClassVar[str] = "paused"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedEvent(Event):
    kind: ClassVar[str] = "resumed"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedEvent(Event):
    """``weights`` is the path of the safetensors file."""

    kind: ClassVar[str] = "finished"
    steps: int
    loss: float
    seconds: float
    tokens_per_second: float
    weights: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedEvent(Event):
    """The operator ended the run before its last step."""

    kind: ClassVar[str] = "stopped"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedEvent(Event):
    kind: ClassVar[str] = "failed"
    reason: str
