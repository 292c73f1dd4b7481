"""From a plan to stages that can train: who is told what it gets, who is ready, and what follows when one never is. A part of
the state machine; pure."""

from __future__ import annotations

from collections.abc import Callable

from atoll.coordinator.events import PlanEvent
from atoll.coordinator.run.context import RunContext
from atoll.coordinator.run.cycle import StepCycle
from atoll.coordinator.run.events import PeerReady, PlanMade
from atoll.coordinator.run.instructions import Assign
from atoll.coordinator.run.moving import Moving
from atoll.coordinator.run.recovery import Recovery
from atoll.coordinator.run.roster import PeerState
from atoll.coordinator.run.states import RunState
from atoll.protocol.ids import PeerId


class Loading:
    """``plan_again`` leaves the plan, for a reason; ``training_begins`` is called when every stage is there, and ``proceed``
    thereafter, for the next step. ``made`` is the plan that was loaded last, ``planned_with`` whom it was made for."""

    def __init__(
        self,
        context: RunContext,
        cycle: StepCycle,
        moving: Moving,
        recovery: Recovery,
        *,
        plan_again: Callable[[str], None],
        training_begins: Callable[[], None],
        proceed: Callable[[], None],
    ) -> None:
        self._context = context
        self._cycle = cycle
        self._moving = moving
        self._recovery = recovery
        self._plan_again = plan_again
        self._training_begins = training_begins
        self._proceed = proceed
        self._num_failures = 0
        self.made: PlanMade | None = None
        self.planned_with: tuple[PeerId, ...] = ()

    def begin(self, made: PlanMade, planned_with: tuple[PeerId, ...]) -> None:
        """Have each peer of a plan, which was made in the knowledge of certain peers, get its stage."""
        context, plan = self._context, made.plan
        self.made, self.planned_with = made, planned_with
        context.plan, context.names = plan, made.names
        context.enter(RunState.LOADING, context.settings.deadlines.loading_seconds)
        context.pending = set(plan.peers)
        self._cycle.new_generation()
        self._cycle.loads()
        context.resuming, context.gathered = False, True
        context.left_behind = None  # who held that is told to drop it
        self._moving.planned(planned_with, hasty=made.hasty)
        self._recovery.planned()
        context.emit(
            Assign(
                generation=context.generation,
                plan=plan,
                committed=context.committed,
                holders=context.holdings.holders(),
                on_disks=context.on_disks(),
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

    def ready(self, event: PeerReady) -> None:
        """A peer has its stage; with the last one training begins."""
        context = self._context
        mine = event.generation == context.generation and event.peer in context.pending
        stage = context.stage_of(event.peer)
        if context.state is not RunState.LOADING or not mine or stage is None:
            return
        context.pending.discard(event.peer)
        context.announce(*context.roster.change(event.peer, PeerState.READY))
        self._moving.ready(event)
        if context.committed:
            context.holdings.add(event.peer, context.names[stage])
        if not context.pending:
            self._num_failures = 0
            self._training_begins()
            context.enter(RunState.TRAINING, context.settings.deadlines.step_seconds)
            fetched_bytes, stopped_seconds = self._moving.arrived(went_back=self._recovery.went_back)
            self._recovery.arrived(fetched_bytes, stopped_seconds)
            self._proceed()

    def failed(self, reason: str) -> None:
        """A peer could not load its stage; after several times in a row the run cannot go on."""
        self._num_failures += 1
        if self._num_failures >= self._context.settings.max_voids:
            self._context.fail(f"{reason} (tried {self._num_failures} times)")
        else:
            self._plan_again(reason)
