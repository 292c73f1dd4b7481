"""Weights on their way into a file: when the operator wants them in the middle of a run, and when the run ends. A part of the
state machine; pure."""

from __future__ import annotations

from collections.abc import Callable

from atoll.coordinator.events import FinishedEvent, SnapshotEvent
from atoll.coordinator.run.context import RunContext
from atoll.coordinator.run.cycle import StepCycle
from atoll.coordinator.run.events import PeerStored, StopAsked, StorePurpose, WeightsWritten
from atoll.coordinator.run.instructions import AskStore, CloseWeights, EndRun, KeepSnapshots
from atoll.coordinator.run.states import Phase, RunState
from atoll.protocol.ids import PeerId


class Storing:
    """``go_on`` is called when training may go on, ``for_store`` asked whether a snapshot is on its way into the store.
    ``purpose`` is what weights are stored for at the moment, ``export_asked``
    that they shall be once more."""

    def __init__(self, context: RunContext, cycle: StepCycle, go_on: Callable[[], None], for_store: Callable[[], bool]) -> None:
        self._context = context
        self._cycle = cycle
        self._go_on = go_on
        self._for_store = for_store
        self._weights = ""
        self._stop_asked: str | None = None
        self._training_since: float | None = None
        self.export_asked = False
        self.purpose: StorePurpose | None = None

    def training_began(self) -> None:
        """All stages are loaded; the first time counts."""
        if self._training_since is None:
            self._training_since = self._context.now

    def stop(self, event: StopAsked) -> None:
        """End the run, with the weights where there are trained ones and it is only a matter of time."""
        context = self._context
        if context.phase is Phase.KEEPING:
            self._end(f"the run was to end before it was in the store ({event.reason})")
            return
        hopeless = context.state is RunState.WAITING and not context.roster.offers()
        if event.keep_weights and context.journal_step > 0 and not hopeless:
            self._stop_asked = event.reason
        elif event.keep_weights:
            context.stop(event.reason)
        else:
            context.fail(event.reason)

    def begin_if_due(self) -> bool:
        """Between two steps: store the weights, if that is what comes next; never those of a step that is done again."""
        context = self._context
        if context.replaying:
            return False
        if self._stop_asked is not None:
            context.enter(RunState.FINISHING, context.settings.deadlines.stored_seconds, self._stop_asked)
            self._begin(StorePurpose.STOP)
        elif self._cycle.owed_evaluation:
            return False
        elif context.committed == context.settings.steps:
            context.enter(RunState.FINISHING, context.settings.deadlines.stored_seconds)
            self._begin(StorePurpose.FINISH)
        elif self.export_asked:
            self.export_asked = False
            self._begin(StorePurpose.EXPORT)
        return self.purpose is not None

    def interrupted(self) -> None:
        """What was being stored cannot be completed: it is done once more when the run is there again."""
        self.export_asked |= self.purpose is StorePurpose.EXPORT
        self.purpose = None

    def needs(self, peer: PeerId) -> bool:
        """Whether what is being stored would not be complete without this peer of the plan."""
        return peer in self._context.pending or self.purpose not in (StorePurpose.FINISH, StorePurpose.STOP)

    def stored(self, event: PeerStored) -> None:
        """All weights of a peer are here."""
        context = self._context
        mine = event.generation == context.generation and event.peer in context.pending
        if context.phase is not Phase.STORING or not mine:
            return
        context.pending.discard(event.peer)
        context.wait_at_most(context.settings.deadlines.stored_seconds)
        if not context.pending:
            context.emit(CloseWeights())

    def written(self, event: WeightsWritten) -> None:
        """The file is complete."""
        context = self._context
        if context.phase is not Phase.STORING or context.pending:
            return
        if self.purpose is StorePurpose.EXPORT:
            self.purpose = None
            context.leave_phase()
            self._go_on()
        else:
            self._weights = event.path
            context.enter_phase(Phase.KEEPING, context.settings.deadlines.keeping_seconds)
            self.settle()

    def settle(self) -> None:
        """After every event: the run that has its weights ends once its last snapshot is where it should be, or cannot be."""
        context = self._context
        if context.phase is Phase.KEEPING and (not self._for_store() or context.now >= context.deadline):
            seconds = context.settings.deadlines.keeping_seconds
            self._end(f"it was not in the store {seconds:.0f} s after the weights were written")

    def _end(self, otherwise: str) -> None:
        """``otherwise``: why it is not waited for the store any longer."""
        context = self._context
        purpose, self.purpose = self.purpose, None
        if self._for_store():
            context.announce(SnapshotEvent(step=context.committed, bytes=0, seconds=0.0, failure=otherwise))
        context.leave_phase()
        if purpose is StorePurpose.STOP:
            done = f"after step {context.committed} of {context.settings.steps}"
            context.stop(f"{context.reason}, {done}; the weights are in {self._weights}")
        else:
            self._finish(self._weights)

    def _begin(self, purpose: StorePurpose) -> None:
        context = self._context
        assert context.plan is not None
        self.purpose = purpose
        context.emit(AskStore(generation=context.generation, step=context.committed, purpose=purpose))
        context.enter_phase(Phase.STORING, context.settings.deadlines.stored_seconds, context.plan.leaders)

    def _finish(self, weights: str) -> None:
        context, cycle = self._context, self._cycle
        assert self._training_since is not None
        seconds = context.now - self._training_since
        context.enter(RunState.FINISHED, float("inf"))
        context.announce(
            FinishedEvent(
                steps=context.committed,
                loss=cycle.loss if cycle.loss is not None else float("nan"),
                seconds=seconds,
                tokens_per_second=cycle.num_tokens / seconds if seconds > 0 else 0.0,
                weights=weights,
            )
        )
        if context.snapshots.steps:  # nobody will go back to one any more
            context.snapshots.dropped(())
            context.emit(KeepSnapshots(steps=()))
        context.emit(EndRun(finished=True, reason=f"finished after {context.committed} steps"))
