"""What the compute thread does: holds the stage, and turns commands into work and notices. Knows no thread and no socket.

A void may arrive at any moment: the call in progress ends, then everything of the step is dropped. Whatever goes wrong becomes
a Faulted notice; the pipeline then waits for the coordinator's word. An error in the middle of a commit leaves the stage half
updated and is therefore fatal.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from atoll.peer.faults import Fault, FaultKind, fault_of
from atoll.peer.measuring.measurement_cache import MeasurementCache
from atoll.peer.measuring.measuring_queue import MeasuringQueue
from atoll.peer.stage.boundaries import Boundaries
from atoll.peer.stage.events import (
    Accepted,
    Arrived,
    Assign,
    BeginStep,
    Command,
    CommitStep,
    ComputeProgress,
    Delivered,
    DropState,
    Faulted,
    HandedOut,
    HandOutState,
    HoldState,
    Initialise,
    KeepState,
    Loaded,
    Measure,
    Notice,
    SnapshotWritten,
    StateHeld,
    StateKept,
    StateReady,
    StepVoided,
    Summed,
    VoidStep,
    WriteSnapshot,
)
from atoll.peer.stage.local_steps import LocalTraining
from atoll.peer.stage.mailbox import Mailbox
from atoll.peer.stage.memory_use import MemoryUse
from atoll.peer.stage.plausibility import Plausibility
from atoll.peer.stage.stage import Stage, StageSettings
from atoll.peer.stage.step import COORDINATOR_STAGE, Phase, StepRun, StepSurroundings
from atoll.peer.state.kept_state import KeptState
from atoll.peer.state.snapshot_writer import SnapshotWriter
from atoll.protocol.assignment import Assignment, assignment_from_bytes
from atoll.protocol.errors import GraphRefused, WireError
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.ids import Generation, PeerId, StepNumber
from atoll.protocol.limits import Limits
from atoll.protocol.messages import Kind, Message
from atoll.protocol.state import changing_names, split_name
from atoll.protocol.validation import validate_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSurroundings:
    """What the pipeline works with. ``send`` hands a message over to the links and does not wait; a graph that takes more than
    ``memory_bytes`` is refused. Measurements are kept in ``cache``; none are made where ``declared_speed`` says that the owner
    knows better. ``snapshots`` writes state to the disk; None where the owner gave no folder for it."""

    device: str
    memory_bytes: int
    send: Callable[[PeerId, Message], None]
    notify: Callable[[Notice], None]
    clock: Callable[[], float] = time.monotonic
    cache: MeasurementCache = field(default_factory=lambda: MeasurementCache(None))
    declared_speed: bool = False
    chaos: FaultPoints = field(default_factory=FaultPoints)
    snapshots: SnapshotWriter | None = None


class Pipeline:
    """``handle`` a command, then call ``work`` until it returns False; both on one thread."""

    def __init__(self, surroundings: PipelineSurroundings) -> None:
        self._with = surroundings
        self._assignment: Assignment | None = None
        self._stage: Stage | None = None
        self._local: LocalTraining | None = None
        self._boundaries: Boundaries | None = None
        self._mailbox = Mailbox()
        self._plausibility = Plausibility()
        self._generation = Generation(0)
        self._step = StepNumber(0)
        self._committed = StepNumber(0)
        self._kept = KeptState()
        self._run: StepRun | None = None
        self._handing_out = False
        self._postponed: list[Command] = []
        self._measuring = MeasuringQueue(
            device=surroundings.device,
            cache=surroundings.cache,
            notify=surroundings.notify,
            refusal="its owner declared its speed" if surroundings.declared_speed else "",
        )
        self._doing = "idle"
        self.progress = ComputeProgress(generation=self._generation, step=self._step)

    def handle(self, command: Command) -> None:
        """Takes in one command; what goes wrong becomes a Faulted notice."""
        try:
            self._dispatch(command)
        except Exception as error:  # whatever a graph makes torch raise must not end this thread
            self._fail(error, fatal=isinstance(command, CommitStep | HandedOut | HoldState))  # each may carry out a commit
        self._publish(count=1)

    def work(self) -> bool:
        """Does one piece of work, of the step or of a measurement; False when there is nothing to do but wait for the next
        command."""
        run = self._run
        if run is None:
            return self._work_on_measurement()
        self._doing = run.activity
        self._publish(count=0)
        try:
            worked = run.advance()
        except Exception as error:  # as in ``handle``
            self._fail(error)
            worked = False
        if run.start.evaluation and run.phase is Phase.REPORTED:
            self._end_step(run.start)
        self._publish(count=int(worked))
        return worked

    def _work_on_measurement(self) -> bool:
        worked = self._measuring.advance()
        if worked:
            self._doing = "measuring" if self._measuring.busy else "idle"
            self._publish(count=1)
        return worked

    def _dispatch(self, command: Command) -> None:
        if self._must_wait(command):
            self._postponed.append(command)
            return
        match command:
            case Arrived():
                self._arrive(command)
            case Delivered():
                if self._run is not None and self._run.belongs(command.key):
                    self._run.delivered(command.key)
            case BeginStep():
                self._begin(command)
            case Summed():
                self._summed(command)
            case CommitStep():
                self._commit(command)
            case VoidStep():
                self._void(command)
            case Assign():
                self._assign(command)
            case Initialise():
                self._initialise(command)
            case HandOutState():
                self._hand_out(command)
            case HandedOut():
                self._handed_out()
            case Measure():
                self._measure(command)
            case KeepState():
                self._keep(command)
            case DropState():
                self._drop_all()
            case HoldState():
                self._hold()
            case WriteSnapshot():
                self._write_snapshot()

    def _must_wait(self, command: Command) -> bool:
        """While state is handed out a commit waits, and with it what comes after it."""
        if isinstance(command, CommitStep):
            return self._handing_out
        return bool(self._postponed) and isinstance(command, BeginStep | VoidStep | HandOutState | KeepState)

    def _handed_out(self) -> None:
        self._handing_out = False
        postponed, self._postponed = self._postponed, []
        for command in postponed:
            self._dispatch(command)

    def _assign(self, command: Assign) -> None:
        self._measuring.abandon("it got a stage in the meantime")
        self._doing = "reading the assignment"
        self._run, self._stage, self._local, self._boundaries, self._assignment = None, None, None, None, None
        self._handing_out, self._postponed = False, []
        self._generation = command.generation
        self._mailbox.drop_before(command.generation)
        MemoryUse(self._with.device).begin_anew()
        self._publish(count=1)
        assignment = _read_assignment(command)
        self._step = assignment.committed_step
        self._doing = "validating the graph"
        validate_stage(assignment.graph, _limits(self._with.memory_bytes))
        if self._kept.step != assignment.committed_step:
            self._kept = KeptState()
        self._assignment = assignment
        self._boundaries = Boundaries(assignment.graph, reduced_precision=assignment.precision == "bf16")
        self._with.chaos.stage = self._boundaries.stage
        accepted = Accepted(generation=assignment.generation, assignment=assignment, boundaries=self._boundaries)
        self._with.notify(accepted)

    def _initialise(self, command: Initialise) -> None:
        assignment = self._assignment
        if assignment is None or command.generation != assignment.generation:
            return  # overtaken by a newer assignment
        self._doing = "loading"
        self._publish(count=1)
        self._with.chaos.reached("loading", step=assignment.committed_step + 1)
        limits = _limits(self._with.memory_bytes)
        if assignment.committed_step > 0:
            self._kept.require(assignment.graph, command.given)
        stage = Stage(assignment.graph, _stage_settings(assignment, self._with.device, limits))
        stage.adopt({**self._kept.state, **command.given})
        self._stage = stage
        self._local = None if assignment.local is None else LocalTraining(stage, assignment.local)
        self._committed = assignment.committed_step
        self._doing = "idle"
        self._with.notify(Loaded(generation=assignment.generation))

    def _arrive(self, command: Arrived) -> None:
        message = command.message
        if message.key.kind is Kind.BATCH:
            message = dataclasses.replace(message, key=dataclasses.replace(message.key, source=COORDINATOR_STAGE))
        if self._mailbox.put(command.sender, message) and self._run is not None and self._run.belongs(message.key):
            self._run.arrived(message.key)

    def _begin(self, command: BeginStep) -> None:
        stage, boundaries, assignment = self._stage, self._boundaries, self._assignment
        if stage is None or boundaries is None or assignment is None:
            raise WireError("a step was started before this peer had its stage")
        self._measuring.abandon("it began a step in the meantime")
        self._step = command.step
        self._run = StepRun(
            command,
            StepSurroundings(
                stage=stage,
                boundaries=boundaries,
                mailbox=self._mailbox,
                groups={group.stage: group for group in assignment.groups},
                own=assignment.peer,
                in_flight=assignment.in_flight,
                send=self._with.send,
                notify=self._with.notify,
                clock=self._with.clock,
                chaos=self._with.chaos,
                plausibility=self._plausibility,
                local=self._local,
            ),
        )

    def _summed(self, command: Summed) -> None:
        run = self._run
        if run is not None and (run.start.generation, run.start.step) == (command.generation, command.step):
            self._doing = "taking sums of gradients"
            run.summed(command.gradients)

    def _commit(self, command: CommitStep) -> None:
        stage, run = self._stage, self._run
        self._doing = "committing"
        # Committing a step that was dropped here would let this stage silently fall behind the others.
        assert stage is not None, "committed without a stage"
        assert run is not None, f"step {command.step} was committed after it was dropped here"
        assert run.phase is Phase.REPORTED, f"step {command.step} was committed before it was reported"
        self._with.chaos.reached("committing", step=command.step)
        self._kept = KeptState()  # of the step before, and in part the very tensors that change now
        if self._with.snapshots is not None:
            self._with.snapshots.wait_until_read()
        stage.commit(command.clip_factor, command.learning_rate)
        self._plausibility.committed()
        self._committed = command.step
        self._end_step(run.start)
        if command.snapshot:
            self._write_snapshot()

    def _write_snapshot(self) -> None:
        """Has the state of the last committed step written, as far as training changes it: the rest can be made anew."""
        step, state = self._committed, self._kept.state
        if self._stage is not None:
            changing = changing_names(self._stage.graph)
            state = {name: value for name, value in self._stage.full_state() if split_name(name)[0] in changing}
        elif self._kept.step is not None:
            step = self._kept.step
        if self._with.snapshots is None:
            failure = "its owner gave this peer no folder to keep anything in: start it with --cache DIR"
            self._with.notify(SnapshotWritten(step=step, failure=failure))
        else:
            self._with.snapshots.write(step, state)

    def _end_step(self, start: BeginStep) -> None:
        self._run = None
        self._doing = "idle"
        self._mailbox.drop_step(start.generation, start.step, evaluation=start.evaluation)

    def _void(self, command: VoidStep) -> None:
        self._doing = "voiding"
        self._abandon()
        self._generation = command.next_generation
        self._mailbox.drop_before(command.next_generation)
        self._doing = "idle"
        self._with.notify(StepVoided(next_generation=command.next_generation, step=command.step))

    def _measure(self, command: Measure) -> None:
        held = self._kept.num_bytes if self._stage is None else self._stage.resident_bytes
        held += 0 if self._local is None else self._local.inner.resident_bytes
        self._measuring.add(command.message, self._with.memory_bytes - held)
        if self._run is not None:
            self._measuring.abandon("it is in the middle of a step")

    def _keep(self, command: KeepState) -> None:
        self._doing = "keeping state"
        self._abandon()
        stage, self._stage, self._local = self._stage, None, None
        self._boundaries, self._assignment = None, None
        self._generation = command.generation
        self._mailbox.drop_before(command.generation)
        if stage is not None and self._committed != command.step:
            stage = None  # the run goes on from another step: this state is of no use to anybody
        self._kept = self._kept.joined(command.step, dict(stage.full_state()) if stage is not None else {})
        self._committed = command.step
        self._doing = "idle"
        self._with.notify(
            StateKept(generation=command.generation, step=command.step, borrowers=command.borrowers, state=self._kept.state)
        )

    def _hold(self) -> None:
        self._doing = "holding its state"
        self._handed_out()  # nobody takes what was being handed out
        self._measuring.abandon("its coordinator is gone")
        run, reported = self._run, StepNumber(0)
        if run is not None and run.phase is Phase.REPORTED:
            reported = run.start.step
        else:
            self._abandon()
        step, names = self._held_state(stage_alone=reported > 0)
        if self._run is None:
            self._doing = "idle"
        self._with.notify(StateHeld(step=step, reported_step=reported, names=names))

    def _held_state(self, *, stage_alone: bool) -> tuple[StepNumber, tuple[str, ...]]:
        """Of which committed step there is state here, and of which parameters and buffers. What was kept beside the stage is
        gone once the next step is committed."""
        kept = {split_name(name)[0] for name in self._kept.state}
        if self._stage is None:
            return self._kept.step or StepNumber(0), tuple(sorted(kept))
        graph = self._stage.graph
        names = {spec.name for spec in graph.parameters} | {spec.name for spec in graph.buffers}
        if not stage_alone and self._kept.step == self._committed:
            names |= kept
        return self._committed, tuple(sorted(names))

    def _drop_all(self) -> None:
        self._abandon()
        self._stage, self._local, self._boundaries, self._assignment = None, None, None, None
        self._kept = KeptState()
        self._plausibility = Plausibility()

    def _hand_out(self, command: HandOutState) -> None:
        if self._stage is None:
            raise WireError("state was asked for before this peer had its stage")
        self._handing_out = True
        self._with.notify(StateReady(generation=command.generation, step=command.step, items=self._stage.state()))

    def _abandon(self) -> None:
        """Drops the step, so that its memory is free at once."""
        self._run = None
        self._plausibility.dropped()
        if self._stage is not None:
            self._stage.void()
        if self._local is not None:
            self._local.inner.void()

    def _fail(self, error: Exception, *, fatal: bool = False) -> None:
        self._report_fault(fault_of(error, doing=self._doing), fatal=fatal)

    def _report_fault(self, fault: Fault, *, fatal: bool = False) -> None:
        stepping = self._run is not None
        try:
            self._abandon()
        except Exception as error:  # a stage that cannot even drop its step is lost
            fault, fatal = fault_of(error, doing="dropping the step"), True
        if fault.kind is FaultKind.MEMORY and stepping:
            self._kept = KeptState()  # all stages are complete: what else is kept only takes room
        self._doing = "idle"
        self._with.notify(Faulted(generation=self._generation, step=self._step, fault=fault, fatal=fatal))

    def _publish(self, *, count: int) -> None:
        """Replaces ``progress``, which other threads read."""
        phase, waiting_for = self._doing, None
        if self._run is not None:
            what, waiting_for = self._run.waiting_for()
            phase = f"waiting for {what}" if what else self._run.activity
        self.progress = ComputeProgress(
            generation=self._generation,
            step=self._step,
            phase=phase,
            waiting_for=waiting_for,
            stage=None if self._boundaries is None else self._boundaries.stage,
            count=self.progress.count + count,
        )


def _read_assignment(command: Assign) -> Assignment:
    try:
        assignment = assignment_from_bytes(command.payload)
    except WireError as error:
        raise GraphRefused(f"the assignment cannot be read: {error}") from error
    if assignment.generation != command.generation:
        raise GraphRefused(f"an assignment of generation {assignment.generation} came as generation {command.generation}")
    return assignment


def _limits(memory_bytes: int) -> Limits:
    """Nothing that is larger than what this peer may use can be of use."""
    return Limits(max_state_bytes=memory_bytes, max_tensor_bytes=memory_bytes)


def _stage_settings(assignment: Assignment, device: str, limits: Limits) -> StageSettings:
    return StageSettings(
        run_seed=assignment.run_seed,
        device=torch.device(device),
        precision=assignment.precision,
        recompute=assignment.recompute,
        optimizer=assignment.optimizer,
        limits=limits,
    )
