"""The change of a plan in the middle of a run: whether to look for a better one, and what the change took. A part of the state
machine; pure.

A look is taken beside training (ConsiderMove) and its result used between two steps. A plan that cannot go on, because a peer
is lost or out of memory, is left at once; then the machine plans as in the beginning. Either way the peers load what they lack
from those that hold it, and training goes on at the step after the last committed one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from atoll.coordinator.events import MovedEvent
from atoll.coordinator.run.context import RunContext
from atoll.coordinator.run.events import MoveJudged, PeerReady, PeersCompared, PlanMade
from atoll.coordinator.run.instructions import ConsiderMove
from atoll.coordinator.run.restraint import Restraint
from atoll.coordinator.run.states import RunState
from atoll.coordinator.run.surveying import Surveying
from atoll.protocol.ids import Generation, PeerId
from atoll.protocol.wording import listed


class Moving:
    """``asked``: the operator wants a look to be taken. ``stuck`` is called, with the reason, when there is no plan without
    the peers that leave."""

    def __init__(self, context: RunContext, stuck: Callable[[str], None] = lambda reason: None) -> None:
        self._context = context
        self._stuck = stuck
        self._look = 0
        self._stuck_with: frozenset[PeerId] | None = None
        self._restraint = Restraint(context.settings.restraint)
        self._surveying = Surveying(context)
        self._plan_since = Generation(0)
        self._looking: tuple[PeerId, ...] | None = None
        self._why = ""
        self._judged: MoveJudged | None = None
        self._stopped: float | None = None
        self._reason = ""
        self._fetched_bytes = 0
        self._fetch_seconds = 0.0
        self.asked = False

    def compared(self, event: PeersCompared) -> None:
        """What the last step showed of the peers' speeds."""
        self._restraint.compared(event.slowdowns)
        self.consider()

    def consider(self) -> None:
        """Look for a better plan, if there is reason to."""
        context = self._context
        if context.state is not RunState.TRAINING or context.plan is None:
            return
        if self._looking is not None and not all(map(context.roster.is_available, self._looking)):
            self._looking = self._judged = None  # at peers that are gone, or about to go, meanwhile
        if self._looking is not None or self._judged is not None:
            return
        offers = context.roster.offers()
        present = tuple(offer.name for offer in offers)
        reason = self._reason_to_look(present)
        if reason is None:
            self._surveying.consider()
            return
        self._surveying.asked(present)
        self.asked, self._why, self._looking = False, reason, present
        self._look += 1
        left = context.settings.steps - context.committed
        context.emit(
            ConsiderMove(
                since=self._plan_since,
                plan=context.plan,
                peers=offers,
                steps_left=left,
                look=self._look,
                broken=context.links.broken(context.now),
            )
        )

    def _reason_to_look(self, present: tuple[PeerId, ...]) -> str | None:
        context = self._context
        leavers = self._leavers()
        if leavers and frozenset(present) != self._stuck_with:
            return f"{listed(leavers)} leave{'s' if len(leavers) == 1 else ''}"
        if self.asked:
            return "the operator asked"
        return None if leavers else self._restraint.reason(context.committed, context.now, present)

    def _leavers(self) -> tuple[PeerId, ...]:
        """Those of the plan's peers that are about to go."""
        context = self._context
        return tuple(peer for peer in context.plan.peers if not context.roster.is_available(peer)) if context.plan else ()

    def judged(self, event: MoveJudged) -> None:
        """A look has come to its end. One at a plan that is over meanwhile is nothing to us."""
        if event.since != self._plan_since or event.look != self._look or self._looking is None:
            return
        if event.proposed is not None:
            self._judged = event
            return
        looked, self._looking = self._looking, None
        if self._leavers():
            self._stuck_with = frozenset(looked)
            self._stuck(event.reason)
        else:
            self._restraint.kept(looked)

    def take(self) -> PlanMade | None:
        """Between two steps: the plan to change to, if there is one and its peers are still here."""
        event, self._judged = self._judged, None
        if event is None or event.proposed is None:
            return None
        if not all(map(self._context.roster.is_available, event.proposed.plan.peers)):
            self._looking = None
            self.consider()
            return None
        self.interrupted(f"{self._why}: {event.reason}")
        return event.proposed

    def looked_at(self) -> tuple[PeerId, ...]:
        """The peers in whose knowledge the plan was made that :meth:`take` gave."""
        return self._looking or ()

    def interrupted(self, reason: str) -> None:
        """The plan is left because of ``reason``; training stands still from now on."""
        if self._stopped is None:
            self._stopped, self._reason = self._context.now, reason

    def planned(self, peers: Iterable[PeerId], *, hasty: bool = False) -> None:
        """A new plan is being loaded, made in the knowledge of ``peers``; ``hasty``: better ones were not looked for."""
        self._plan_since = self._context.generation
        self._looking = self._judged = self._stuck_with = None
        peers = tuple(peers)
        self._restraint.planned(peers, hasty=hasty)
        if not hasty:
            self._surveying.asked(peers)
        self._fetched_bytes, self._fetch_seconds = 0, 0.0

    def forget(self, peer: PeerId) -> None:
        """The peer is gone."""
        self._surveying.forget(peer)

    def ready(self, event: PeerReady) -> None:
        """A peer has its stage."""
        self._fetched_bytes += event.fetched_bytes
        self._fetch_seconds = max(self._fetch_seconds, event.fetch_seconds)

    def arrived(self, *, went_back: bool) -> tuple[int, float]:
        """All peers have their stages; returns how many bytes changed hands and how long training stood still. That is told
        here unless the run ``went_back``, which is another story."""
        context, stopped, self._stopped = self._context, self._stopped, None
        seconds = context.now - stopped if stopped is not None else 0.0
        if stopped is not None and context.journal_step > 0:
            self._restraint.moved(context.committed, context.now, seconds)
            if not went_back:
                self._tell_of_move(seconds)
        return self._fetched_bytes, seconds

    def _tell_of_move(self, seconds: float) -> None:
        context = self._context
        context.announce(
            MovedEvent(
                generation=context.generation,
                step=context.committed,
                bytes=self._fetched_bytes,
                seconds=seconds,
                fetch_seconds=self._fetch_seconds,
                reason=self._reason,
            )
        )
