"""How a run stands, as the operator is told: the state machine's words together with what peers say of themselves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.coordinator.events import StageSummary
from atoll.coordinator.measurements import Measurements
from atoll.coordinator.planning.plan import LinkPlan
from atoll.coordinator.planning.segments import natural_order
from atoll.coordinator.run.machine import RunMachine
from atoll.coordinator.run.roster import RosterEntry
from atoll.coordinator.run.snapshots import Moment
from atoll.coordinator.run.states import RunState
from atoll.coordinator.sessions.membership import Membership
from atoll.coordinator.survey.findings import Findings
from atoll.protocol.ids import PeerId
from atoll.protocol.v1 import operator_pb2

NOTABLE_SILENCE_SECONDS = 4.0
"""Peers speak every two seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where the answer comes from; ``summaries`` are the stages of the plan in force."""

    run: str
    machine: RunMachine
    membership: Membership
    summaries: Sequence[StageSummary]
    measurements: Measurements
    findings: Findings


def status_reply(sources: Sources, now: float, *, timelines: bool = False) -> operator_pb2.StatusReply:
    """The answer to ``atoll status``; with ``timelines`` also what each stage did in its last step."""
    machine = sources.machine
    context, cycle, plan = machine.context, machine.cycle, machine.context.plan
    peers = [
        _peer(name, entry, sources, now) for name, entry in sorted(context.roster, key=lambda item: _place(machine, item[0]))
    ]
    return operator_pb2.StatusReply(
        run=sources.run,
        state=context.state,
        reason=_reason(machine, sources.membership, now),
        state_seconds=now - context.entered,
        step=context.committed,
        steps=context.settings.steps,
        loss=cycle.loss if cycle.loss is not None else 0.0,
        tokens_per_second=cycle.tokens_per_second,
        generation=context.generation,
        peers=peers,
        links=[_link(link, sources) for link in plan.links] if plan is not None else [],
        journal_step=context.journal_step,
        complete_snapshot=_snapshot(machine, context.snapshots.newest_complete()),
        safe_snapshot=_snapshot(machine, context.snapshots.newest_safe()),
        predicted_step_seconds=plan.step_seconds if plan is not None else 0.0,
        measured_step_seconds=sources.measurements.step_seconds if plan is not None else 0.0,
        timelines=_timelines(sources) if timelines else (),
    )


def _timelines(sources: Sources) -> list[operator_pb2.StageTimeline]:
    last = sources.measurements.timelines.last
    return [operator_pb2.StageTimeline(peer=peer, step=step, spans=spans) for peer, (step, spans) in last.items()]


def _snapshot(machine: RunMachine, moment: Moment | None) -> operator_pb2.SnapshotStatus | None:
    if moment is None:
        return None
    age = machine.snapshotting.age_seconds(moment)
    return operator_pb2.SnapshotStatus(
        step=moment.step,
        age_seconds=-1.0 if age is None else age,
        bytes=machine.context.snapshots.num_bytes(moment),
    )


def _place(machine: RunMachine, peer: PeerId) -> tuple[int, int, list[tuple[int, str]]]:
    """Stages in order, then the others by name."""
    stage = machine.context.stage_of(peer)
    return (int(stage is None), stage or 0, natural_order(peer))


def _reason(machine: RunMachine, membership: Membership, now: float) -> str:
    """Whom the run waits for and why, or why it ended."""
    if machine.context.state in (RunState.STOPPED, RunState.FAILED):
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


def _peer(name: PeerId, entry: RosterEntry, sources: Sources, now: float) -> operator_pb2.PeerStatus:
    stage = sources.machine.context.stage_of(name)
    summaries, member = sources.summaries, sources.membership.find(name)
    layers = f"{summaries[stage].first} - {summaries[stage].last}" if stage is not None and stage < len(summaries) else ""
    status = operator_pb2.PeerStatus(
        name=name,
        state=entry.state,
        stage=-1 if stage is None else stage,
        layers=layers,
        memory_bytes=entry.offer.memory_bytes,
        flops_per_second=entry.offer.flops_per_second,
        phase=(entry.left_out or entry.phase or entry.reason) if entry.state.present else entry.reason,
        waiting_for=entry.waiting_for or "",
        bytes_sent=sources.measurements.bytes_sent(name),
        machine=entry.offer.machine,
        cores=entry.offer.cores,
        threads=entry.offer.threads,
        measurement=sources.findings.how_measured(name),
    )
    if member is not None:
        status.address = member.introduction.address
        status.device = member.introduction.device
        status.resident_bytes = member.resident_bytes
        status.silent_seconds = now - member.heard
        status.reach = member.reach
        status.unreached = member.unreached
    plan = sources.machine.context.plan
    if plan is not None and stage is not None:
        status.predicted_memory_bytes = plan.stages[stage].of(name).memory_bytes
        status.measured_memory_bytes = sources.measurements.grown_bytes(name)
        status.predicted_compute_seconds = plan.stages[stage].of(name).step_compute_seconds
        status.measured_compute_seconds = sources.measurements.observed.compute_seconds(name)
    return status


def _link(link: LinkPlan, sources: Sources) -> operator_pb2.LinkStatus:
    measurements, observed = sources.measurements, sources.measurements.observed
    seen = measurements.link(link.source, link.target)
    known = seen is not None and seen.damage is not None
    return operator_pb2.LinkStatus(
        source=link.source,
        target=link.target,
        codec=measurements.codecs.codec(link.source, link.target) or link.codec,
        direction=link.direction,
        relative_error=seen.relative_error if seen is not None else 0.0,
        damage=seen.damage if seen is not None and known else -1.0,
        raw_bytes=seen.raw_bytes if seen is not None else 0,
        estimated=sources.findings.is_estimated(link.source, link.target),
        predicted_bytes_per_second=link.bytes_per_second,
        measured_bytes_per_second=observed.rates.get((link.source, link.target), 0.0),
        round_trip_seconds=sources.findings.round_trip_seconds(link.source, link.target),
        predicted_seconds=link.step_seconds,
        measured_seconds=observed.transfer_seconds(link.source, link.target),
        bytes=sources.measurements.link_bytes(link.source, link.target),
    )
