"""Replicas that fall behind are dealt fewer microbatches: between two steps, nothing moves for it. A part of the state machine;
pure. When it pays is decided in ``planning/redealing``."""

from __future__ import annotations

from dataclasses import replace

from atoll.coordinator.planning.plan import Plan
from atoll.coordinator.planning.redealing import STEPS_KEPT, Redealing, Redealt
from atoll.coordinator.run.context import RunContext
from atoll.coordinator.run.events import PeersCompared
from atoll.coordinator.run.loading import Loading
from atoll.coordinator.run.moving import Moving
from atoll.coordinator.run.states import RunState


class Dealing:
    """Told what each step showed of the peers' speeds; between two steps asked what to change."""

    def __init__(self, context: RunContext, loading: Loading, moving: Moving) -> None:
        self._context = context
        self._loading = loading
        self._moving = moving
        self._redealing = Redealing()
        self._plan: Plan | None = None
        self._changes: tuple[Redealt, ...] = ()

    def compared(self, event: PeersCompared) -> None:
        """After a committed step."""
        context = self._context
        if context.state is not RunState.TRAINING or context.plan is None:
            return
        if context.plan is not self._plan:
            self._redealing, self._plan = Redealing(), context.plan
        if context.settings.steps - context.committed >= STEPS_KEPT:
            self._changes = self._redealing.committed(context.plan, event.slowdowns) or self._changes

    def change(self) -> bool:
        """Between two steps: whether another deal is being loaded now."""
        context, made = self._context, self._loading.made
        changes, self._changes = self._changes, ()
        if not changes or made is None or context.plan is not self._plan or context.plan is None:
            return False
        if not all(map(context.roster.is_available, context.plan.peers)):
            return False  # somebody is about to go, and then all is dealt anew
        plan = context.plan
        for change in changes:
            stage = plan.stages[change.stage]
            plan = plan.having(stage.dealt(stage.replicas, change.deal))
        self._plan = plan
        self._moving.interrupted("; ".join(change.reason for change in changes))
        context.grow_generation()
        self._loading.begin(replace(made, generation=context.generation, plan=plan), self._loading.planned_with)
        return True
