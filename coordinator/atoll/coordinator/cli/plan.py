"""`atoll plan`: what a run would do, before anyone has joined or beside those who have."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.coordinator.cli import formatting
from atoll.coordinator.cli.exits import UsageError
from atoll.coordinator.cli.options import AsJson, JobOverrides
from atoll.coordinator.cli.status import ask_status
from atoll.protocol.ids import PeerId

if TYPE_CHECKING:
    from atoll.coordinator.events import StageSummary
    from atoll.coordinator.planning.forecast import StageForecast, WhatIf
    from atoll.coordinator.planning.network import Network
    from atoll.coordinator.planning.planner import Planned
    from atoll.coordinator.planning.segments import PeerOffer
    from atoll.protocol.job import Job

PICTURE = Path("plan.svg")
COLUMNS = ("stage", "peer", "layers", "memory", "in flight", "a microbatch", "busy", "sends", "receives")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything that is printed. ``unit`` is tokens or samples."""

    planned: Planned
    summaries: tuple[StageSummary, ...]
    forecasts: tuple[StageForecast, ...]
    what_if: tuple[WhatIf, ...]
    units_per_second: float
    unit: str


def command(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="Job file.")],
    fleet: Annotated[Path | None, typer.Option(metavar="FILE", help="Plan for the peers of this fleet file.")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Plan for the peers of this running coordinator.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"Where to draw the step. Default: {PICTURE}, none with --json.")
    ] = None,
    overrides: JobOverrides = None,
    as_json: AsJson = False,
) -> None:
    """Shows how a job would be placed, how fast it would run, and what holds it back."""
    if (fleet is None) == (against is None):
        raise UsageError("give the peers with either --fleet FLEET.yaml or --against HOST:PORT")
    from atoll.protocol.job import load_job

    loaded = load_job(job, overrides or ())
    offers, network = _from_fleet(fleet) if fleet is not None else _from_coordinator(against)
    answer = make_answer(loaded, offers, network)
    drawn = picture or (None if as_json else PICTURE)
    if drawn is not None:
        drawn.write_text(_picture(answer, loaded.name), encoding="utf-8")
    if as_json:
        print(json.dumps(as_dict(answer)))
    else:
        print("\n".join(lines(answer)))
        print(f"\na picture of the step is in {drawn}")


def _from_fleet(path: Path) -> tuple[tuple[PeerOffer, ...], Network]:
    from atoll.coordinator.planning.fleet import fleet_network, fleet_offers, load_fleet

    fleet = load_fleet(path)
    return fleet_offers(fleet), fleet_network(fleet)


def _from_coordinator(target: str | None) -> tuple[tuple[PeerOffer, ...], Network]:
    from atoll.coordinator.planning.network import build_network
    from atoll.coordinator.planning.segments import PeerOffer

    present = [peer for peer in ask_status(target).peers if peer.state not in ("left", "lost")]
    if not present:
        raise UsageError(f"no peer has joined {target}; start one, or plan for a fleet file with --fleet")
    offers = tuple(
        PeerOffer(name=PeerId(peer.name), flops_per_second=peer.flops_per_second, memory_bytes=peer.memory_bytes)
        for peer in present
    )
    return offers, build_network(offer.name for offer in offers)


def make_answer(job: Job, offers: tuple[PeerOffer, ...], network: Network) -> Answer:
    """Trace the job's model and plan it. Raises JobError, TraceError or PlacementError."""
    from atoll.coordinator.data.opening import open_feed
    from atoll.coordinator.planning.forecast import forecast, what_if
    from atoll.coordinator.planning.planner import as_plan, plan_placement
    from atoll.coordinator.traced_model import trace_model
    from atoll.protocol.ids import StepNumber

    with tempfile.TemporaryDirectory(prefix="atoll-plan-") as cache:
        feed = open_feed(job, Path(cache))
        model = trace_model(job, feed)
        num_units = feed.batch(StepNumber(1)).num_tokens
    request = model.request(offers, network)
    planned = plan_placement(request)
    return Answer(
        planned=planned,
        summaries=model.sliced(as_plan(planned, model.segments)).summaries,
        forecasts=forecast(request, planned),
        what_if=what_if(request, planned),
        units_per_second=num_units / planned.step_seconds,
        unit=str(feed.unit),
    )


def lines(answer: Answer) -> Iterator[str]:
    """The answer for people."""
    planned = answer.planned
    yield from formatting.table([COLUMNS, *_rows(answer)])
    yield ""
    step = formatting.seconds(planned.step_seconds)
    speed = formatting.count(answer.units_per_second)
    yield f"predicted    {step} a step, {speed} {answer.unit}/s"
    yield f"bottleneck   {planned.bottleneck.sentence}"
    for one in answer.what_if:
        yield f"what if      {one.sentence}"
    for spare in planned.spares:
        yield f"spare        {spare.peer}: {spare.reason}"
    estimated = sum(one.estimated_link for one in answer.forecasts)
    if estimated:
        links = "1 link" if estimated == 1 else f"{estimated} links"
        yield f"estimated    {links} between neighbours, for want of a measurement"


def _rows(answer: Answer) -> Iterator[tuple[str, ...]]:
    for summary, stage, one in zip(answer.summaries, answer.planned.stages, answer.forecasts, strict=True):
        layers = summary.first if summary.first == summary.last else f"{summary.first} - {summary.last}"
        yield (
            str(summary.stage),
            stage.peer,
            layers,
            f"{formatting.size(one.memory_bytes)} of {formatting.size(one.allowed_bytes)}",
            f"{stage.in_flight}{', recomputing' if stage.recompute else ''}",
            formatting.seconds(stage.compute_seconds),
            f"{one.busy_share:.0%}",
            formatting.size(one.sent_bytes),
            formatting.size(one.received_bytes),
        )


def as_dict(answer: Answer) -> dict[str, Any]:
    """The answer for scripts: the keys of the event ``plan``, and more."""
    planned = answer.planned
    stages = [
        {
            "stage": int(summary.stage),
            "peers": list(summary.peers),
            "first": summary.first,
            "last": summary.last,
            "parameters": summary.parameters,
            "predicted_memory_bytes": summary.predicted_memory_bytes,
            "allowed_memory_bytes": one.allowed_bytes,
            "in_flight": stage.in_flight,
            "recompute": stage.recompute,
            "microbatch_seconds": stage.compute_seconds,
            "busy_share": one.busy_share,
            "sent_bytes": one.sent_bytes,
            "received_bytes": one.received_bytes,
            "estimated_link": one.estimated_link,
        }
        for summary, stage, one in zip(answer.summaries, planned.stages, answer.forecasts, strict=True)
    ]
    return {
        "event": "plan",
        "generation": 0,
        "stages": stages,
        "predicted_step_seconds": planned.step_seconds,
        f"predicted_{answer.unit}_per_second": answer.units_per_second,
        "bottleneck": planned.bottleneck.sentence,
        "bottleneck_kind": str(planned.bottleneck.kind),
        "spares": [{"name": spare.peer, "code": spare.code, "reason": spare.reason} for spare in planned.spares],
        "what_if": [
            {"change": one.change, "predicted_step_seconds": one.step_seconds, "sentence": one.sentence}
            for one in answer.what_if
        ],
    }


def _picture(answer: Answer, title: str) -> str:
    from atoll.coordinator.cli.timeline import timeline

    planned = answer.planned
    lanes = [f"{stage} · {one.peer}" for stage, one in enumerate(planned.stages)]
    return timeline(lanes, planned.simulation, f"{title}: {formatting.seconds(planned.step_seconds)} a step")
