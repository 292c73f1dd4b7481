"""Whom the run waits for, and for what, in a sentence. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from atoll.coordinator.run.context import RunContext
from atoll.coordinator.run.cycle import StepCycle
from atoll.coordinator.run.states import Phase, RunState
from atoll.protocol.ids import PeerId
from atoll.protocol.wording import listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """``what`` is the rest of a sentence that begins with "the run". ``peers`` are the ones to look at; none where the run
    waits for newcomers or for work of the coordinator's own."""

    what: str
    peers: tuple[PeerId, ...] = ()

    def __str__(self) -> str:
        return self.what


def waiting(context: RunContext, cycle: StepCycle) -> Waiting:
    """What the run waits for now."""
    match context.state:
        case RunState.WAITING:
            return Waiting(what=_before_the_plan(context, cycle))
        case RunState.PLANNING:
            return Waiting(what=context.doing or f"places the model on {_count(len(context.roster.offers()), 'peer')}")
        case RunState.LOADING:
            return _for_peers(context, context.pending, "waits for {} to load")
        case RunState.TRAINING | RunState.FINISHING:
            return _while_training(context, cycle)
        case _:
            return Waiting(what=f"has {context.state}")


def _before_the_plan(context: RunContext, cycle: StepCycle) -> str:
    present = len(context.roster.offers())
    needed = context.needed_peers
    missing = needed - present
    if away := context.returning.away(context.roster, context.now):
        what = f"waits for {listed(away)} to come back, with a stage of the plan before the coordinator's restart"
    elif missing > 0:
        what = f"waits for {_count(missing, 'more peer')} to join ({present} of {needed} are here)"
    elif cycle.trainable is None:
        what = "traces the model"
    elif context.reason:
        return f"is paused: {context.reason}"
    else:
        what = "waits a moment for more peers to join"
    return f"{what}; {context.reason}" if context.reason else what


def _while_training(context: RunContext, cycle: StepCycle) -> Waiting:
    if context.phase is Phase.STORING:
        return _for_peers(context, context.pending, "waits for {} to send its weights", "writes the weights")
    if context.phase is Phase.KEEPING:
        left = max(0.0, context.deadline - context.now)
        return Waiting(what=f"has its weights, and waits up to {left:.0f} s for its last snapshot to be in the store")
    if cycle.open is None:
        return Waiting(what="is between two steps")
    step = f"evaluation after step {cycle.open.step}" if cycle.open.evaluation else f"step {cycle.open.step}"
    if context.replaying:
        step += f" (done again, as all up to {context.journal_step})"
    if context.phase is Phase.VOIDING:
        return _for_peers(context, context.pending, f"waits for {{}} to drop {step}, void because {cycle.void_reason}")
    culprits = dict.fromkeys(_last_in_chain(context, peer) for peer in cycle.open.missing)
    return _for_peers(context, culprits, f"waits for {{}} in {step}", f"waits for the data of {step}")


def _for_peers(context: RunContext, peers: Iterable[PeerId], sentence: str, without: str = "goes on") -> Waiting:
    order = context.plan.peers if context.plan is not None else ()
    chosen = tuple(sorted(peers, key=lambda peer: order.index(peer) if peer in order else len(order)))
    if not chosen:
        return Waiting(what=without)
    return Waiting(what=sentence.format(listed(_described(context, peer) for peer in chosen)), peers=chosen)


def _described(context: RunContext, peer: PeerId) -> str:
    phase = context.roster.phase(peer)
    stage = context.stage_of(peer)
    details = ", ".join(filter(None, (f"stage {stage}" if stage is not None else "", phase)))
    return f"{peer} ({details})" if details else str(peer)


def stuck_pair(context: RunContext, missing: Iterable[PeerId]) -> tuple[PeerId, PeerId] | None:
    """Two peers of the plan that wait for each other, by what they say: messages between them are lost."""
    roster = context.roster
    for peer in missing:
        last = _last_in_chain(context, peer)
        other = roster.waiting_for(last)
        if other is not None and context.stage_of(other) is not None and roster.waiting_for(other) == last:
            return last, other
    return None


def _last_in_chain(context: RunContext, peer: PeerId) -> PeerId:
    """The peer that ``peer`` waits for in the end, by what they say themselves."""
    seen = {peer}
    while True:
        following = context.roster.waiting_for(peer)
        if following is None or following in seen or not context.roster.is_present(following):
            return peer
        peer = following
        seen.add(peer)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
