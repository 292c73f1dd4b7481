"""What happens to a run, as the state machine is told: values without behaviour.

The shell (``server``) turns messages of peers, the operator's wishes and finished work of its own into these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from atoll.coordinator.events import StageSummary
from atoll.coordinator.planning.plan import Plan
from atoll.coordinator.planning.segments import PeerOffer
from atoll.coordinator.run.resuming import Held
from atoll.coordinator.run.snapshots import HeldPart
from atoll.protocol.ids import Generation, MicrobatchIndex, PeerId, StepNumber


class FaultKind(StrEnum):
    """What a peer says went wrong."""

    NOT_FINITE = "not finite"
    LINK = "link"
    CORRUPT = "corrupt"
    REFUSED_GRAPH = "refused graph"
    MEMORY = "memory"
    INTERNAL = "internal"
    OUTLIER = "outlier"


class StorePurpose(StrEnum):
    """Why the peers are asked for their weights."""

    FINISH = "finish"
    STOP = "stop"
    EXPORT = "export"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerJoined:
    """``held`` is what it still has in memory of this run, ``snapshots`` are the parts of this run's snapshots that it has on
    its disk, on which ``disk_bytes`` are free (0: not known); its owner lets it receive so many bytes a second (None: no
    limit)."""

    offer: PeerOffer
    held: Held | None = None
    snapshots: tuple[HeldPart, ...] = ()
    disk_bytes: int = 0
    download_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGone:
    """``left``: it said so; otherwise it was lost. It was last heard ``silent_seconds`` ago; ``may_return``: only silence tells
    that it is gone, so it may be there still."""

    peer: PeerId
    reason: str
    left: bool = False
    silent_seconds: float = 0.0
    may_return: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLeaving:
    """The peer is about to leave, once others have what it holds, for which it stays that long at most. ``removed``: it is the
    operator who wants that."""

    peer: PeerId
    reason: str
    hand_over_seconds: float
    removed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerProgressed:
    """What a peer does at the moment, and the peer it waits for, in its own words."""

    peer: PeerId
    phase: str
    waiting_for: PeerId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReady:
    """The model is traced. ``trainable`` are its trained parameters in the graph's order, ``changing`` all names whose state
    training changes."""

    trainable: tuple[str, ...]
    changing: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMade:
    """``names`` are, for each stage, the parameters and buffers that it holds. ``hasty``: the plan before, with others in the
    place of lost peers; nothing better was looked for."""

    generation: Generation
    plan: Plan
    summaries: tuple[StageSummary, ...]
    names: tuple[frozenset[str], ...]
    hasty: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksShown:
    """Probes have found the links of these pairs, which were taken for broken, in order."""

    pairs: frozenset[frozenset[PeerId]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRefused:
    """No plan for ``peers`` satisfies the limits; ``reason`` says by how much. ``hopeless``: whoever joins, there is none."""

    generation: Generation
    peers: tuple[PeerId, ...]
    reason: str
    hopeless: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveJudged:
    """The answer to ConsiderMove: a plan to change to, None where the present one is better kept; ``reason`` says why."""

    since: Generation
    reason: str
    look: int = 0
    proposed: PlanMade | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersCompared:
    """After a committed step: how many times longer than planned each stage's peer computes, by what was seen of late."""

    slowdowns: Mapping[PeerId, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningProgressed:
    """What is being done for the plan, as the rest of a sentence; empty: it is being computed."""

    generation: Generation
    doing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPrepared:
    """The feed has made the batch of a step. ``sample_ids`` has one entry a microbatch, as ``weights`` has."""

    step: StepNumber
    evaluation: bool
    weights: tuple[float, ...]
    num_tokens: int
    samples: str
    sample_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReady:
    """``fetched_bytes`` of its state came from other peers, in ``fetch_seconds``."""

    peer: PeerId
    generation: Generation
    fetched_bytes: int = 0
    fetch_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchLoss:
    microbatch: MicrobatchIndex
    loss: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReported:
    """A stage has done all microbatches of a step; ``squared_norms`` of the parameters whose gradients it answers for."""

    peer: PeerId
    generation: Generation
    step: StepNumber
    evaluation: bool
    losses: tuple[MicrobatchLoss, ...]
    squared_norms: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultReported:
    peer: PeerId
    generation: Generation
    step: StepNumber
    fault: FaultKind
    reason: str
    accused: PeerId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerVoided:
    """The peer has dropped the void step and works under ``generation`` now."""

    peer: PeerId
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMoved:
    """A tensor of the peer's state was sent or has arrived: the transfer is not stuck."""

    peer: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStored:
    """All of the peer's state has arrived."""

    peer: PeerId
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTaken:
    """A peer has what it holds of a step on its disk, ``names`` and all; or not, for the reason in ``failure``."""

    peer: PeerId
    step: StepNumber
    names: frozenset[str] = frozenset()
    num_bytes: int = 0
    stalled_seconds: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHolds:
    """What the store has of this run: at the beginning, and after every attempt to put more into it."""

    parts: tuple[HeldPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCopied:
    """A peer has a copy of what ``source`` has on its disk of a step; or not, for the reason in ``failure``."""

    peer: PeerId
    step: StepNumber
    source: PeerId
    names: frozenset[str] = frozenset()
    num_bytes: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsWritten:
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportAsked:
    """The operator wants the weights of the last committed step in a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanAsked:
    """The operator wants to know whether a better plan is worth a move, and the move made if so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """``keep_weights``: the operator stops the run, after the step that runs and with its weights written, where there are
    trained ones; otherwise it is interrupted, and ends now."""

    reason: str
    keep_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFailed:
    """Something of the coordinator's own failed: a full disk, data that cannot be read, a model that cannot be traced."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


RunEvent: TypeAlias = (
    PeerJoined
    | PeerGone
    | PeerLeaving
    | PeerProgressed
    | GraphReady
    | PlanMade
    | PlanRefused
    | LinksShown
    | MoveJudged
    | PeersCompared
    | PlanningProgressed
    | BatchPrepared
    | PeerReady
    | StageReported
    | FaultReported
    | PeerVoided
    | StateMoved
    | PeerStored
    | SnapshotTaken
    | SnapshotCopied
    | StoreHolds
    | WeightsWritten
    | ExportAsked
    | ReplanAsked
    | StopAsked
    | WorkFailed
    | Tick
)
