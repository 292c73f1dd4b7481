"""What the state machine wants done, in order. The shell does each before it looks at the next: a commit is in the journal
before any peer hears of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from atoll.coordinator.events import Event
from atoll.coordinator.planning.plan import Plan
from atoll.coordinator.planning.segments import PeerOffer
from atoll.coordinator.run.copies import Copy
from atoll.coordinator.run.events import StorePurpose
from atoll.coordinator.run.resuming import Committed
from atoll.coordinator.run.snapshots import Moment, Part
from atoll.protocol.ids import Generation, PeerId, StepNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class MakePlan:
    """Place the stages on these peers; answered by PlanMade or PlanRefused. May be done in the background. The peers of a pair
    in ``broken`` must not be neighbours, unless, where ``probed`` says so, a probe finds the link in order; then LinksShown
    comes first. Nor must one of such a pair need state from the other: ``holders`` have it, in the stages of ``previous``,
    and those of ``on_disks`` in snapshots. ``at_once``: a peer of ``previous`` was lost; somebody takes its place without
    anything being measured first, if anybody can."""

    generation: Generation
    peers: tuple[PeerOffer, ...]
    broken: frozenset[frozenset[PeerId]] = frozenset()
    probed: bool = False
    previous: Plan | None = None
    holders: Mapping[str, tuple[PeerId, ...]] = field(default_factory=dict)
    on_disks: Mapping[str, tuple[PeerId, ...]] = field(default_factory=dict)
    steps_left: int = 1
    at_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyPeers:
    """Measure what is not known yet of these peers and the links between them, beside training: so that nobody has to wait for
    it when one of them is needed. Has no answer."""

    peers: tuple[PeerOffer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsiderMove:
    """Find out, while training goes on, whether changing from ``plan`` to a better one on these peers pays; answered by
    MoveJudged. A later ``look`` takes the place of an earlier one."""

    since: Generation
    plan: Plan
    peers: tuple[PeerOffer, ...]
    steps_left: int
    look: int = 0
    broken: frozenset[frozenset[PeerId]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """Write the plan to the journal, have whoever holds state of the committed step keep and lend it, and send each peer of the
    plan its stage. Of each name, ``holders`` says who holds its state in memory, ``on_disks`` who has it in a snapshot of that
    step. ``stale`` are peers without a stage that hold state of a step which the run has left. The peers of a pair in
    ``broken`` cannot give each other any state."""

    generation: Generation
    plan: Plan
    committed: StepNumber = StepNumber(0)  # noqa: RUF009 - an int at run time
    holders: Mapping[str, tuple[PeerId, ...]] = field(default_factory=dict)
    on_disks: Mapping[str, tuple[PeerId, ...]] = field(default_factory=dict)
    stale: tuple[PeerId, ...] = ()
    broken: frozenset[frozenset[PeerId]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseState:
    """A step is committed under a new plan: these peers, which have no stage in it, need not keep state any longer."""

    generation: Generation
    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendBatches:
    """Make the microbatches of a step and send them; answered by BatchPrepared. In the background, one after the other."""

    generation: Generation
    step: StepNumber
    evaluation: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StartStep:
    """``without_codecs``: nothing that crosses a link may lose bits."""

    generation: Generation
    step: StepNumber
    evaluation: bool
    without_codecs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCommit:
    """Write to the journal that the step is committed, with what makes it reproducible."""

    generation: Generation
    step: StepNumber
    loss: float
    grad_norm: float
    clip_factor: float
    learning_rate: float
    seconds: float
    num_tokens: int
    samples: str
    sample_ids: tuple[tuple[int, ...], ...]

    def without_samples(self) -> Committed:
        """What the run remembers of it."""
        return Committed(
            step=self.step,
            generation=self.generation,
            loss=self.loss,
            grad_norm=self.grad_norm,
            clip_factor=self.clip_factor,
            learning_rate=self.learning_rate,
            seconds=self.seconds,
            num_tokens=self.num_tokens,
            samples=self.samples,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReplay:
    """A step that the journal has was done again: compare it, and tell the outside."""

    commit: WriteCommit


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCommit:
    """Tell ``peers``, all of which have reported the step under ``generation``; ``snapshot``: they write the state after it to
    their disks."""

    peers: tuple[PeerId, ...]
    generation: Generation
    step: StepNumber
    clip_factor: float
    learning_rate: float
    snapshot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteSnapshot:
    """Write down how a snapshot stands: ordered at first, then complete, then safe."""

    moment: Moment
    complete: bool = False
    safe: bool = False
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NotePart:
    """Write down that a peer has this on its disk."""

    peer: PeerId
    part: Part


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySnapshot:
    """Have a peer copy what another one has on its disk; answered by SnapshotCopied."""

    step: StepNumber
    copy: Copy


@dataclass(frozen=True, slots=True, kw_only=True)
class FillStore:
    """Put a snapshot into the job's store: for each name, ``holders`` says who has it on its disk. In the background; answered
    by StoreHolds."""

    step: StepNumber
    holders: Mapping[str, tuple[PeerId, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSnapshots:
    """Every peer that is here keeps the snapshots of these steps and deletes all others; so does the journal."""

    steps: tuple[StepNumber, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendVoid:
    generation: Generation
    step: StepNumber
    next_generation: Generation
    reason: str
    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskStore:
    """Open the file of weights and ask each stage's peer for its state."""

    generation: Generation
    step: StepNumber
    purpose: StorePurpose


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseWeights:
    """All state is here: complete the file; answered by WeightsWritten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpelPeer:
    """End the session of a peer that is counted as lost, so that it must join anew."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LetGo:
    """The run needs nothing more of a peer that leaves, or that the operator removed: end its session with that word."""

    peer: PeerId
    reason: str
    removed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseHandOver:
    """Tell these peers, which leave, that nobody can take what they hold."""

    peers: tuple[PeerId, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Tell the outside."""

    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    """Tell every peer that the run is over. Nothing follows. ``stopped``: its operator wanted it so before its last step."""

    finished: bool
    stopped: bool = False
    reason: str


Instruction: TypeAlias = (
    MakePlan
    | SurveyPeers
    | ConsiderMove
    | Assign
    | ReleaseState
    | SendBatches
    | StartStep
    | WriteCommit
    | CheckReplay
    | SendCommit
    | NoteSnapshot
    | NotePart
    | CopySnapshot
    | FillStore
    | KeepSnapshots
    | SendVoid
    | AskStore
    | CloseWeights
    | ExpelPeer
    | LetGo
    | RefuseHandOver
    | Announce
    | EndRun
)
