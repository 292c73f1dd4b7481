"""The run as a state machine: what happened and the time go in, instructions come out. No sockets, no clock, no threads.

    waiting -> planning -> loading <-> training -> finishing -> finished
       ^          |           |           |            |
       +----------+-----------+-----------+------------+    a loss, or a lack of memory, leads back to waiting

From waiting a run goes on with the state that is left; where some of it is lost, it goes back to a snapshot (``recovery``). Any
state may lead to failed, but the loss of a peer never does.

The cycle of steps while training is ``cycle``'s, a change of plan for the better ``moving``'s, writing weights ``storing``'s.
Each state has a deadline (``deadlines``), and ``waiting`` says whom a run waits for."""

from __future__ import annotations

from dataclasses import replace

from atoll.coordinator.events import PlanEvent
from atoll.coordinator.planning.quantities import format_bytes
from atoll.coordinator.run.context import RunContext
from atoll.coordinator.run.cycle import CURE_NOT_FINITE, StepCycle
from atoll.coordinator.run.events import (
    BatchPrepared,
    ExportAsked,
    FaultKind,
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
from atoll.coordinator.run.instructions import Assign, ExpelPeer, Instruction, MakePlan, ReleaseState, SendCommit
from atoll.coordinator.run.leaving import Leaving
from atoll.coordinator.run.moving import Moving
from atoll.coordinator.run.pausing import Pausing
from atoll.coordinator.run.recovery import Recovery
from atoll.coordinator.run.resuming import Held, Resumption, Returning, Use, use_of
from atoll.coordinator.run.roster import PeerState
from atoll.coordinator.run.snapshots import Moment
from atoll.coordinator.run.snapshotting import Snapshotting
from atoll.coordinator.run.states import Phase, RunSettings, RunState
from atoll.coordinator.run.storing import Storing
from atoll.coordinator.run.troubles import Troubles
from atoll.coordinator.run.waiting import Waiting, waiting
from atoll.protocol.ids import PeerId, StepNumber

# Faults that running the step again may cure; the others come again.
TRANSIENT = frozenset({FaultKind.NOT_FINITE, FaultKind.LINK, FaultKind.CORRUPT, FaultKind.INTERNAL})


class RunMachine:
    """The state of one run. Everything is changed by :meth:`handle` alone; ``context`` and ``cycle`` are for reading."""

    def __init__(self, settings: RunSettings, now: float) -> None:
        self.context = RunContext(settings, now)
        self.recovery = Recovery(self.context)
        self.snapshotting = Snapshotting(self.context)
        self.cycle = StepCycle(self.context, self.recovery, self.snapshotting, self._proceed)
        self.leaving = Leaving(self.context, self._forget, self._left)
        self.moving = Moving(self.context, self.leaving.nobody_takes_over)
        self.pausing = Pausing(self.context)
        self.troubles = Troubles(self.context, self.cycle, self._leave_plan)
        self.storing = Storing(self.context, self.cycle, self._proceed)
        self._deadlines = settings.deadlines
        self._last_join = now
        self._planned_with: tuple[PeerId, ...] = ()
        self._loading_failures = 0

    def resume(self, resumption: Resumption) -> None:
        """Take up a run, before the first event: it goes on after the last committed step."""
        context = self.context
        context.generation, context.last = resumption.generation, resumption.last
        context.returning = Returning(resumption.peers, context.now + self._deadlines.returning_seconds)
        context.snapshots.remember(resumption.snapshots, resumption.parts)
        if resumption.last is not None:
            line = max((moment.line for moment in resumption.snapshots), default=0)
            context.take_up(Moment(step=resumption.last.step, line=line))
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
        if now >= context.deadline:
            self._deadline_passed()
        if not context.state.final:
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
                self._peer_joined(event)
            case PeerGone():
                self._peer_gone(event)
            case PeerLeaving():
                self._peer_leaving(event)
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
            case ReplanAsked():
                self.moving.asked = True
                self.moving.consider()
            case PlanningProgressed():
                if event.generation == self.context.generation:
                    self.context.doing = event.doing
            case BatchPrepared():
                self.cycle.batch_prepared(event)
            case PeerReady():
                self._peer_ready(event)
            case StageReported():
                self.cycle.reported(event)
            case FaultReported():
                self._fault(event)
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

    # Who is here

    def _peer_joined(self, event: PeerJoined) -> None:
        context = self.context
        early = context.state in (RunState.WAITING, RunState.PLANNING)
        context.announce(*context.roster.join(event.offer, PeerState.JOINED if early else PeerState.SPARE))
        context.snapshots.joined(event.offer.name, event.snapshots)
        self.snapshotting.joined(event)
        self._last_join = context.now
        if event.held is not None:
            self._take_back(event.offer.name, event.held)
        self.pausing.joined()
        if context.state is RunState.WAITING:
            context.wait_at_most(self._deadlines.waiting_seconds)

    def _take_back(self, peer: PeerId, held: Held) -> None:
        """A peer is here again, with state in memory: it is of use, becomes so with a commit that it missed, or is dropped."""
        context = self.context
        use = use_of(held, context.committed, context.last) if context.is_of_this_line(held.generation) else Use.NONE
        if use is Use.NONE:
            context.emit(ReleaseState(generation=held.generation, peers=(peer,)))
            return
        if use is Use.COMMIT:
            last = context.last
            assert last is not None
            context.emit(
                SendCommit(
                    peers=(peer,),
                    generation=last.generation,
                    step=last.step,
                    clip_factor=last.clip_factor,
                    learning_rate=last.learning_rate,
                )
            )
        context.holdings.add(peer, held.names)

    def _peer_gone(self, event: PeerGone) -> None:
        context, peer, reason = self.context, event.peer, event.reason
        if not context.roster.is_present(peer):
            return
        who = context.described(peer)
        planned = context.plan is not None and peer in context.plan.peers
        held = context.holdings.names_of(peer)
        how = f"{who} left ({reason})" if event.left else f"{who} was lost ({reason})"
        context.announce(*context.roster.remove(peer, reason, left=event.left))
        self._forget(peer, lost_stage=planned and not event.left)
        if context.phase is Phase.STORING:
            matters = planned and self.storing.needs(peer)
        else:
            # Where a donor is lost whose names others have too, its borrowers ask these.
            matters = planned or context.state is RunState.PLANNING or bool(context.plan is not None and context.uncovered())
        if matters and (planned or held):
            self.recovery.lost(peer, held if event.may_return else frozenset(), event.silent_seconds)
        if matters:
            self._fall_back(how)

    def _forget(self, peer: PeerId, *, lost_stage: bool = False) -> None:
        """The peer is gone, and with it what it had."""
        context = self.context
        context.holdings.forget(peer)
        context.snapshots.gone(peer)
        self.snapshotting.gone(peer, lost_stage=lost_stage)
        context.stale.discard(peer)
        self.troubles.forget(peer)

    def _left(self, peer: PeerId, reason: str) -> None:
        self._peer_gone(PeerGone(peer=peer, reason=reason, left=True))

    def _peer_leaving(self, event: PeerLeaving) -> None:
        """The peer goes, but not yet: plan without it while it still works and lends."""
        context = self.context
        if not context.roster.is_present(event.peer):
            return
        who = context.described(event.peer)
        self.leaving.announced(event)
        planned = context.plan is not None and event.peer in context.plan.peers
        if (context.state is RunState.LOADING and planned) or context.state is RunState.PLANNING:
            self._fall_back(f"{who} leaves ({event.reason})")
        else:
            self.moving.consider()

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
            self._let_sessions_tell()
            self.pausing.hold(self._planned_with)

    def _let_sessions_tell(self) -> None:
        """If the cause is a peer that just died, its session tells before the peers have settled again."""
        self._last_join = self.context.now

    def _expel(self, peer: PeerId, reason: str) -> None:
        self.context.emit(ExpelPeer(peer=peer, reason=reason))
        self._peer_gone(PeerGone(peer=peer, reason=reason))

    # Planning and loading

    def _consider_planning(self) -> None:
        context = self.context
        offers = context.roster.offers()
        settled = context.now - self._last_join >= self._deadlines.settle_seconds
        # A run that has begun goes on with whoever is here.
        needed = 1 if context.journal_step else max(1, context.settings.min_peers)
        if self.cycle.trainable is None or len(offers) < needed or not settled:
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
                steps_left=context.settings.steps - context.committed,
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
        self._load(event, self._planned_with)

    def _load(self, made: PlanMade, planned_with: tuple[PeerId, ...]) -> None:
        """Have each peer of a plan, which was made in the knowledge of certain peers, get its stage."""
        context, plan = self.context, made.plan
        context.plan, context.names = plan, made.names
        context.enter(RunState.LOADING, self._deadlines.loading_seconds)
        context.pending = set(plan.peers)
        self.cycle.new_generation()
        self.moving.planned(planned_with)
        self.recovery.planned()
        context.emit(
            Assign(
                generation=context.generation,
                plan=plan,
                committed=context.committed,
                holders=context.holdings.holders(),
                on_disks=context.snapshots.holders(context.moment) if context.committed else {},
                stale=tuple(sorted(context.stale.difference(plan.peers))),
                broken=context.links.broken(context.now),
            )
        )
        context.announce(
            PlanEvent(
                generation=context.generation,
                stages=made.summaries,
                predicted_step_seconds=plan.step_seconds,
                bottleneck=plan.bottleneck,
                microbatch=plan.microbatch,
            ),
            *context.roster.assign(plan),
        )

    def _peer_ready(self, event: PeerReady) -> None:
        context = self.context
        mine = event.generation == context.generation and event.peer in context.pending
        stage = context.stage_of(event.peer)
        if context.state is not RunState.LOADING or not mine or stage is None:
            return
        context.pending.discard(event.peer)
        context.announce(*context.roster.change(event.peer, PeerState.READY))
        self.moving.ready(event)
        if context.committed:
            context.holdings.add(event.peer, context.names[stage])
        if not context.pending:
            self._loading_failures = 0
            self.storing.training_began()
            context.enter(RunState.TRAINING, self._deadlines.step_seconds)
            fetched_bytes, stopped_seconds = self.moving.arrived(went_back=self.recovery.went_back)
            self.recovery.arrived(fetched_bytes, stopped_seconds)
            self._proceed()

    # Training

    def _proceed(self) -> None:
        """Between two steps: what comes next."""
        context = self.context
        if self.storing.begin_if_due():
            return
        if self._left_for_a_better_snapshot():
            return
        if not self.cycle.owed_evaluation and (move := self.moving.take()) is not None:
            context.grow_generation()
            self._load(move, self.moving.looked_at())
        else:
            self.cycle.begin_next()

    def _left_for_a_better_snapshot(self) -> bool:
        """While steps are done again, or are about to be: whether the run goes to a later snapshot instead."""
        better = self.recovery.better_is_here()
        if better:
            self._fall_back("a snapshot of a later step is complete, for somebody came back with a part of it")
        return better

    def _fault(self, event: FaultReported) -> None:
        context = self.context
        if context.plan is None or event.generation != context.generation or event.peer not in context.plan.peers:
            return
        blamed = event.accused or event.peer
        if event.fault is FaultKind.MEMORY and context.phase is not Phase.STORING:
            self._out_of_memory(event)
        elif event.fault not in TRANSIENT:
            context.fail(f"{context.described(blamed)} cannot run its stage: {event.reason}")
        elif event.fault is FaultKind.CORRUPT and context.phase is not Phase.STORING and self._damaged(blamed, event.reason):
            pass
        elif self._is_about_a_link(event):
            self.troubles.link_failed(event.peer, blamed, event.reason)
        elif context.state is RunState.LOADING:
            self._loading_failed(f"{context.described(blamed)} could not be loaded: {event.reason}")
        elif context.phase is Phase.STORING:
            # Nothing is due on the links now; a peer that is really gone is noticed by its session.
            if event.fault is not FaultKind.LINK:
                context.fail(f"{context.described(blamed)} failed while it sent its weights: {event.reason}")
        else:
            self.cycle.void(event.reason, blamed, CURE_NOT_FINITE if event.fault is FaultKind.NOT_FINITE else "")

    def _out_of_memory(self, event: FaultReported) -> None:
        """The peer cannot do what it was planned for: plan again, with less of its memory."""
        context = self.context
        assert context.plan is not None
        stage = context.stage_of(event.peer)
        assert stage is not None
        if self.cycle.open is not None and context.phase.open:
            self.cycle.announce_void(event.reason, event.peer)
            # It has dropped what it kept beside its stage.
            context.holdings.keep_only(event.peer, context.names[stage])
        limit = int(context.settings.memory_factor * context.plan.stages[stage].memory_bytes)
        lowered = context.roster.lower_memory(event.peer, limit, context.settings.max_shortages)
        after = f"is planned with {format_bytes(lowered)} from now on" if lowered else "is left out of plans from now on"
        self._fall_back(f"{context.described(event.peer)} ran out of memory and {after}: {event.reason}")

    def _loading_failed(self, reason: str) -> None:
        self._loading_failures += 1
        if self._loading_failures >= self.context.settings.max_voids:
            self.context.fail(f"{reason} (tried {self._loading_failures} times)")
        else:
            self._let_sessions_tell()
            self._fall_back(reason)

    def _is_about_a_link(self, event: FaultReported) -> bool:
        context = self.context
        due = context.state is RunState.LOADING or context.phase.open
        return due and event.fault is FaultKind.LINK and self.troubles.concerns_a_link(event)

    def _damaged(self, sender: PeerId, reason: str) -> bool:
        """Whether a damaged message was one too many; then the plan is left, and so is the sender's state, if it is that."""
        context = self.context
        loading = context.state is RunState.LOADING
        if not self.troubles.damaged(sender, reason):
            return False
        if loading:
            context.holdings.forget(sender)
        return True

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
                    self._expel(peer, f"it did not {what} in time")
        elif context.phase.open:
            self.troubles.step_overdue()
        elif self.pausing.paused and context.state is RunState.WAITING:
            context.fail(context.reason)
        else:
            context.fail(f"gave up after {context.now - context.entered:.0f} s: the run {self.waiting()}")
