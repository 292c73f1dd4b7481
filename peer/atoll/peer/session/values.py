"""A session's states, and what it takes in and gives out: events, besides the coordinator's messages, and
instructions to the shell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import torch

from atoll.peer.faults import Fault
from atoll.peer.stage.boundaries import Boundaries
from atoll.peer.stage.events import Command, GradientsReady, Notice, StateHeld, StateKept
from atoll.protocol.assignment import Assignment
from atoll.protocol.ids import Generation, PeerId, StepNumber
from atoll.protocol.v1 import session_pb2


class SessionState(StrEnum):
    """``STEPPING`` lasts until the step's report; ``REPORTED`` until its commit; ``FAULTED`` until a void or an assignment;
    ``AWAY`` from the loss of the connection until the coordinator's welcome."""

    JOINING = "joining"
    IDLE = "idle"
    LOADING = "loading"
    READY = "ready"
    STEPPING = "stepping"
    REPORTED = "reported"
    FAULTED = "faulted"
    AWAY = "away"
    ENDED = "ended"


class ExitCode:
    """Exit statuses of the daemon, as the command line documents them."""

    FINISHED = 0
    FAILED = 1
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Why a peer ended; ``again`` says that joining once more may help."""

    exit_code: int
    reason: str
    again: bool = False


# --- events from the shell, besides the coordinator's messages and the notices of computing ---


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentArrived:
    generation: Generation
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksReady:
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFetched:
    """``num_bytes`` came from other peers, in ``seconds``."""

    generation: Generation
    given: Mapping[str, torch.Tensor]
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    generation: Generation
    step: StepNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadFailed:
    generation: Generation
    step: StepNumber
    fault: Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellFault:
    """A fault of loading or of a link, seen outside of computing."""

    generation: Generation
    fault: Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLost:
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LongAlone:
    """There has been no coordinator for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequested:
    """A person, a signal or a notice wants this peer to end: once others have what it holds, for which it stays so long at
    most; the second time, or without a session, at once and with ``exit_code``."""

    reason: str
    exit_code: int
    hand_over_seconds: float = 0.0


SessionEvent: TypeAlias = (
    session_pb2.CoordinatorMessage
    | Notice
    | AssignmentArrived
    | LinksReady
    | StateFetched
    | Uploaded
    | UploadFailed
    | ShellFault
    | ConnectionLost
    | LongAlone
    | LeaveRequested
)

# --- instructions to the shell ---


@dataclass(frozen=True, slots=True)
class Tell:
    """Send this to the coordinator."""

    message: session_pb2.PeerMessage


@dataclass(frozen=True, slots=True)
class Compute:
    command: Command


@dataclass(frozen=True, slots=True)
class Connect:
    """Configure the links for this assignment; answer LinksReady or ShellFault."""

    assignment: Assignment
    boundaries: Boundaries


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch what the assignment names from the coordinator and from donors; answer StateFetched or ShellFault."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Advance:
    """The links move on to this generation."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class UseCodecs:
    """Encode so what is sent to these peers from now on."""

    codecs: Mapping[PeerId, str]


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The plan is over: stop loading, leave the links."""


@dataclass(frozen=True, slots=True)
class SumUp:
    """Sum these gradients with the other replicas; computing is answered, or there is a ShellFault."""

    ready: GradientsReady


@dataclass(frozen=True, slots=True)
class LendOut:
    """Serve this to its borrowers."""

    kept: StateKept


@dataclass(frozen=True, slots=True)
class StopLending:
    """What was kept is of no use any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangUp:
    """The connection is of no use any more: end it, and what runs over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoBack:
    """Join the coordinator again, with what is ``held`` of the run called ``run_id``; ``reason``: why the connection is gone.
    Answered by what the coordinator says, or by ConnectionLost."""

    reason: str
    run_id: str
    generation: Generation
    held: StateHeld


@dataclass(frozen=True, slots=True)
class Upload:
    """Store the state at the coordinator; answer Uploaded or UploadFailed."""

    generation: Generation
    step: StepNumber
    items: Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class MeasureLink:
    """Measure the link that the probe names, and tell the coordinator."""

    probe: session_pb2.Probe


@dataclass(frozen=True, slots=True)
class Allow:
    """Another peer may ask this one for something, for a while."""

    permit: session_pb2.Permit


@dataclass(frozen=True, slots=True)
class AnswerTunnel:
    """Somebody who cannot dial this peer wants to speak to it."""

    offer: session_pb2.TunnelOffer


@dataclass(frozen=True, slots=True)
class Revoke:
    """These certificates, and no others, are revoked."""

    serials: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CopyOver:
    """Fetch a part of a snapshot from another peer's disk, and tell the coordinator."""

    copy: session_pb2.CopySnapshot


@dataclass(frozen=True, slots=True)
class KeepOnly:
    """Remove the run's snapshots of all other steps from the disk."""

    steps: frozenset[StepNumber]


@dataclass(frozen=True, slots=True)
class LeaveLater:
    """Ask for this leave when its time to hand over is over."""

    leave: LeaveRequested


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell the owner."""

    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    outcome: Outcome


Instruction: TypeAlias = (
    Tell
    | Compute
    | Connect
    | Fetch
    | Advance
    | UseCodecs
    | Disconnect
    | SumUp
    | LendOut
    | StopLending
    | HangUp
    | GoBack
    | Upload
    | MeasureLink
    | Allow
    | AnswerTunnel
    | Revoke
    | CopyOver
    | KeepOnly
    | LeaveLater
    | Warn
    | Finish
)
