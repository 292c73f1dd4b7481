"""From a peer's messages to the events of the run. Pure; what a peer may not say is told apart here, once."""

from __future__ import annotations

import math
from collections.abc import Mapping

from atoll.compression.policy import Rung
from atoll.compression.registry import is_codec
from atoll.coordinator.run.events import (
    FaultKind,
    FaultReported,
    MicrobatchLoss,
    PeerGone,
    PeerLeaving,
    PeerProgressed,
    PeerReady,
    PeerStored,
    PeerVoided,
    RunEvent,
    SnapshotCopied,
    SnapshotTaken,
    StageReported,
)
from atoll.coordinator.run.resuming import Held
from atoll.coordinator.run.snapshots import HeldPart
from atoll.coordinator.sessions.membership import Introduction
from atoll.protocol.errors import WireError
from atoll.protocol.ids import Generation, MicrobatchIndex, PeerId, StepNumber
from atoll.protocol.v1 import session_pb2

_FAULTS: Mapping[int, FaultKind] = {
    session_pb2.Fault.FAULT_NOT_FINITE: FaultKind.NOT_FINITE,
    session_pb2.Fault.FAULT_LINK: FaultKind.LINK,
    session_pb2.Fault.FAULT_CORRUPT: FaultKind.CORRUPT,
    session_pb2.Fault.FAULT_REFUSED_GRAPH: FaultKind.REFUSED_GRAPH,
    session_pb2.Fault.FAULT_MEMORY: FaultKind.MEMORY,
    session_pb2.Fault.FAULT_INTERNAL: FaultKind.INTERNAL,
    session_pb2.Fault.FAULT_OUTLIER: FaultKind.OUTLIER,
}
MAX_HAND_OVER_SECONDS = 3600.0
MAX_REASON_LENGTH = 1000  # a peer's words go into logs, events and other peers' screens


def introduction(join: session_pb2.Join) -> Introduction:
    """What a peer says of itself."""
    return Introduction(
        protocol_version=join.protocol_version,
        version=join.version,
        name=join.name,
        address=join.address,
        device=join.device,
        threads=join.threads,
        memory_bytes=join.memory_bytes,
        flops_per_second=join.flops_per_second,
        handling_seconds=join.handling_seconds,
        machine=join.machine,
        cores=join.cores,
        disk_bytes=join.disk_bytes,
        max_upload_bytes_per_second=join.max_upload_bytes_per_second or None,
        max_download_bytes_per_second=join.max_download_bytes_per_second or None,
        codecs=tuple(_rung(speed) for speed in join.codecs if _is_possible(speed)),
        snapshots={run_id: _held_parts(join, run_id) for run_id in {part.run_id for part in join.snapshots}},
        instance=join.instance,
    )


def held(join: session_pb2.Join, run_id: str) -> Held | None:
    """What a peer that joins still has in memory of the run called ``run_id``."""
    said = join.held
    if not join.HasField("held") or said.run_id != run_id:
        return None
    return Held(
        step=StepNumber(said.step),
        generation=Generation(said.generation),
        reported_step=StepNumber(said.reported_step),
        names=frozenset(said.names),
    )


def _is_possible(speed: session_pb2.CodecSpeed) -> bool:
    """Whether it is about a codec of ours, with numbers that can be."""
    numbers = (speed.encode_bytes_per_second, speed.decode_bytes_per_second, speed.ratio)
    return is_codec(speed.codec) and speed.ratio <= 1.0 and all(number > 0.0 for number in numbers)


def _rung(speed: session_pb2.CodecSpeed) -> Rung:
    return Rung(
        name=speed.codec,
        ratio=speed.ratio,
        encode_bytes_per_second=speed.encode_bytes_per_second,
        decode_bytes_per_second=speed.decode_bytes_per_second,
    )


def run_event(peer: PeerId, message: session_pb2.PeerMessage) -> RunEvent:
    """What a message of an admitted peer means to the run. Raises WireError for one that has no place here."""
    match message.WhichOneof("content"):
        case "ready":
            return _ready(peer, message.ready)
        case "report":
            return _report(peer, message.report)
        case "fault":
            return _fault(peer, message.fault)
        case "voided":
            return PeerVoided(peer=peer, generation=Generation(message.voided.generation))
        case "progress":
            waiting_for = PeerId(message.progress.waiting_for) if message.progress.waiting_for else None
            return PeerProgressed(peer=peer, phase=message.progress.phase[:MAX_REASON_LENGTH], waiting_for=waiting_for)
        case "stored":
            return PeerStored(peer=peer, generation=Generation(message.stored.generation))
        case "snapshot_taken":
            return _taken(peer, message.snapshot_taken)
        case "snapshot_copied":
            return _copied(peer, message.snapshot_copied)
        case "leave":
            return _leave(peer, message.leave)
        case other:
            raise WireError(f"it sent {other or 'an empty message'} in the middle of a session")


def _held_parts(join: session_pb2.Join, run_id: str) -> tuple[HeldPart, ...]:
    return tuple(
        HeldPart(step=StepNumber(part.step), names=frozenset(part.names), num_bytes=part.num_bytes)
        for part in join.snapshots
        if part.run_id == run_id
    )


def _taken(peer: PeerId, taken: session_pb2.SnapshotTaken) -> SnapshotTaken:
    stalled = taken.stalled_seconds if math.isfinite(taken.stalled_seconds) else 0.0
    return SnapshotTaken(
        peer=peer,
        step=StepNumber(taken.step),
        names=frozenset(taken.names),
        num_bytes=taken.num_bytes,
        stalled_seconds=max(0.0, stalled),
        failure=taken.failure[:MAX_REASON_LENGTH],
    )


def _copied(peer: PeerId, copied: session_pb2.SnapshotCopied) -> SnapshotCopied:
    return SnapshotCopied(
        peer=peer,
        step=StepNumber(copied.step),
        source=PeerId(copied.source),
        names=frozenset(copied.names),
        num_bytes=copied.num_bytes,
        failure=copied.failure[:MAX_REASON_LENGTH],
    )


def _leave(peer: PeerId, leave: session_pb2.Leave) -> PeerGone | PeerLeaving:
    reason = leave.reason[:MAX_REASON_LENGTH] or "it gave no reason"
    if not leave.hand_over_seconds > 0.0:  # nor a number at all
        return PeerGone(peer=peer, reason=reason, left=True)
    return PeerLeaving(peer=peer, reason=reason, hand_over_seconds=min(leave.hand_over_seconds, MAX_HAND_OVER_SECONDS))


def _ready(peer: PeerId, ready: session_pb2.Ready) -> PeerReady:
    seconds = ready.fetch_seconds if math.isfinite(ready.fetch_seconds) else 0.0
    return PeerReady(
        peer=peer,
        generation=Generation(ready.generation),
        fetched_bytes=ready.fetched_bytes,
        fetch_seconds=max(0.0, seconds),
    )


def _report(peer: PeerId, report: session_pb2.StageReport) -> StageReported:
    return StageReported(
        peer=peer,
        generation=Generation(report.generation),
        step=StepNumber(report.step),
        evaluation=report.evaluation,
        losses=tuple(
            MicrobatchLoss(microbatch=MicrobatchIndex(entry.microbatch), loss=entry.loss, metrics=dict(entry.metrics))
            for entry in report.losses
        ),
        squared_norms=tuple((entry.parameter, entry.value) for entry in report.squared_norms),
    )


def _fault(peer: PeerId, fault: session_pb2.Fault) -> FaultReported:
    return FaultReported(
        peer=peer,
        generation=Generation(fault.generation),
        step=StepNumber(fault.step),
        fault=_FAULTS.get(fault.kind, FaultKind.INTERNAL),
        reason=fault.reason[:MAX_REASON_LENGTH] or "it gave no reason",
        accused=PeerId(fault.accused) if fault.accused else None,
    )
