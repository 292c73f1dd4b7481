"""The run as a state machine: what happened and the time go in, instructions come out. No sockets, no clock, no threads.

    waiting -> planning -> loading <-> training -> finishing -> finished
       ^          |           |           |            |
       +----------+-----------+-----------+------------+    a loss, or a lack of memory, leads back to waiting

From waiting a run goes on with the state that is left; where some of it is lost, it goes back to a snapshot (``recovery``). Any
state may lead to failed; the loss of a peer does so only where nothing is left that the run may go back to, or where nobody
comes for the longest that a run pauses.

Who is here is ``attendance``'s, the way from a plan to stages that can train ``loading``'s, the cycle of steps ``cycle``'s,
what peers' faults lead to ``faults``'s, a change of plan for the better ``moving``'s, writing weights ``storing``'s.
Each state has a deadline (``deadlines``), and ``waiting`` says whom a run waits for."""

from __future__ import annotations

from dataclasses import replace

from atoll.coordinator.run.attendance import Attendance
from atoll.coordinator.run.context import RunContext
from atoll.coordinator.run.cycle import StepCycle
from atoll.coordinator.run.events import (
    BatchPrepared,
    ExportAsked,
    FaultReported,
    GraphReady,
    LinksShown,
    MoveJudged,
    PeerGone,
    PeerJoined,
    PeerLeaving,
    PeerProgressed,
    PeerReady,
    PeersCompared,
    PeerStored,
    PeerVoided,
    PlanMade,
    PlanningProgressed,
    PlanRefused,
    ReplanAsked,
    RunEvent,
    SnapshotCopied,
    SnapshotTaken,
    StageReported,
    StateMoved,
    StopAsked,
    StoreHolds,
    Tick,
    WeightsWritten,
    WorkFailed,
)
from atoll.coordinator.run.faults import Faults
from atoll.coordinator.run.instructions import Instruction, MakePlan
from atoll.coordinator.run.leaving import Leaving
from atoll.coordinator.run.loading import Loading
from atoll.coordinator.run.moving import Moving
from atoll.coordinator.run.pausing import Pausing
from atoll.coordinator.run.recovery import Recovery
from atoll.coordinator.run.redealing import Dealing
from atoll.coordinator.run.resuming import Resumption, Returning
from atoll.coordinator.run.snapshots import Moment
from atoll.coordinator.run.snapshotting import Snapshotting
from atoll.coordinator.run.states import Phase, RunSettings, RunState
from atoll.coordinator.run.storing import Storing
from atoll.coordinator.run.survivors import Survivors
from atoll.coordinator.run.troubles import Troubles
from atoll.coordinator.run.waiting import Waiting, waiting
from atoll.protocol.ids import PeerId, StepNumber


class RunMachine:
    """The state of one run. Everything is changed by :meth:`handle` alone; ``context`` and ``cycle`` are for reading."""

    def __init__(self, settings: RunSettings, now: float) -> None:
        self.context = RunContext(settings, now)
        self.recovery = Recovery(self.context)
        self.snapshotting = Snapshotting(self.context)
        self.cycle = StepCycle(self.context, self.recovery, self.snapshotting, self._proceed)
        self.leaving = Leaving(
            self.context,
            lambda peer: self.attendance.forget(peer),
            lambda peer, why: self.attendance.left(peer, why),
            self.snapshotting.is_asked,
        )
        self.moving = Moving(self.context, self.leaving.nobody_takes_over)
        self.pausing = Pausing(self.context)
        self.troubles = Troubles(self.context, self.cycle, self._leave_plan)
        self.storing = Storing(self.context, self.cycle, self._proceed, lambda: self.snapshotting.is_for_store)
        self.loading = Loading(
            self.context,
            self.cycle,
            self.moving,
            self.recovery,
            plan_again=self._plan_again,
            training_begins=self.storing.training_began,
            proceed=self._proceed,
        )
        self.dealing = Dealing(self.context, self.loading, self.moving)
        self.faults = Faults(self.context, self.cycle, self.troubles, self.loading, self._fall_back)
        self.attendance = Attendance(
            self.context,
            cycle=self.cycle,
            recovery=self.recovery,
            snapshotting=self.snapshotting,
            leaving=self.leaving,
            moving=self.moving,
            pausing=self.pausing,
            storing=self.storing,
            troubles=self.troubles,
            survivors=Survivors(
                self.context,
                self.cycle,
                loading=self.loading,
                moving=self.moving,
                recovery=self.recovery,
                storing=self.storing,
            ),
            fall_back=self._fall_back,
        )
        self._deadlines = settings.deadlines
        self._planned_with: tuple[PeerId, ...] = ()

    def resume(self, resumption: Resumption) -> None:
        """Take up a run, before the first event: it goes on after the last committed step."""
        context = self.context
        context.generation, context.last = resumption.generation, resumption.last
        peers = resumption.plan.peers if resumption.plan is not None else ()
        context.returning = Returning(peers, context.now + self._deadlines.returning_seconds)
        context.snapshots.remember(resumption.snapshots, resumption.parts)
        if resumption.last is not None:
            line = max((moment.line for moment in resumption.snapshots), default=0)
            context.take_up(Moment(step=resumption.last.step, line=line))
            context.snapshots.ordered(context.moment)  # peers that are alone for long write down what they have of it
            context.last_plan, context.resuming = resumption.plan, True
            self.cycle.loss = resumption.last.loss
            self.cycle.owed_evaluation = resumption.owed_evaluation

    def handle(self, event: RunEvent, now: float) -> tuple[Instruction, ...]:
        """Take in what happened at ``now`` (a monotonic clock); returns what to do, in order."""
        context = self.context
        context.now = now
        if context.state.final:
            return ()
        if not isinstance(event, Tick | StateMoved | PeerProgressed | PlanningProgressed | PeersCompared):
            context.note(type(event).__name__)
        self._dispatch(event)
        if context.state is RunState.WAITING:
            self._consider_planning()
        self.storing.settle()
        if now >= context.deadline and not context.state.final:
            self._deadline_passed()
        if not context.state.final:
            self.snapshotting.hand_over()
            self.leaving.settle()
            self.troubles.settle()
        return context.take_instructions()

    def begin_at(self, step: StepNumber) -> None:
        """Before anything happens: the run goes on from a snapshot in a store."""
        self.context.begin_at(step)

    def waiting(self) -> Waiting:
        """What the run waits for, and for whom."""
        found = waiting(self.context, self.cycle)
        return replace(found, what=f"{found.what}{self.pausing.progress()}")

    def _dispatch(self, event: RunEvent) -> None:
        match event:
            case PeerJoined():
                self.attendance.joined(event)
                if self.context.state is RunState.LOADING:
                    self._left_for_a_better_snapshot()
            case PeerGone():
                self.attendance.gone(event)
            case PeerLeaving():
                self.attendance.leaves(event)
            case PeerProgressed():
                self.context.roster.progressed(event.peer, event.phase, event.waiting_for)
            case GraphReady():
                self.cycle.trainable = event.trainable
                self.recovery.order = event.trainable
                self.context.holdings.essential = self.context.snapshots.essential = event.changing
            case PlanMade():
                self._plan_made(event)
            case PlanRefused():
                self._plan_refused(event)
            case LinksShown():
                self.context.links.shown(event.pairs)
            case MoveJudged():
                self.moving.judged(event)
            case PeersCompared():
                self.moving.compared(event)
                self.dealing.compared(event)
            case ReplanAsked():
                self.moving.asked = True
                self.moving.consider()
            case PlanningProgressed():
                if event.generation == self.context.generation:
                    self.context.doing = event.doing
            case BatchPrepared():
                self.cycle.batch_prepared(event)
            case PeerReady():
                self.loading.ready(event)
            case StageReported():
                self.cycle.reported(event)
            case FaultReported():
                self.faults.reported(event)
            case PeerVoided():
                self.cycle.voided(event)
            case StateMoved():
                self._state_moved(event.peer)
            case PeerStored():
                self.storing.stored(event)
            case SnapshotTaken():
                self.snapshotting.taken(event)
            case SnapshotCopied():
                self.snapshotting.copied(event)
            case StoreHolds():
                self.snapshotting.filled(event)
            case WeightsWritten():
                self.storing.written(event)
            case ExportAsked():
                self.storing.export_asked = True
            case StopAsked():
                self.storing.stop(event)
            case WorkFailed():
                self.context.fail(event.reason)
            case Tick():
                self.snapshotting.time_passed()

    # Leaving a plan

    def _fall_back(self, reason: str) -> None:
        """Leave the plan; the open step begins again under the next one, with the state that is left or was kept."""
        context = self.context
        self.moving.interrupted(reason)
        self.recovery.interrupted(reason)
        if context.state in (RunState.TRAINING, RunState.FINISHING):
            assert context.plan is not None
            survivors = tuple(peer for peer in context.plan.peers if context.roster.is_present(peer))
            self.cycle.send_void(survivors, reason)
            self.cycle.abandon()
        context.plan, context.names = None, ()
        context.roster.release()
        self.pausing.release()
        self.storing.interrupted()
        context.enter(RunState.WAITING, self._deadlines.waiting_seconds, reason)

    def _leave_plan(self, reason: str) -> None:
        """Leave a plan whose peers are all here still, as far as is known."""
        context = self.context
        loading = context.state is RunState.LOADING
        self._fall_back(reason)
        if loading:
            self.attendance.let_sessions_tell()
            self.pausing.hold(self._planned_with)

    def _plan_again(self, reason: str) -> None:
        """Leave a plan that one of its peers cannot load."""
        self.attendance.let_sessions_tell()
        self._fall_back(reason)

    # Planning and loading

    def _consider_planning(self) -> None:
        context = self.context
        offers = context.roster.offers()
        if self.cycle.trainable is None or len(offers) < context.needed_peers or not self.attendance.settled(len(offers)):
            return
        if not self.pausing.may_plan(offer.name for offer in offers):
            return
        if context.returning.away(context.roster, context.now):
            return
        context.returning = Returning()
        stood = context.moment
        if not self.recovery.settle():
            return
        if context.moment != stood:
            self.cycle.went_back()
        context.enter(RunState.PLANNING, self._deadlines.planning_seconds)
        context.grow_generation()
        self._planned_with = tuple(offer.name for offer in offers)
        context.emit(
            MakePlan(
                generation=context.generation,
                peers=offers,
                broken=context.links.broken(context.now),
                probed=self.pausing.paused,
                previous=context.last_plan,
                holders=context.holdings.holders(),
                on_disks=context.on_disks(),
                steps_left=context.settings.steps - context.committed,
                at_once=context.in_haste and context.last_plan is not None,
            )
        )

    def _plan_refused(self, event: PlanRefused) -> None:
        context = self.context
        if context.state is not RunState.PLANNING or event.generation != context.generation:
            return
        if event.hopeless:
            context.fail(event.reason)
            return
        self.leaving.nobody_takes_over(event.reason)
        self.pausing.refused(event.peers, event.reason)

    def _plan_made(self, event: PlanMade) -> None:
        context = self.context
        if context.state is not RunState.PLANNING or event.generation != context.generation:
            return
        self.pausing.planned()
        if self._left_for_a_better_snapshot():
            return
        self.loading.begin(event, self._planned_with)

    # Training

    def _proceed(self) -> None:
        """Between two steps: what comes next."""
        context = self.context
        if self.storing.begin_if_due():
            return
        if self._left_for_a_better_snapshot():
            return
        if self.cycle.owed_evaluation:
            self.cycle.begin_next()
        elif (move := self.moving.take()) is not None:
            context.grow_generation()
            self.loading.begin(move, self.moving.looked_at())
        elif not self.dealing.change():
            self.cycle.begin_next()

    def _left_for_a_better_snapshot(self) -> bool:
        """While steps are done again, or are about to be: whether the run goes to a later snapshot instead."""
        better = self.recovery.better_is_here()
        if better:
            self._fall_back("a snapshot of a later step is complete, for somebody came back with a part of it")
        return better

    # Time

    def _state_moved(self, peer: PeerId) -> None:
        """A transfer may take long, as long as it moves."""
        self.snapshotting.progressed(peer)
        if peer not in self.context.pending:
            return
        if self.context.phase is Phase.STORING:
            self.context.wait_at_most(self._deadlines.stored_seconds)
        elif self.context.state is RunState.LOADING:
            self.context.wait_at_most(self._deadlines.loading_seconds)

    def _deadline_passed(self) -> None:
        context = self.context
        if context.pending:
            what = "load its stage" if context.state is RunState.LOADING else "drop the void step"
            what = "send its weights" if context.phase is Phase.STORING else what
            for peer in sorted(context.pending):
                if not context.state.final:
                    self.attendance.expel(peer, f"it did not {what} in time")
        elif context.phase.open:
            self.troubles.step_overdue()
        elif self.pausing.paused and context.state is RunState.WAITING:
            context.fail(context.reason)
        else:
            context.fail(f"gave up after {context.now - context.entered:.0f} s: the run {self.waiting()}")
