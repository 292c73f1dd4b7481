"""Who is here: peers that join, come back, leave in order or are lost, and what follows for the run. A part of the state
machine; pure."""

from __future__ import annotations

from collections.abc import Callable

from atoll.coordinator.run.context import RunContext
from atoll.coordinator.run.cycle import StepCycle
from atoll.coordinator.run.events import PeerGone, PeerJoined, PeerLeaving
from atoll.coordinator.run.instructions import ExpelPeer
from atoll.coordinator.run.leaving import Leaving
from atoll.coordinator.run.moving import Moving
from atoll.coordinator.run.pausing import Pausing
from atoll.coordinator.run.recovery import Recovery
from atoll.coordinator.run.resuming import Held
from atoll.coordinator.run.roster import PeerState
from atoll.coordinator.run.snapshotting import Snapshotting
from atoll.coordinator.run.states import Phase, RunState
from atoll.coordinator.run.storing import Storing
from atoll.coordinator.run.survivors import Survivors
from atoll.coordinator.run.troubles import Troubles
from atoll.protocol.ids import PeerId


class Attendance:
    """``fall_back`` leaves the plan, for the reason given."""

    def __init__(
        self,
        context: RunContext,
        *,
        cycle: StepCycle,
        recovery: Recovery,
        snapshotting: Snapshotting,
        leaving: Leaving,
        moving: Moving,
        pausing: Pausing,
        storing: Storing,
        troubles: Troubles,
        survivors: Survivors,
        fall_back: Callable[[str], None],
    ) -> None:
        self._context = context
        self._cycle = cycle
        self._recovery = recovery
        self._snapshotting = snapshotting
        self._leaving = leaving
        self._moving = moving
        self._pausing = pausing
        self._storing = storing
        self._troubles = troubles
        self._survivors = survivors
        self._fall_back = fall_back
        self._joined = context.now
        self._word_expected = float("-inf")

    def settled(self, num_peers: int) -> bool:
        """Whether ``num_peers``, who are here, are likely to be all that will be in a moment. Where a lost peer is to be
        replaced, or a run is taken up, and they are as many as had a stage, nobody waits for those that are just coming."""
        context, plan = self._context, self._context.last_plan
        enough = context.in_haste and plan is not None and num_peers >= len(plan.peers)
        since = self._word_expected if enough else max(self._joined, self._word_expected)
        return context.now - since >= context.settings.deadlines.settle_seconds

    def let_sessions_tell(self) -> None:
        """Somebody's session may be about to tell that its peer is gone: the peers have not settled before."""
        self._word_expected = self._context.now

    def joined(self, event: PeerJoined) -> None:
        """A peer is here, or here again."""
        context = self._context
        early = context.state in (RunState.WAITING, RunState.PLANNING)
        context.announce(*context.roster.join(event.offer, PeerState.JOINED if early else PeerState.SPARE))
        context.snapshots.joined(event.offer.name, event.snapshots)
        self._snapshotting.joined(event)
        self._joined = context.now
        self._take_back(event.offer.name, event.held)
        self._pausing.joined()
        if context.state is RunState.WAITING:
            context.wait_at_most(context.settings.deadlines.waiting_seconds)

    def _take_back(self, peer: PeerId, held: Held | None) -> None:
        self._recovery.joined(peer, held)
        left = self._context.left_behind
        if left is not None and left.covers(self._context.holdings.essential):
            self._recovery.returned()
            self._cycle.returned()
            self._fall_back(f"{peer} is back with what was missing of step {left.moment.step}")

    def gone(self, event: PeerGone) -> None:
        """A peer is here no more."""
        context, peer, reason = self._context, event.peer, event.reason
        if not context.roster.is_present(peer):
            return
        who = context.described(peer)
        planned = context.plan is not None and peer in context.plan.peers
        held = context.holdings.names_of(peer)
        how = f"{who} left ({reason})" if event.left else f"{who} was lost ({reason})"
        context.announce(*context.roster.remove(peer, reason, left=event.left))
        self.forget(peer, lost_stage=planned and not event.left)
        if context.phase is Phase.KEEPING:
            matters = False  # the weights are written; of the last snapshot others may have a copy
        elif context.phase is Phase.STORING:
            matters = planned and self._storing.needs(peer)
        else:
            # Where a donor is lost whose names others have too, its borrowers ask these.
            matters = planned or context.state is RunState.PLANNING or bool(context.plan is not None and context.uncovered())
        if matters and (planned or held):
            self._recovery.lost(peer, held if event.may_return else frozenset(), event.silent_seconds)
        if matters and not self._survivors.take_over(peer, how):
            self._fall_back(how)

    def forget(self, peer: PeerId, *, lost_stage: bool = False) -> None:
        """The peer is gone, and with it what it had."""
        context = self._context
        context.holdings.forget(peer)
        context.snapshots.gone(peer)
        self._snapshotting.gone(peer, lost_stage=lost_stage)
        context.stale.discard(peer)
        if context.left_behind is not None:
            context.left_behind.forget(peer)
        self._troubles.forget(peer)
        self._moving.forget(peer)

    def left(self, peer: PeerId, reason: str) -> None:
        """A peer left in order, though it is needed: its time is over."""
        self.gone(PeerGone(peer=peer, reason=reason, left=True))

    def leaves(self, event: PeerLeaving) -> None:
        """The peer goes, but not yet: plan without it while it still works and lends."""
        context = self._context
        if not context.roster.is_present(event.peer):
            return
        who = context.described(event.peer)
        self._leaving.announced(event)
        planned = context.plan is not None and event.peer in context.plan.peers
        if (context.state is RunState.LOADING and planned) or context.state is RunState.PLANNING:
            self._fall_back(f"{who} leaves ({event.reason})")
        else:
            self._moving.consider()

    def expel(self, peer: PeerId, reason: str) -> None:
        """Take a peer for lost, whatever it thinks itself."""
        self._context.emit(ExpelPeer(peer=peer, reason=reason))
        self.gone(PeerGone(peer=peer, reason=reason))
