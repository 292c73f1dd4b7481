"""Peers that leave in order: told by their owners, a notice of the provider, or removed by the operator. A part of the state
machine; pure.

Who leaves is planned with no more, from the moment it says so. While it holds a stage, training goes on with it; ``moving``
looks for a plan without it, which is taken at the end of a step; it lends what it holds until others have it, on their disks
too where it is of a snapshot (``rescue``), and is let go then. Where nobody can take its layers it is told so at once and stays
for its time, for somebody may still join. When its time is over it goes as if it were lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.coordinator.run.context import RunContext
from atoll.coordinator.run.events import PeerLeaving
from atoll.coordinator.run.instructions import LetGo, RefuseHandOver
from atoll.coordinator.run.states import RunState
from atoll.protocol.ids import PeerId

GRACE_SECONDS = 5.0
"""For a peer whose own clock says when its time is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Departure:
    reason: str
    until: float
    removed: bool


class Leaving:
    """``forget`` is called for a peer that is let go, ``gone`` for one whose time is over, with the reason; ``is_asked`` says
    whether others fetch what a peer has on its disk."""

    def __init__(
        self,
        context: RunContext,
        forget: Callable[[PeerId], None],
        gone: Callable[[PeerId, str], None],
        is_asked: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        self._context = context
        self._forget = forget
        self._gone = gone
        self._is_asked = is_asked
        self._departures: dict[PeerId, _Departure] = {}

    def announced(self, event: PeerLeaving) -> None:
        """A peer that is here leaves; it may say so again, with less time."""
        context = self._context
        until = context.now + (event.hand_over_seconds + GRACE_SECONDS if event.hand_over_seconds > 0.0 else 0.0)
        before = self._departures.get(event.peer)
        if before is not None:
            until = min(until, before.until)
        removed = event.removed or (before is not None and before.removed)
        self._departures[event.peer] = _Departure(reason=event.reason, until=until, removed=removed)
        why = f"it leaves ({event.reason}); what it holds goes to others within {event.hand_over_seconds:.0f} s"
        context.announce(*context.roster.leave_out(event.peer, why, leaving=True))

    def settle(self) -> None:
        """Let go whom the run does not need, and whose time is over."""
        context = self._context
        for peer, departure in list(self._departures.items()):
            if not context.roster.is_leaving(peer):
                del self._departures[peer]
            elif not self._is_needed(peer):
                self._let_go(peer, departure)
            elif context.now >= departure.until:
                del self._departures[peer]
                self._end(peer, departure)
                self._gone(peer, departure.reason)

    def nobody_takes_over(self, reason: str) -> None:
        """There is no plan without those that leave."""
        needed = tuple(peer for peer in self._departures if self._context.roster.is_leaving(peer) and self._is_needed(peer))
        if needed:
            self._context.emit(RefuseHandOver(peers=needed, reason=reason))

    def _is_needed(self, peer: PeerId) -> bool:
        context = self._context
        if context.plan is not None and peer in context.plan.peers:
            return True
        if context.state is RunState.LOADING and context.holdings.names_of(peer):
            return True  # somebody may be about to fetch from it
        return bool(context.holdings.uncovered(without=peer)) or self._is_asked(peer)

    def _let_go(self, peer: PeerId, departure: _Departure) -> None:
        context = self._context
        del self._departures[peer]
        self._end(peer, departure)
        self._forget(peer)
        context.announce(*context.roster.remove(peer, departure.reason, left=True))

    def _end(self, peer: PeerId, departure: _Departure) -> None:
        self._context.emit(LetGo(peer=peer, reason=departure.reason, removed=departure.removed))
