"""How a run stands, as the operator is told: the state machine's words together with what peers say of themselves. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.coordinator.events import StageSummary
from atoll.coordinator.membership import Member, Membership
from atoll.coordinator.planning.segments import natural_order
from atoll.coordinator.run.machine import RunMachine
from atoll.coordinator.run.roster import RosterEntry
from atoll.coordinator.run.states import RunState
from atoll.protocol.ids import PeerId
from atoll.protocol.v1 import operator_pb2

NOTABLE_SILENCE_SECONDS = 4.0
"""Peers speak every two seconds."""


def status_reply(
    run: str,
    machine: RunMachine,
    membership: Membership,
    summaries: Sequence[StageSummary],
    bytes_sent: Callable[[PeerId], int],
    now: float,
) -> operator_pb2.StatusReply:
    """The answer to ``atoll status``."""
    context, cycle = machine.context, machine.cycle
    peers = [
        _peer(name, entry, machine, membership.find(name), summaries, bytes_sent(name), now)
        for name, entry in sorted(context.roster, key=lambda item: _place(machine, item[0]))
    ]
    return operator_pb2.StatusReply(
        run=run,
        state=context.state,
        reason=_reason(machine, membership, now),
        state_seconds=now - context.entered,
        step=context.committed,
        steps=context.settings.steps,
        loss=cycle.loss if cycle.loss is not None else 0.0,
        tokens_per_second=cycle.tokens_per_second,
        generation=context.generation,
        peers=peers,
    )


def _place(machine: RunMachine, peer: PeerId) -> tuple[int, int, list[tuple[int, str]]]:
    """Stages in order, then the others by name."""
    stage = machine.context.stage_of(peer)
    return (int(stage is None), stage or 0, natural_order(peer))


def _reason(machine: RunMachine, membership: Membership, now: float) -> str:
    """Whom the run waits for and why, or why it ended."""
    if machine.context.state is RunState.FAILED:
        return machine.context.reason
    if machine.context.state is RunState.FINISHED:
        return ""
    waiting = machine.waiting()
    silent = [
        f"{peer} has been silent for {now - member.heard:.0f} s"
        for peer in waiting.peers
        if (member := membership.find(peer)) is not None and now - member.heard >= NOTABLE_SILENCE_SECONDS
    ]
    return "; ".join((str(waiting), *silent))


def _peer(
    name: PeerId,
    entry: RosterEntry,
    machine: RunMachine,
    member: Member | None,
    summaries: Sequence[StageSummary],
    bytes_sent: int,
    now: float,
) -> operator_pb2.PeerStatus:
    stage = machine.context.stage_of(name)
    layers = f"{summaries[stage].first} - {summaries[stage].last}" if stage is not None and stage < len(summaries) else ""
    status = operator_pb2.PeerStatus(
        name=name,
        state=entry.state,
        stage=-1 if stage is None else stage,
        layers=layers,
        memory_bytes=entry.offer.memory_bytes,
        flops_per_second=entry.offer.flops_per_second,
        phase=(entry.phase or entry.reason) if entry.state.present else entry.reason,
        waiting_for=entry.waiting_for or "",
        bytes_sent=bytes_sent,
    )
    if member is not None:
        status.address = member.introduction.address
        status.device = member.introduction.device
        status.resident_bytes = member.resident_bytes
        status.silent_seconds = now - member.heard
    return status
