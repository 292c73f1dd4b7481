"""The loss of a replica: the others of its stage hold all that it held, so they go on with its share of the microbatches. A
part of the state machine; pure."""

from __future__ import annotations

from dataclasses import replace

from atoll.coordinator.run.context import RunContext
from atoll.coordinator.run.cycle import StepCycle
from atoll.coordinator.run.loading import Loading
from atoll.coordinator.run.moving import Moving
from atoll.coordinator.run.recovery import Recovery
from atoll.coordinator.run.states import RunState
from atoll.coordinator.run.storing import Storing
from atoll.protocol.ids import PeerId


class Survivors:
    """Asked before a plan is left because of a peer that is gone."""

    def __init__(
        self, context: RunContext, cycle: StepCycle, *, loading: Loading, moving: Moving, recovery: Recovery, storing: Storing
    ) -> None:
        self._context = context
        self._cycle = cycle
        self._loading = loading
        self._moving = moving
        self._recovery = recovery
        self._storing = storing

    def take_over(self, lost: PeerId, reason: str) -> bool:
        """Whether they go on: nothing is planned anew, no state moves, and the open step begins again among those that are
        left."""
        context, made = self._context, self._loading.made
        if context.state is not RunState.TRAINING or context.plan is None or made is None:
            return False
        plan = context.plan.without(lost)
        if plan is None:
            return False
        told = zip(made.summaries, plan.stages, strict=True)
        summaries = tuple(replace(summary, peers=stage.replicas) for summary, stage in told)
        self._moving.interrupted(reason)
        self._recovery.interrupted(reason)
        self._cycle.announce_void(reason, None)
        self._cycle.abandon()
        self._storing.interrupted()
        context.grow_generation()
        left = tuple(peer for peer in self._loading.planned_with if peer != lost)
        self._loading.begin(replace(made, generation=context.generation, plan=plan, summaries=summaries), left)
        return True
