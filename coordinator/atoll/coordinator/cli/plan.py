"""`atoll plan`: what a run would do, before anyone has joined or beside those who have."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.coordinator.cli.exits import UsageError
from atoll.coordinator.cli.options import AsJson, JobOverrides
from atoll.coordinator.cli.plan_answer import Answer, as_dict, draw, lines
from atoll.coordinator.cli.status import ask_fleet

if TYPE_CHECKING:
    from atoll.coordinator.planning.network import Network
    from atoll.coordinator.planning.segments import PeerOffer
    from atoll.coordinator.sizing import Sized
    from atoll.protocol.ids import PeerId
    from atoll.protocol.job import Job
    from atoll.protocol.v1.session_pb2 import Measured

PICTURE = Path("plan.svg")


def command(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="Job file.")],
    fleet: Annotated[Path | None, typer.Option(metavar="FILE", help="Plan for the peers of this fleet file.")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="HOST:PORT|DIR", help="Plan for the peers of this running coordinator.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"Where to draw the step. Default: {PICTURE}, none with --json.")
    ] = None,
    failures_per_hour: Annotated[
        float, typer.Option(metavar="N", min=0.0, help="Say also what is left of the speed when N steps an hour fail.")
    ] = 0.0,
    overrides: JobOverrides = None,
    as_json: AsJson = False,
) -> None:
    """Shows how a job would be placed, how fast it would run, and what holds it back."""
    if (fleet is None) == (against is None):
        raise UsageError("give the peers with either --fleet FLEET.yaml or --against HOST:PORT")
    from atoll.protocol.job import load_job

    loaded = load_job(job, overrides or ())
    if loaded.plan.pinned_stages:
        raise UsageError("plan.pin of this job gives every stage to peers, so nothing is left to choose: --set plan.pin={}")
    known = _from_fleet(fleet) if fleet is not None else _from_coordinator(against)
    answer = replace(make_answer(loaded, known), failures_per_hour=failures_per_hour)
    drawn = picture or (None if as_json else PICTURE)
    if drawn is not None:
        drawn.write_text(draw(answer, loaded.name), encoding="utf-8")
    if as_json:
        print(json.dumps(as_dict(answer)))
    else:
        print("\n".join(lines(answer)))
        print(f"\na picture of the step is in {drawn}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of the peers to plan for; ``measured`` by peer and by the fingerprint of what it measured."""

    offers: tuple[PeerOffer, ...]
    network: Network
    measured: Mapping[PeerId, Mapping[str, Measured]] = field(default_factory=dict)


def _from_fleet(path: Path) -> Known:
    from atoll.coordinator.planning.fleet import fleet_network, fleet_offers, load_fleet

    fleet = load_fleet(path)
    return Known(offers=fleet_offers(fleet), network=fleet_network(fleet))


def _from_coordinator(target: str | None) -> Known:
    from atoll.coordinator.fleet_report import measured_in, network_in, offers_in

    reply = ask_fleet(target)
    if not reply.peers:
        raise UsageError(f"no peer has joined {target}; start one, or plan for a fleet file with --fleet")
    return Known(offers=offers_in(reply), network=network_in(reply), measured=measured_in(reply))


def make_answer(job: Job, known: Known) -> Answer:
    """Trace the job's model and plan it. Raises JobError, TraceError or PlacementError."""
    from atoll.coordinator.planning.forecast import forecast, forecast_links, what_if
    from atoll.coordinator.planning.planner import as_plan, plan_placement
    from atoll.coordinator.sizing import open_sizing
    from atoll.protocol.ids import StepNumber

    with tempfile.TemporaryDirectory(prefix="atoll-plan-") as cache:
        sized = open_sizing(job, Path(cache)).choose(known.offers, known.network)
        num_units = sized.feed.batch(StepNumber(1)).num_tokens
        request = sized.model.request(_with_measured(known, sized), known.network)
    planned = plan_placement(request)
    return Answer(
        planned=planned,
        microbatch=sized.feed.microbatch,
        summaries=sized.model.sliced(as_plan(planned, sized.model.segments)).summaries,
        forecasts=forecast(request, planned),
        links=forecast_links(request, planned),
        what_if=what_if(request, planned),
        units_per_second=num_units / planned.step_seconds,
        unit=str(sized.feed.unit),
    )


def _with_measured(known: Known, sized: Sized) -> tuple[PeerOffer, ...]:
    """The peers with the times of this job's parts, for those who have measured all of them."""
    from atoll.coordinator.survey.segment_measuring import prepare_measuring

    if not any(known.measured.values()):
        return known.offers
    measuring = prepare_measuring(sized.model, sized.feed)
    return tuple(
        replace(offer, measured=measuring.seconds(known.measured.get(offer.name, {})).seconds) for offer in known.offers
    )
