"""What the fault that a peer reports leads to: the step once more, a plan that asks less of somebody, or the run's end. A part
of the state machine; pure. Faults whose cause lies between peers are ``troubles``'s."""

from __future__ import annotations

from collections.abc import Callable

from atoll.coordinator.run.context import RunContext
from atoll.coordinator.run.cycle import CURE_NOT_FINITE, StepCycle
from atoll.coordinator.run.events import FaultKind, FaultReported
from atoll.coordinator.run.loading import Loading
from atoll.coordinator.run.states import Phase, RunState
from atoll.coordinator.run.troubles import Troubles
from atoll.protocol.ids import PeerId
from atoll.protocol.quantities import format_bytes

TRANSIENT = frozenset({FaultKind.NOT_FINITE, FaultKind.LINK, FaultKind.CORRUPT, FaultKind.INTERNAL, FaultKind.OUTLIER})
"""Faults that running the step again may cure; the others come again."""


class Faults:
    """``fall_back`` leaves the plan, for the reason given."""

    def __init__(
        self,
        context: RunContext,
        cycle: StepCycle,
        troubles: Troubles,
        loading: Loading,
        fall_back: Callable[[str], None],
    ) -> None:
        self._context = context
        self._cycle = cycle
        self._troubles = troubles
        self._loading = loading
        self._fall_back = fall_back

    def reported(self, event: FaultReported) -> None:
        """A peer of the plan has said that something went wrong."""
        context = self._context
        if context.phase is Phase.KEEPING:
            return  # nothing is computed any more
        if context.plan is None or event.generation != context.generation or event.peer not in context.plan.peers:
            return
        blamed = event.accused or event.peer
        if event.fault is FaultKind.MEMORY and context.phase is not Phase.STORING:
            self._out_of_memory(event)
        elif event.fault not in TRANSIENT:
            context.fail(f"{context.described(blamed)} cannot run its stage: {event.reason}")
        elif self._is_dealt_with(event, blamed):
            pass
        elif self._is_about_a_link(event):
            self._troubles.link_failed(event.peer, blamed, event.reason)
        elif context.state is RunState.LOADING:
            self._loading.failed(f"{context.described(blamed)} could not be loaded: {event.reason}")
        elif context.phase is Phase.STORING:
            # Nothing is due on the links now; a peer that is really gone is noticed by its session.
            if event.fault is not FaultKind.LINK:
                context.fail(f"{context.described(blamed)} failed while it sent its weights: {event.reason}")
        else:
            self._cycle.void(event.reason, blamed, CURE_NOT_FINITE if event.fault is FaultKind.NOT_FINITE else "")

    def _out_of_memory(self, event: FaultReported) -> None:
        """The peer cannot do what it was planned for: plan again, with less of its memory."""
        context = self._context
        assert context.plan is not None
        stage = context.stage_of(event.peer)
        assert stage is not None
        if self._cycle.open is not None and context.phase.open:
            self._cycle.announce_void(event.reason, event.peer)
            # It has dropped what it kept beside its stage.
            context.holdings.keep_only(event.peer, context.names[stage])
        limit = int(context.settings.memory_factor * context.plan.stages[stage].of(event.peer).memory_bytes)
        lowered = context.roster.lower_memory(event.peer, limit, context.settings.max_shortages)
        after = f"is planned with {format_bytes(lowered)} from now on" if lowered else "is left out of plans from now on"
        self._fall_back(f"{context.described(event.peer)} ran out of memory and {after}: {event.reason}")

    def _is_dealt_with(self, event: FaultReported, sender: PeerId) -> bool:
        """Whether what was sent had the plan left, or the run end."""
        if event.fault is FaultKind.CORRUPT and self._context.phase is not Phase.STORING:
            return self._damaged(sender, event.reason)
        return event.fault is FaultKind.OUTLIER and self._troubles.outlier(sender, event.reason)

    def _is_about_a_link(self, event: FaultReported) -> bool:
        context = self._context
        due = context.state is RunState.LOADING or context.phase.open
        return due and event.fault is FaultKind.LINK and self._troubles.concerns_a_link(event)

    def _damaged(self, sender: PeerId, reason: str) -> bool:
        """Whether a damaged message was one too many; then the plan is left, and so is the sender's state, if it is that."""
        context = self._context
        loading = context.state is RunState.LOADING
        if not self._troubles.damaged(sender, reason):
            return False
        if loading:
            context.holdings.forget(sender)
        return True
