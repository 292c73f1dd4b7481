"""What goes into a peer's computing and what comes out of it: values, passed between the loop and the compute thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from atoll.peer.faults import Fault
from atoll.peer.stage.boundaries import Boundaries
from atoll.peer.stage.timeline import Span
from atoll.peer.stage.work_seconds import WorkSeconds
from atoll.protocol.assignment import Assignment
from atoll.protocol.ids import Generation, MicrobatchIndex, PeerId, StageIndex, StepNumber
from atoll.protocol.messages import Message, MessageKey

# --- commands: from the session to computing ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """A new stage, as the bytes of an Assignment; what was there before is dropped, unless it was kept. Answered by Accepted
    or Faulted."""

    generation: Generation
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialise:
    """Complete the accepted stage: from what is kept here, what is ``given``, and first values. Answered by Loaded or
    Faulted."""

    generation: Generation
    given: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A message from a neighbour, or from the coordinator (``sender`` None)."""

    sender: PeerId | None
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """Stage ``target`` has taken the activation of this key."""

    key: MessageKey


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginStep:
    generation: Generation
    step: StepNumber
    num_microbatches: int
    evaluation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """What GradientsReady asked for: the same gradients, summed over the replicas of this stage."""

    generation: Generation
    step: StepNumber
    gradients: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitStep:
    """With ``snapshot``, answered by SnapshotWritten when the state after it is on the disk, or why it is not."""

    generation: Generation
    step: StepNumber
    clip_factor: float
    learning_rate: float
    snapshot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VoidStep:
    """Drop whatever the step did; go on under ``next_generation``. Answered by StepVoided."""

    generation: Generation
    step: StepNumber
    next_generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOutState:
    """Answered by StateReady. Commits wait until HandedOut, so that what is read belongs to one step."""

    generation: Generation
    step: StepNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOut:
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A MEASUREMENT message. Answered by Measured, whatever happens."""

    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepState:
    """The plan is over: drop the stage and keep its state as of the committed ``step``, for a later stage of this peer and for
    ``borrowers``. Answered by StateKept or Faulted."""

    generation: Generation
    step: StepNumber
    borrowers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropState:
    """What was kept or held is of no use any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldState:
    """The coordinator is gone. Drop the open step, unless it was reported: then its commit may still come. Hold on to the
    stage and to what was kept. Answered by StateHeld."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSnapshot:
    """Write the state of the last committed step to the disk, be it a stage's or kept. Answered by SnapshotWritten."""


Command: TypeAlias = (
    Assign
    | Initialise
    | Arrived
    | Delivered
    | BeginStep
    | Summed
    | CommitStep
    | VoidStep
    | HandOutState
    | HandedOut
    | Measure
    | KeepState
    | DropState
    | WriteSnapshot
    | HoldState
)

# --- notices: from computing to the session ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The assignment passed validation."""

    generation: Generation
    assignment: Assignment
    boundaries: Boundaries


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchLoss:
    microbatch: MicrobatchIndex
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A step is done here and waits for its commit (an evaluation is over)."""

    generation: Generation
    step: StepNumber
    evaluation: bool
    losses: tuple[MicrobatchLoss, ...]
    squared_norms: Mapping[str, float]
    compute_seconds: float
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsReady:
    """This replica has done its share of a step: its ``gradients`` (on the host, in an order that all replicas have) are to be
    summed with the others'. They do not change before Summed."""

    generation: Generation
    step: StepNumber
    gradients: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVoided:
    next_generation: Generation
    step: StepNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReady:
    generation: Generation
    step: StepNumber
    items: Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKept:
    """``state`` is by the names of ``atoll.protocol.state``. It does not change before the next commit."""

    generation: Generation
    step: StepNumber
    borrowers: tuple[PeerId, ...]
    state: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHeld:
    """``names`` are the parameters and buffers whose state is here as of the committed ``step``. ``reported_step``, if not 0,
    is the step after it, whose gradients wait for the commit."""

    step: StepNumber
    reported_step: StepNumber
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """A neighbour's message has been used: it may send another of its kind."""

    sender: PeerId
    key: MessageKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulted:
    """Something went wrong; with ``fatal`` the stage's state can no longer be trusted and the peer must end."""

    generation: Generation
    step: StepNumber
    fault: Fault
    fatal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a kind of segment takes here, from now or from the ``cached`` past; or the ``failure`` why that is not known, among
    them that the owner ``declared`` the peer's speed."""

    kind: str
    seconds: WorkSeconds | None = None
    cached: bool = False
    failure: str = ""
    declared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotWritten:
    """The state of a committed ``step`` is on the disk, or the ``failure`` why it is not. ``stalled_seconds`` is for how long
    computing waited for it."""

    step: StepNumber
    failure: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    stalled_seconds: float = 0.0
    names: tuple[str, ...] = ()


Notice: TypeAlias = (
    Accepted
    | Loaded
    | Reported
    | GradientsReady
    | StepVoided
    | StateReady
    | StateKept
    | StateHeld
    | Consumed
    | Faulted
    | Measured
    | SnapshotWritten
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeProgress:
    """What computing is at, for people and for the coordinator's watch; ``count`` grows with each piece of work."""

    generation: Generation
    step: StepNumber
    phase: str = "idle"
    waiting_for: PeerId | None = None
    stage: StageIndex | None = None
    count: int = 0
