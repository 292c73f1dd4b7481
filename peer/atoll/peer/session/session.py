"""The life of a peer's session with its coordinator, as a pure state machine: ``handle(event)`` returns instructions.

Theory of operation. After Welcome a peer is idle until an assignment comes. It loads (compute validates the graph and makes the
first values, the links connect, given state is fetched) and says Ready. Then steps: StartStep, StageReport, Commit. A Void ends
a step at any moment and moves everything to the next generation; an assignment replaces everything. Each command names its
generation: older ones are dropped in silence (they crossed with a void on the wire), newer ones break the protocol, because the
coordinator's stream is in order. After a fault the peer waits for the coordinator's Void or assignment.

A change of plan after a commit begins with Lend: the stage is dropped, its state kept and lent. An assignment of the same
generation may follow; without one the peer is a spare. What was kept ends with the first commit under that generation.

A peer that leaves says so and goes on as before, computing and lending, until MayLeave, the run's end, or the end of its time.

When the connection is lost, or the coordinator says that it takes this peer for lost, the peer is away: it leaves its links,
voids the open step unless that was reported, holds on to its state and joins again, saying what it holds. Welcomed back into
the same run it is idle; the commit of the reported step may follow, then Lend or an assignment, or Release if nothing that it
holds is of use. In another run, what it holds is of none.
"""

from __future__ import annotations

from atoll.peer.faults import Fault, FaultKind
from atoll.peer.session.absence import Absence
from atoll.peer.session.telling import tell_fault, tell_measured, tell_report, tell_snapshot
from atoll.peer.session.values import (
    Advance,
    Allow,
    AnswerTunnel,
    AssignmentArrived,
    Compute,
    Connect,
    ConnectionLost,
    CopyOver,
    Disconnect,
    ExitCode,
    Fetch,
    Finish,
    HangUp,
    Instruction,
    KeepOnly,
    LeaveLater,
    LeaveRequested,
    LendOut,
    LinksReady,
    LongAlone,
    MeasureLink,
    Outcome,
    Revoke,
    SessionEvent,
    SessionState,
    ShellFault,
    StateFetched,
    StopLending,
    SumUp,
    Tell,
    Upload,
    Uploaded,
    UploadFailed,
    UseCodecs,
    Warn,
)
from atoll.peer.stage.events import (
    Accepted,
    Assign,
    BeginStep,
    CommitStep,
    DropState,
    Faulted,
    GradientsReady,
    HandedOut,
    HandOutState,
    HoldState,
    Initialise,
    KeepState,
    Loaded,
    Measured,
    Reported,
    SnapshotWritten,
    StateKept,
    StateReady,
    StepVoided,
    VoidStep,
)
from atoll.protocol.ids import Generation, PeerId, StepNumber
from atoll.protocol.v1 import session_pb2


class Session:
    """``handle`` each event in the order of its arrival and carry out the instructions in order."""

    def __init__(self) -> None:
        self.state = SessionState.JOINING
        self.name = PeerId("")
        self.run = self.run_id = ""
        self.generation = Generation(0)
        self.step = StepNumber(0)
        self._assigned_under = self._released_under = Generation(0)
        self._links_ready = False
        self._loaded = False
        self._lending = False
        self._fetched = (0, 0.0)
        self.leaving: LeaveRequested | None = None
        self._absence = Absence()

    def handle(self, event: SessionEvent) -> list[Instruction]:
        """What to do now. Nothing is ever done once the session has ended."""
        if self.state is SessionState.ENDED:
            return []
        if isinstance(event, session_pb2.CoordinatorMessage):
            return self._from_coordinator(event)
        match event:
            case LeaveRequested():
                return self._leave(event)
            case ConnectionLost():
                return self._lost(event.reason)
        if self.state is SessionState.AWAY:
            if isinstance(event, Faulted) and event.fatal:
                return self._finish(ExitCode.FAILED, event.fault.reason)
            return self._absence.handle(event)
        match event:
            case LongAlone():
                return []
            case AssignmentArrived():
                return self._assigned(event)
            case LinksReady() if event.generation == self.generation:
                self._links_ready = True
                return self._ready_if_complete()
            case StateFetched() if event.generation == self.generation:
                self._fetched = event.num_bytes, event.seconds
                return [Compute(Initialise(generation=event.generation, given=event.given))]
            case Uploaded():
                stored = session_pb2.Stored(generation=event.generation, step=event.step)
                return [Compute(HandedOut(generation=event.generation)), Tell(session_pb2.PeerMessage(stored=stored))]
            case UploadFailed():
                handed = Compute(HandedOut(generation=event.generation))
                return [handed, tell_fault(event.generation, event.step, event.fault)]
            case ShellFault() if event.generation == self.generation:
                return self._outside_fault(event.fault)
            case LinksReady() | StateFetched() | ShellFault():
                return []
        return self._from_compute(event)

    def _leave(self, event: LeaveRequested) -> list[Instruction]:
        patient = self.leaving is None and not self._unheard and event.hand_over_seconds > 0.0
        seconds = event.hand_over_seconds if patient else 0.0
        told = Tell(session_pb2.PeerMessage(leave=session_pb2.Leave(reason=event.reason, hand_over_seconds=seconds)))
        if not patient:
            return [told, *self._finish(event.exit_code, event.reason)]
        self.leaving = event
        return [told, LeaveLater(event)]

    @property
    def _unheard(self) -> bool:
        """Whether no coordinator has this peer in its run at the moment."""
        return self.state in (SessionState.JOINING, SessionState.AWAY)

    def _may_leave(self) -> list[Instruction]:
        if self.leaving is None:
            return self._broken("it let this peer go, which had not asked for it")
        return self._finish(ExitCode.FINISHED, f"{self.leaving.reason}; nothing is lost with this peer")

    def _from_coordinator(self, message: session_pb2.CoordinatorMessage) -> list[Instruction]:
        content = message.WhichOneof("content")
        if self._unheard:
            return self._joined(message)
        match content:
            case "start":
                return self._start(message.start)
            case "commit":
                return self._commit(message.commit)
            case "void":
                return self._void(message.void)
            case "store":
                return self._store(message.store)
            case "lend":
                return self._lend(message.lend)
            case "release":
                return self._release(message.release)
            case "copy_snapshot":
                return [CopyOver(message.copy_snapshot)]
            case "keep_snapshots":
                return [KeepOnly(frozenset(StepNumber(step) for step in message.keep_snapshots.steps))]
            case "probe":
                return [MeasureLink(message.probe)]
            case "permit":
                return [Allow(message.permit)]
            case "tunnel":
                return [AnswerTunnel(message.tunnel)]
            case "reached":
                return self._reached(message.reached)
            case "revoked":
                return [Revoke(tuple(message.revoked.serials))]
            case "end":
                return self._ended(message.end)
            case "rejected":
                return self._rejected(message.rejected)
            case "may_leave":
                return self._may_leave()
            case "cannot_hand_over":
                return [Warn(f"nobody can take the layers of this peer yet: {message.cannot_hand_over.reason}")]
        return self._broken(f"it sent {content or 'an empty message'}, which this version does not expect here")

    def _reached(self, reached: session_pb2.Reached) -> list[Instruction]:
        if reached.reachable:
            return []
        return [
            Warn(
                f"others cannot dial this peer, it dials them or meets them through the coordinator ({reached.reason}): "
                "if they shall, open or forward its port and give --listen HOST:PORT and --advertise HOST:PORT, "
                "where they reach it; if they shall not, give --outbound-only"
            )
        ]

    def _ended(self, end: session_pb2.End) -> list[Instruction]:
        if end.finished:  # nobody will go back to a snapshot any more
            return [KeepOnly(frozenset()), *self._finish(ExitCode.FINISHED, end.reason or "the run finished")]
        if end.stopped:  # what is on the disk is for whoever takes the run up
            return self._finish(ExitCode.FINISHED, f"the run was stopped: {end.reason}")
        if self.leaving is not None:
            return self._finish(ExitCode.FINISHED, f"{self.leaving.reason}; the run has ended: {end.reason}")
        return self._finish(ExitCode.FAILED, f"the run failed: {end.reason or 'the coordinator gave no reason'}")

    def _joined(self, message: session_pb2.CoordinatorMessage) -> list[Instruction]:
        match message.WhichOneof("content"):
            case "welcome":
                return self._welcomed(message.welcome)
            case "rejected":
                return self._rejected(message.rejected)
            case "end":
                end = message.end
                code = ExitCode.FINISHED if end.finished or end.stopped else ExitCode.FAILED
                return self._finish(code, end.reason or "the run is over")
        return self._broken("it did not answer Join with Welcome or Rejected")

    def _welcomed(self, welcome: session_pb2.Welcome) -> list[Instruction]:
        self.state = SessionState.IDLE
        self.name = PeerId(welcome.name)
        self.run = welcome.run
        before, self.run_id = self.run_id, welcome.run_id
        self._loaded = self._links_ready = False
        if self._absence.held is None or welcome.run_id == before:
            return []
        self._absence.end()
        self.generation = self._assigned_under = self._released_under = Generation(0)
        return [Compute(DropState())]

    def _rejected(self, rejected: session_pb2.Rejected) -> list[Instruction]:
        reason = f"the coordinator refused this peer: {rejected.reason}"
        if rejected.again and self.state is not SessionState.JOINING:
            return self._lost(reason)
        return self._finish(ExitCode.FAILED, reason, again=rejected.again)

    def _lost(self, reason: str) -> list[Instruction]:
        """The coordinator is gone, or so is this peer for the coordinator. One that never was in a run has nothing to keep."""
        if self.leaving is not None:
            return self._finish(ExitCode.FINISHED, f"{self.leaving.reason}; {reason}")
        if self.state is SessionState.JOINING:
            return self._finish(ExitCode.FAILED, reason)
        if self.state is SessionState.AWAY:
            return self._absence.lost_again(reason)
        self.state = SessionState.AWAY
        self._absence.begin(reason, self.run_id, self.generation)
        return [*self._stop_lending(), Disconnect(), HangUp(), Compute(HoldState())]

    def _assigned(self, event: AssignmentArrived) -> list[Instruction]:
        if event.generation < self.generation or event.generation == self._assigned_under:
            return []
        self.state = SessionState.LOADING
        self._absence.end()
        self.generation = self._assigned_under = event.generation
        self._links_ready = self._loaded = False
        self._fetched = (0, 0.0)
        return [Disconnect(), Compute(Assign(generation=event.generation, payload=event.payload))]

    def _start(self, start: session_pb2.StartStep) -> list[Instruction]:
        if start.generation < self.generation or self.state is SessionState.FAULTED:
            return []
        if start.generation > self.generation or self.state is not SessionState.READY:
            return self._out_of_turn(f"started step {start.step} of generation {start.generation}")
        if start.num_microbatches < 1:
            return self._broken("it started a step without microbatches")
        self.state = SessionState.STEPPING
        self.step = StepNumber(start.step)
        begin = BeginStep(
            generation=self.generation, step=self.step, num_microbatches=start.num_microbatches, evaluation=start.evaluation
        )
        codecs = {PeerId(entry.target): entry.codec for entry in start.codecs}
        return [*([UseCodecs(codecs)] if codecs else ()), Compute(begin)]

    def _commit(self, commit: session_pb2.Commit) -> list[Instruction]:
        if commit.generation < self.generation:
            return []
        if (commit.generation, commit.step) != (self.generation, self._awaits_commit()):
            return self._out_of_turn(f"committed step {commit.step} of generation {commit.generation}")
        self.state = SessionState.READY if self.state is SessionState.REPORTED else SessionState.IDLE
        self._absence.end()
        command = CommitStep(
            generation=self.generation,
            step=StepNumber(commit.step),
            clip_factor=commit.clip_factor,
            learning_rate=commit.learning_rate,
            snapshot=commit.snapshot,
        )
        return [*self._stop_lending(), Compute(command)]

    def _awaits_commit(self) -> StepNumber | None:
        """The step that was reported here and may be committed."""
        if self.state is SessionState.REPORTED:
            return self.step
        held = self._absence.held if self.state is SessionState.IDLE else None
        return held.reported_step if held is not None and held.reported_step else None

    def _lend(self, lend: session_pb2.Lend) -> list[Instruction]:
        if lend.generation <= self.generation:
            return []
        self._absence.end()
        self.state = SessionState.IDLE
        self.generation = Generation(lend.generation)
        self._links_ready = self._loaded = False
        borrowers = tuple(PeerId(name) for name in lend.borrowers)
        keep = KeepState(generation=self.generation, step=StepNumber(lend.committed_step), borrowers=borrowers)
        return [*self._stop_lending(), Disconnect(), Compute(keep)]

    def _release(self, release: session_pb2.Release) -> list[Instruction]:
        if release.generation < self.generation:
            return []
        # It may be newer where this peer has had no stage for a while.
        self.generation = self._released_under = Generation(release.generation)
        self._absence.end()
        return [*self._stop_lending(), Compute(DropState())]

    def _stop_lending(self) -> list[Instruction]:
        """The end of what is kept; before computing goes on, which may change it."""
        lending, self._lending = self._lending, False
        return [StopLending()] if lending else []

    def _void(self, void: session_pb2.Void) -> list[Instruction]:
        if void.generation < self.generation:
            return []
        if void.next_generation <= self.generation:
            return self._broken(f"it voided generation {void.generation} without a newer one")
        loaded = self._loaded and self._links_ready
        self.generation = Generation(void.next_generation)
        self.state = SessionState.READY if loaded else SessionState.IDLE
        return [
            Compute(
                VoidStep(generation=Generation(void.generation), step=StepNumber(void.step), next_generation=self.generation)
            )
        ]

    def _store(self, store: session_pb2.Store) -> list[Instruction]:
        if store.generation < self.generation:
            return []
        if store.generation > self.generation or not self._loaded:
            return self._out_of_turn(f"asked for the state of generation {store.generation}")
        return [Compute(HandOutState(generation=self.generation, step=StepNumber(store.step)))]

    def _from_compute(self, notice: SessionEvent) -> list[Instruction]:
        match notice:
            case StepVoided():
                voided = session_pb2.Voided(generation=notice.next_generation, step=notice.step)
                return [Advance(notice.next_generation), Tell(session_pb2.PeerMessage(voided=voided))]
            case Measured():
                return [tell_measured(notice)]
            case SnapshotWritten():
                return [tell_snapshot(notice)]
            case StateReady():  # of an older generation too: computing waits to hear that it was handed out
                return [Upload(notice.generation, notice.step, notice.items)]
            case StateKept() if notice.generation == self.generation:
                if notice.generation == self._released_under:
                    return [Advance(notice.generation)]
                self._lending = True
                return [Advance(notice.generation), LendOut(notice)]
            case StateKept():
                return []
            case Faulted() if notice.fatal:
                finish = self._finish(ExitCode.FAILED, notice.fault.reason)
                return [tell_fault(notice.generation, notice.step, notice.fault), *finish]
        if getattr(notice, "generation", None) != self.generation or self.state is SessionState.FAULTED:
            return []  # overtaken by a void or an assignment
        match notice:
            case Accepted():
                return self._accepted(notice)
            case Loaded():
                self._loaded = True
                return self._ready_if_complete()
            case GradientsReady():
                return [SumUp(notice)]
            case Reported():
                self.state = SessionState.READY if notice.evaluation else SessionState.REPORTED
                return [tell_report(notice)]
            case Faulted():
                short = notice.fault.kind is FaultKind.MEMORY and self.state is SessionState.STEPPING
                return [*(self._stop_lending() if short else ()), *self._fault(notice.fault)]
        return []

    def _accepted(self, accepted: Accepted) -> list[Instruction]:
        connect = Connect(accepted.assignment, accepted.boundaries)
        if accepted.assignment.fetch or accepted.assignment.donors:
            return [connect, Fetch(accepted.assignment)]
        return [connect, Compute(Initialise(generation=self.generation, given={}))]

    def _ready_if_complete(self) -> list[Instruction]:
        if self.state is not SessionState.LOADING or not (self._loaded and self._links_ready):
            return []
        self.state = SessionState.READY
        num_bytes, seconds = self._fetched
        ready = session_pb2.Ready(generation=self.generation, fetched_bytes=num_bytes, fetch_seconds=seconds)
        return [Tell(session_pb2.PeerMessage(ready=ready))]

    def _fault(self, fault: Fault) -> list[Instruction]:
        self.state = SessionState.FAULTED
        return [tell_fault(self.generation, self.step, fault)]

    def _outside_fault(self, fault: Fault) -> list[Instruction]:
        """Computing is not touched by it: a step that was reported can still be committed. Loading is over, though."""
        return self._fault(fault) if self.state is SessionState.LOADING else [tell_fault(self.generation, self.step, fault)]

    def _out_of_turn(self, what: str) -> list[Instruction]:
        return self._broken(f"it {what} while this peer is {self.state} in generation {self.generation}, step {self.step}")

    def _broken(self, what: str) -> list[Instruction]:
        reason = f"the coordinator broke the protocol: {what}"
        fault = Fault(kind=FaultKind.INTERNAL, reason=reason)
        told = tell_fault(self.generation, self.step, fault)
        return [told, *self._finish(ExitCode.FAILED, reason)]

    def _finish(self, exit_code: int, reason: str, *, again: bool = False) -> list[Instruction]:
        self.state = SessionState.ENDED
        return [Finish(Outcome(exit_code=exit_code, reason=reason, again=again))]
