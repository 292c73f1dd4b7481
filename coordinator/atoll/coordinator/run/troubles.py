"""Faults whose cause lies between peers or in one that is here all the same: links, damaged messages, steps that never end. A
part of the state machine; pure.

Who is gone is noticed by its session. Here nobody is: a link may come back, so it is tried again, then gone around, and never
ends a run by itself; a peer whose messages are damaged, or who never comes to the end of a step, is left out of plans."""

from __future__ import annotations

from collections.abc import Callable

from atoll.coordinator.planning.avoidance import describe
from atoll.coordinator.run.context import RunContext
from atoll.coordinator.run.cycle import CURE_NOT_FINITE, StepCycle
from atoll.coordinator.run.events import FaultReported
from atoll.coordinator.run.states import RunState
from atoll.coordinator.run.suspects import Offence, Suspects
from atoll.coordinator.run.waiting import stuck_pair, waiting
from atoll.protocol.ids import PeerId

_CURE = "see to its memory and its network"
_CURES = {Offence.OUTLIER: "see whom it belongs to and to its memory, and whether the loss grows"}


class Troubles:
    """``fall_back`` leaves the plan, for the reason given."""

    def __init__(self, context: RunContext, cycle: StepCycle, fall_back: Callable[[str], None]) -> None:
        self._context = context
        self._cycle = cycle
        self._fall_back = fall_back
        self._suspects = Suspects()
        self._committed = context.committed
        self._refused_after = context.committed
        self._refused: PeerId | None = None

    def settle(self) -> None:
        """After every event: a commit says that things go well."""
        context = self._context
        if context.committed > self._committed:
            context.links.committed()
            self._suspects.committed()
        self._committed = context.committed

    def forget(self, peer: PeerId) -> None:
        """The peer is gone."""
        self._context.links.forget(peer)
        self._suspects.forget(peer)

    def concerns_a_link(self, event: FaultReported) -> bool:
        """Whether a fault is about what lies between two peers that are here."""
        accused = event.accused
        return accused is not None and accused != event.peer and self._context.roster.is_present(accused)

    def link_failed(self, one: PeerId, other: PeerId, reason: str) -> None:
        """Void and try again, or leave the plan for one that does without the link."""
        context = self._context
        broken = context.links.faulted(one, other, context.now)
        since = context.links.trouble_since
        limit = context.settings.deadlines.waiting_seconds
        link = describe([frozenset((one, other))])
        if since is not None and context.now - since > limit:
            hours = f"{limit / 3600.0:.3g} h"
            context.fail(f"no step could be done for {hours} because of broken links, at last {link}: {reason}")
        elif broken or context.state is RunState.LOADING:
            self._cycle.announce_void(reason, other)
            self._fall_back(f"the link {link} is not counted on for a while: {reason}" if broken else f"{reason} ({link})")
        else:
            self._cycle.void(reason, other, counts=False)

    def damaged(self, sender: PeerId, reason: str) -> bool:
        """A peer's messages arrived damaged. True when the plan was left because of it."""
        return self._leave_out(sender, Offence.DAMAGED, reason)

    def outlier(self, sender: PeerId, reason: str) -> bool:
        """A peer's values were refused: they are far from all before. True when the plan was left, or the run ended, because of
        it. Where another peer then comes to such values at the same step, it is the training that leads there."""
        context = self._context
        earlier = self._refused if self._refused_after == context.committed else None
        self._refused_after, self._refused = context.committed, sender
        if earlier is not None and earlier != sender:
            context.fail(
                f"after step {context.committed} the values of {context.described(earlier)} were refused, and then those of "
                f"{context.described(sender)}: that two peers come to them says that neither is to blame ({reason})"
                f"{CURE_NOT_FINITE}"
            )
            return True
        return self._leave_out(sender, Offence.OUTLIER, reason)

    def step_overdue(self) -> None:
        """The open step took too long: blame whom the others wait for, or the link between two who wait for each other."""
        context, cycle = self._context, self._cycle
        assert cycle.open is not None
        took = context.now - cycle.open.started
        if not cycle.open.missing:
            context.fail(f"the data gave no batch for step {cycle.open.step} in {took:.0f} s")
            return
        pair = stuck_pair(context, cycle.open.missing)
        if pair is not None:
            self.link_failed(*pair, f"for {took:.0f} s each of two peers waited for what the other had sent")
            return
        blamed = next(iter(waiting(context, cycle).peers), None)
        reason = f"it did not do its part of the step in {took:.0f} s"
        if blamed is None or not self._leave_out(blamed, Offence.STUCK, reason):
            cycle.void(reason, blamed)

    def _leave_out(self, peer: PeerId, offence: Offence, reason: str) -> bool:
        context = self._context
        if not context.roster.is_present(peer) or not self._suspects.offended(peer, offence):
            return False
        who = context.described(peer)
        self._cycle.announce_void(reason, peer)
        why = f"left out of plans, for it {offence}; {_CURES.get(offence, _CURE)}, then let it join again"
        context.announce(*context.roster.leave_out(peer, why))
        self._fall_back(f"{who} is left out of plans from now on, for it {offence}: {reason}")
        return True
