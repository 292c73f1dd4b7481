"""`atoll status`, `stop`, `replan` and `export`: questions to a running coordinator."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from atoll.coordinator.cli import formatting
from atoll.coordinator.cli.calling import Found, find_coordinator
from atoll.coordinator.cli.exits import UsageError
from atoll.coordinator.cli.options import AsJson, ExistingState, Target
from atoll.coordinator.cli.report import read_history
from atoll.coordinator.run_files import JOB, WEIGHTS, disk_error
from atoll.protocol.errors import SessionError
from atoll.protocol.v1.operator_pb2 import (
    ExportReply,
    ExportRequest,
    FleetReply,
    FleetRequest,
    LinkStatus,
    PeerStatus,
    ReplanReply,
    ReplanRequest,
    SnapshotStatus,
    StageTimeline,
    StatusReply,
    StatusRequest,
    StopRequest,
)
from atoll.protocol.v1.operator_pb2_grpc import OperatorStub
from atoll.protocol.v1.session_pb2 import Span

STATUS_SECONDS = 10.0
EXPORT_SECONDS = 600.0
REPLAN_SECONDS = 600.0
PEER_COLUMNS = ("peer", "state", "reach", "device", "layers", "memory", "sent", "doing", "silent")
MEASURED = "measured"
WATCH_SECONDS = 1.0
OVER = ("finished", "stopped", "failed")
SNAPSHOTS = ("complete_snapshot", "safe_snapshot")

Reply = TypeVar("Reply")


class ExportForm(StrEnum):
    """What weights are written as."""

    SAFETENSORS = "safetensors"
    HUGGING_FACE = "hf"


def status(
    target: Target = None,
    state: ExistingState = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again each second, until the run is over.")] = False,
    as_json: AsJson = False,
) -> None:
    """Shows how a run stands, and whom it waits for."""
    if watch and not as_json:
        _watch(target, state)
        return
    reply = ask_status(target, state)
    print(_status_text(reply, as_json))
    while watch and reply.state not in OVER:
        time.sleep(WATCH_SECONDS)
        reply = ask_status(target, state)
        print(_status_text(reply, as_json), flush=True)


def _watch(target: str | None, state: Path | None) -> None:
    from rich.live import Live
    from rich.text import Text

    reply = ask_status(target, state)
    with Live(Text(_status_text(reply, False)), auto_refresh=False) as live:
        while reply.state not in OVER:
            time.sleep(WATCH_SECONDS)
            reply = ask_status(target, state)
            live.update(Text(_status_text(reply, False)), refresh=True)


def _status_text(reply: StatusReply, as_json: bool) -> str:
    if as_json:
        return json.dumps(status_dict(reply))
    return "\n".join([*status_lines(reply), *peer_lines(reply), *comparison_lines(reply)])


def stop(
    target: Target = None,
    state: ExistingState = None,
    reason: Annotated[str, typer.Option(help="Shown to everyone who takes part.")] = "stopped by the operator",
) -> None:
    """Ends a run after the step that is running; peers end as well. It goes on with `atoll run` in the same --state."""
    ask(target, state, lambda stub: stub.Stop(StopRequest(reason=reason), timeout=STATUS_SECONDS))
    print("the run is ending")


def replan(target: Target = None, state: ExistingState = None, as_json: AsJson = False) -> None:
    """Looks for a better plan for a run that trains, and changes to it where that pays."""
    reply: ReplanReply = ask(target, state, lambda stub: stub.Replan(ReplanRequest(), timeout=REPLAN_SECONDS))
    if as_json:
        print(json.dumps({"event": "replan", "moved": reply.moved, "reason": reply.reason}))
    else:
        print(f"{'the plan changes after this step' if reply.moved else 'the plan stays'}: {reply.reason}")


def export(
    target: Target = None,
    state: ExistingState = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="PATH", help="Put the weights there.")] = None,
    form: Annotated[
        ExportForm,
        typer.Option("--format", help="safetensors: a file; hf: a folder for Hugging Face's from_pretrained, needs --output."),
    ] = ExportForm.SAFETENSORS,
    as_json: AsJson = False,
) -> None:
    """Writes the weights as of the last committed step, on the coordinator's machine."""
    if form is ExportForm.HUGGING_FACE and output is None:
        raise UsageError("--format hf writes a folder: say which with --output FOLDER")
    path, step = _exported(target, state)
    if output is not None:
        if not path.exists():
            raise UsageError(f"{path} is on the coordinator's machine: copy it from there, --output copies on this one only")
        path = _put(path, output, form)
    print(json.dumps({"event": "export", "path": str(path), "step": step}) if as_json else f"{path} (step {step})")


def _put(weights: Path, output: Path, form: ExportForm) -> Path:
    """The weights in ``output``, in a form; the job that they are of lies beside them."""
    try:
        if form is ExportForm.SAFETENSORS:
            return Path(shutil.copyfile(weights, output))
        from atoll.coordinator.models.exporting import write_huggingface
        from atoll.protocol.job import load_job

        write_huggingface(load_job(weights.parent / JOB), weights, output)
    except OSError as error:
        raise disk_error(error, output, "--output") from error
    return output


def _exported(target: str | None, state: Path | None) -> tuple[Path, int]:
    """The file with the weights and the step they are of: a finished run's own, else what its coordinator writes now."""
    folder = state if state is not None else Path(target) if target is not None else None
    if folder is not None and (folder / WEIGHTS).exists():
        return folder / WEIGHTS, read_history(folder).losses[-1][0]
    reply: ExportReply = ask(target, state, lambda stub: stub.Export(ExportRequest(), timeout=EXPORT_SECONDS))
    return Path(reply.path), reply.step


def ask_status(target: str | None, state: Path | None = None) -> StatusReply:
    """How the run at ``target`` stands. Raises UsageError or SessionError."""
    reply: StatusReply = ask(target, state, lambda stub: stub.Status(StatusRequest(), timeout=STATUS_SECONDS))
    return reply


def ask_fleet(target: str | None) -> FleetReply:
    """What the coordinator at ``target`` knows of its peers and links. Raises UsageError or SessionError."""
    reply: FleetReply = ask(target, None, lambda stub: stub.Fleet(FleetRequest(), timeout=STATUS_SECONDS))
    return reply


def status_lines(reply: StatusReply) -> list[str]:
    """The run in a few lines."""
    lines = [f"{reply.run}: {reply.state} for {formatting.duration(reply.state_seconds)}, plan {reply.generation}"]
    if reply.reason:
        lines.append(reply.reason if reply.state in OVER else f"the run {reply.reason}")
    progress = f"step {reply.step}/{reply.steps}"
    if reply.step < reply.journal_step:
        progress += f", done again up to step {reply.journal_step}"
    if reply.journal_step:
        progress += f", loss {reply.loss:.4f}, {reply.tokens_per_second:,.0f} tokens/s"
    return [*lines, progress, *([_snapshot_line(reply)] if reply.journal_step else [])]


def _snapshot_line(reply: StatusReply) -> str:
    """What the run could go back to."""
    if reply.HasField("safe_snapshot"):
        return f"newest safe snapshot: {_snapshot_words(reply.safe_snapshot)}"
    if reply.HasField("complete_snapshot"):
        return f"newest snapshot: {_snapshot_words(reply.complete_snapshot)}; not all of its copies are made"
    return "no snapshot is complete"


def _snapshot_words(snapshot: SnapshotStatus) -> str:
    age = f", {formatting.duration(snapshot.age_seconds)} old" if snapshot.age_seconds >= 0.0 else ""
    return f"step {snapshot.step}{age}, {formatting.size(snapshot.bytes)}"


def in_order(reply: StatusReply) -> list[PeerStatus]:
    """The peers as the data flows through them, then those without a stage by name."""
    return sorted(reply.peers, key=lambda peer: (peer.stage < 0, peer.stage, peer.name))


def peer_lines(reply: StatusReply) -> list[str]:
    """A table with a row for each peer; empty without peers."""
    return formatting.table([PEER_COLUMNS, *(_peer_row(peer) for peer in in_order(reply))]) if reply.peers else []


def _peer_row(peer: PeerStatus) -> tuple[str, str, str, str, str, str, str, str, str]:
    memory = f"{formatting.size(peer.resident_bytes)} of {formatting.size(peer.memory_bytes)}"
    sent = formatting.size(peer.bytes_sent)
    silent = f"{peer.silent_seconds:.0f} s"
    reach = peer.reach or "-"
    return (peer.name, peer.state, reach, peer.device, peer.layers or "-", memory, sent, describe_activity(peer), silent)


def comparison_lines(reply: StatusReply) -> list[str]:
    """What the plan predicted beside what is measured; empty without a plan."""
    if not reply.predicted_step_seconds:
        return []
    rows = [("", "predicted", "measured")]
    rows.append(("a step", *_beside(reply.predicted_step_seconds, reply.measured_step_seconds, formatting.seconds)))
    for peer in in_order(reply):
        if peer.stage < 0:
            continue
        computes = _beside(peer.predicted_compute_seconds, peer.measured_compute_seconds, formatting.seconds)
        rows.append((f"{peer.name} computes in a step", *computes))
        rows.append((f"{peer.name} needs", *_beside(peer.predicted_memory_bytes, peer.measured_memory_bytes, formatting.size)))
    rows += [_link_row(link) for link in reply.links]
    estimated = [peer for peer in in_order(reply) if peer.stage >= 0 and peer.measurement not in ("", MEASURED)]
    why = [f"{peer.name} could not be measured, its speed is {peer.measurement}" for peer in estimated]
    return ["", *formatting.table(rows), *why]


def _beside(predicted: float, measured: float, written: Callable[[float], str]) -> tuple[str, str]:
    """Both as text; what was not measured yet is a dash."""
    return written(predicted), written(measured) if measured else "-"


def _link_row(link: LinkStatus) -> tuple[str, str, str]:
    guess = ", estimated" if link.estimated else ""
    predicted = f"{formatting.rate(link.predicted_bytes_per_second)}{guess}, busy {formatting.seconds(link.predicted_seconds)}"
    measured = [formatting.rate(link.measured_bytes_per_second)] if link.measured_bytes_per_second else []
    measured += [f"busy {formatting.seconds(link.measured_seconds)}"] if link.measured_seconds else []
    return f"{link.source} > {link.target} ({link.codec})", predicted, ", ".join([*measured, *_codec_says(link)]) or "-"


def _codec_says(link: LinkStatus) -> list[str]:
    """What the codec loses; nothing where it is exact or not known."""
    error = [f"error {link.relative_error:.2%}"] if link.relative_error else []
    return error + ([f"costs {link.damage:.2%} of the loss"] if link.relative_error and link.damage >= 0.0 else [])


def describe_activity(peer: PeerStatus) -> str:
    """``backward``, or ``waiting for activation from peer-1``."""
    doing = peer.phase or peer.state
    return f"{doing} from {peer.waiting_for}" if peer.waiting_for else doing


def status_dict(reply: StatusReply) -> dict[str, Any]:
    """All of the status, as ``--json`` prints it; timelines where they were asked for."""
    kept = {name: as_dict(getattr(reply, name)) if reply.HasField(name) else None for name in SNAPSHOTS}
    whole: dict[str, Any] = {"event": "status", **as_dict(reply), **kept}
    whole["peers"] = [as_dict(peer) for peer in in_order(reply)]
    whole["links"] = [as_dict(link) for link in reply.links]
    if reply.timelines:
        whole["timelines"] = [{**as_dict(one), "spans": [as_dict(span) for span in one.spans]} for one in reply.timelines]
    return whole


def as_dict(message: StatusReply | PeerStatus | LinkStatus | SnapshotStatus | StageTimeline | Span) -> dict[str, Any]:
    """The plain fields of ``message``, zeros too: readers need not know which fields protobuf leaves out."""
    fields = message.DESCRIPTOR.fields
    return {field.name: getattr(message, field.name) for field in fields if field.message_type is None}


def ask(target: str | None, state: Path | None, question: Callable[[OperatorStub], Awaitable[Reply]]) -> Reply:
    """The answer of the coordinator at ``target``, or of the run kept in ``state``. Raises UsageError, SessionError or
    IdentityRefused."""
    return asyncio.run(_ask_at(find_coordinator(target, state), question))


async def _ask_at(found: Found, question: Callable[[OperatorStub], Awaitable[Reply]]) -> Reply:
    import grpc

    from atoll.protocol.channel import open_channel
    from atoll.protocol.presented import why_refused
    from atoll.protocol.security import MutualTls

    address = str(found.address)
    try:
        async with open_channel(address, found.security) as channel:
            return await question(OperatorStub(channel))
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            fix = "the run is over, or its coordinator listens elsewhere"
            if isinstance(found.security, MutualTls):
                fix = f"{fix}; {await why_refused(found.address, found.security.credentials)}"
            raise SessionError(f"no coordinator answers at {address}: {fix}") from error
        raise SessionError(f"the coordinator at {address} refuses: {error.details()}") from error
