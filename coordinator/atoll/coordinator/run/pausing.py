"""When a run that could not go on tries again, and how long it waits at all. A part of the state machine; pure.

A run pauses when no plan satisfies the limits: too little memory, or a link that no plan does without is broken. It says what
is missing and goes on by itself: at once when somebody joins or leaves, and where a link is the cause also after a while,
longer each time, for links come back without a word."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.coordinator.events import PausedEvent, ResumedEvent
from atoll.coordinator.run.context import RunContext
from atoll.coordinator.run.states import RunState
from atoll.protocol.ids import PeerId


class Pausing:
    """``paused``: the last look for a plan found none."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._tried_with: frozenset[PeerId] | None = None
        self._again_at: float | None = None
        self._since = context.now
        self.paused = False

    def progress(self) -> str:
        """When the run tries again by itself, and when it gives up; empty while it is not paused."""
        context = self._context
        if not self.paused or context.state is not RunState.WAITING:
            return ""
        again = f"tries again in {max(0.0, self._again_at - context.now):.0f} s, " if self._again_at is not None else ""
        return f"; it {again}gives up in {max(0.0, context.deadline - context.now) / 3600.0:.1f} h"

    def may_plan(self, present: Iterable[PeerId]) -> bool:
        """Whether there is a reason to look for a plan for these peers."""
        if frozenset(present) != self._tried_with:
            return True
        return self._again_at is not None and self._context.now >= self._again_at

    def refused(self, peers: Iterable[PeerId], reason: str) -> None:
        """There is no plan for these peers."""
        context = self._context
        self._tried_with = frozenset(peers)
        self._again_at = context.now + context.links.next_pause_seconds() if context.links.broken(context.now) else None
        if not self.paused:
            self.paused, self._since = True, context.now
            context.announce(PausedEvent(reason=reason))
        left = context.settings.deadlines.waiting_seconds - (context.now - self._since)
        context.enter(RunState.WAITING, max(0.0, left), reason)

    def hold(self, peers: Iterable[PeerId]) -> None:
        """The plan for these peers could not be loaded: not the same again at once."""
        context = self._context
        self._tried_with, self._again_at = frozenset(peers), context.now + context.links.next_pause_seconds()

    def release(self) -> None:
        """Things have changed: the same peers may be planned for again."""
        self._tried_with = self._again_at = None

    def planned(self) -> None:
        """There is a plan."""
        self.release()
        if self.paused:
            self.paused = False
            self._context.announce(ResumedEvent(reason="there is a plan for the peers that are here now"))

    def joined(self) -> None:
        """Somebody came who may help: the wait begins anew."""
        self._since = self._context.now
