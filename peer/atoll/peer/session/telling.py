"""What computing says, as messages to the coordinator. Pure."""

from __future__ import annotations

from atoll.peer.faults import Fault
from atoll.peer.session.values import Tell
from atoll.peer.stage.events import Measured, Reported, SnapshotWritten
from atoll.peer.stage.timeline import Span
from atoll.protocol.ids import Generation, StepNumber
from atoll.protocol.v1 import session_pb2


def tell_report(report: Reported) -> Tell:
    """What a stage made of a step."""
    losses = [
        session_pb2.MicrobatchLoss(microbatch=item.microbatch, loss=item.loss, metrics=item.metrics) for item in report.losses
    ]
    norms = [session_pb2.SquaredNorm(parameter=name, value=value) for name, value in report.squared_norms.items()]
    told = session_pb2.StageReport(
        generation=report.generation,
        step=report.step,
        evaluation=report.evaluation,
        losses=losses,
        squared_norms=norms,
        compute_seconds=report.compute_seconds,
        spans=() if report.evaluation else map(_span_message, report.spans),
    )
    return Tell(session_pb2.PeerMessage(report=told))


def _span_message(span: Span) -> session_pb2.Span:
    return session_pb2.Span(
        what=span.what,
        microbatch=-1 if span.microbatch is None else span.microbatch,
        begin_seconds=span.begin_seconds,
        seconds=span.seconds,
        peer=span.peer or "",
    )


def tell_measured(measured: Measured) -> Tell:
    """What a kind of segment takes here, or why that is not known."""
    if measured.seconds is None:
        told = session_pb2.Measured(kind=measured.kind, failure=measured.failure, declared=measured.declared)
    else:
        told = session_pb2.Measured(
            kind=measured.kind,
            forward_seconds=measured.seconds.forward,
            backward_seconds=measured.seconds.backward,
            accumulate_seconds=measured.seconds.accumulate,
            update_seconds=measured.seconds.update,
            cached=measured.cached,
        )
    return Tell(session_pb2.PeerMessage(measured=told))


def tell_snapshot(written: SnapshotWritten) -> Tell:
    """A snapshot that lies on the disk, or why it does not."""
    told = session_pb2.SnapshotTaken(
        step=written.step,
        failure=written.failure,
        num_bytes=written.num_bytes,
        seconds=written.seconds,
        stalled_seconds=written.stalled_seconds,
        names=written.names,
    )
    return Tell(session_pb2.PeerMessage(snapshot_taken=told))


def tell_fault(generation: Generation, step: StepNumber, fault: Fault) -> Tell:
    """What went wrong here."""
    told = session_pb2.Fault(
        generation=generation,
        step=step,
        kind=fault.kind.value,
        reason=fault.reason,
        accused=fault.accused or "",
    )
    return Tell(session_pb2.PeerMessage(fault=told))
