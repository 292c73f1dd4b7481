"""What `atoll plan` answers: a table for people, JSON for scripts, a picture of the step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.coordinator.cli import formatting
from atoll.coordinator.planning.goodput import expected_step_seconds

if TYPE_CHECKING:
    from atoll.coordinator.events import StageSummary
    from atoll.coordinator.planning.forecast import LinkForecast, StageForecast, WhatIf
    from atoll.coordinator.planning.planner import Planned

COLUMNS = ("stage", "peer", "layers", "memory", "in flight", "a microbatch", "busy", "sends a step", "receives a step")
REPLICA_COLUMNS = (*COLUMNS[:2], "microbatches", *COLUMNS[2:])
LINK_COLUMNS = ("from", "to", "direction", "codec", "a microbatch", "bandwidth", "delay", "busy")
ESTIMATED = "~"
"""Before a figure that rests on an estimate."""
FEW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything that is printed. ``unit`` is tokens or samples, ``microbatch`` counts samples; ``failures_per_hour`` are
    expected by the operator."""

    planned: Planned
    microbatch: int
    summaries: tuple[StageSummary, ...]
    forecasts: tuple[StageForecast, ...]
    links: tuple[LinkForecast, ...]
    what_if: tuple[WhatIf, ...]
    units_per_second: float
    unit: str
    failures_per_hour: float = 0.0

    @property
    def goodput(self) -> float:
        """Units a second of steps that are committed, with those failures."""
        step = self.planned.step_seconds
        expected = expected_step_seconds(step, failures_per_hour=self.failures_per_hour)
        return self.units_per_second * step / expected


def lines(answer: Answer) -> Iterator[str]:
    """The answer for people."""
    planned = answer.planned
    yield from formatting.table([REPLICA_COLUMNS if has_replicas(answer) else COLUMNS, *_rows(answer)])
    if answer.links:
        yield ""
        yield from formatting.table([LINK_COLUMNS, *map(_link_row, answer.links)])
    yield ""
    step = formatting.seconds(planned.step_seconds)
    yield f"predicted    {step} a step, {answer.units_per_second:,.0f} {answer.unit}/s"
    number, size = planned.pipeline.num_microbatches, answer.microbatch
    yield f"microbatch   {_counted(size, 'sample')}, {_counted(number, 'microbatch', 'microbatches')} a step"
    if answer.failures_per_hour:
        often = f"{answer.failures_per_hour:g} {'failure' if answer.failures_per_hour == 1 else 'failures'} an hour"
        yield f"goodput      {answer.goodput:,.0f} {answer.unit}/s with {often} that void a step each"
    for stage, seconds in enumerate(planned.simulation.averaging_seconds):
        if seconds > 0.0:
            share = f"{seconds / planned.step_seconds:.0%} of the step"
            yield f"replicas     of stage {stage} sum their gradients in {formatting.seconds(seconds)}, {share}"
    yield f"bottleneck   {planned.bottleneck.sentence}"
    for one in answer.what_if:
        yield f"what if      {one.sentence}"
    for spare in planned.spares:
        yield f"spare        {spare.peer}: {spare.reason}"
    for sentence in _estimates(answer):
        yield f"{ESTIMATED} estimated  {sentence}"


def _estimates(answer: Answer) -> Iterator[str]:
    """What of the answer rests on an estimate, and on which."""
    peers = [str(one.peer) for one in answer.forecasts if one.estimated_compute]
    if peers:
        where = _few(peers, len(answer.forecasts), "every peer", "peers")
        yield f"computing at {where}: from speed alone, not from parts of this model that ran there"
    links = [f"{one.source} to {one.target}" for one in answer.links if one.estimated]
    if links:
        where = _few(links, len(answer.links), "any two neighbours", "links")
        yield f"bandwidth of {where}: from the peers' lines or other links, not measured between the two"


def _few(names: list[str], count: int, everyone: str, noun: str) -> str:
    """The names, unless they are all or many."""
    if len(names) == count > 1:
        return everyone
    return ", ".join(names) if len(names) <= FEW else f"{len(names)} of {count} {noun}"


def _counted(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def _mark(text: str, estimated: bool) -> str:
    return f"{ESTIMATED}{text}" if estimated else text


def _link_row(link: LinkForecast) -> tuple[str, ...]:
    return (
        link.source,
        link.target,
        link.direction,
        link.codec,
        formatting.size(link.num_bytes),
        _mark(formatting.rate(link.bytes_per_second), link.estimated),
        formatting.seconds(link.latency_seconds),
        f"{link.busy_share:.0%}",
    )


def has_replicas(answer: Answer) -> bool:
    """Whether a stage has several peers."""
    return len(answer.planned.seats) > len(answer.planned.deals)


def _rows(answer: Answer) -> Iterator[tuple[str, ...]]:
    count = answer.planned.pipeline.num_microbatches
    for stage, one in zip(answer.planned.seats, answer.forecasts, strict=True):
        summary = answer.summaries[stage.stage]
        layers = summary.first if summary.first == summary.last else f"{summary.first} - {summary.last}"
        yield (
            str(summary.stage),
            stage.peer,
            *([f"{one.num_microbatches} of {count}"] if has_replicas(answer) else []),
            layers,
            f"{formatting.size(one.memory_bytes)} of {formatting.size(one.allowed_bytes)}",
            f"{stage.in_flight}{', recomputing' if stage.recompute else ''}",
            _mark(formatting.seconds(stage.compute_seconds), one.estimated_compute),
            f"{one.busy_share:.0%}",
            formatting.size(one.sent_bytes),
            formatting.size(one.received_bytes),
        )


def as_dict(answer: Answer) -> dict[str, Any]:
    """The answer for scripts: the keys of the event ``plan``, and more."""
    planned = answer.planned
    stages = [_stage_dict(answer, stage) for stage in range(len(planned.deals))]
    return {
        "event": "plan",
        "generation": 0,
        "stages": stages,
        "links": [_link_dict(link) for link in answer.links],
        "predicted_step_seconds": planned.step_seconds,
        "microbatch": answer.microbatch,
        "num_microbatches": planned.pipeline.num_microbatches,
        f"predicted_{answer.unit}_per_second": answer.units_per_second,
        "failures_per_hour": answer.failures_per_hour,
        f"goodput_{answer.unit}_per_second": answer.goodput,
        "bottleneck": planned.bottleneck.sentence,
        "bottleneck_kind": str(planned.bottleneck.kind),
        "spares": [{"name": spare.peer, "code": spare.code, "reason": spare.reason} for spare in planned.spares],
        "what_if": [
            {"change": one.change, "predicted_step_seconds": one.step_seconds, "sentence": one.sentence}
            for one in answer.what_if
        ],
    }


def _stage_dict(answer: Answer, stage: int) -> dict[str, Any]:
    """A stage of the answer, with what is said of its first replica; those of a stage with several each on its own as well."""
    planned, summary = answer.planned, answer.summaries[stage]
    replicas = [_replica_dict(answer, seat) for seat in planned.pipeline.seats[stage]]
    found = {
        "stage": int(summary.stage),
        "peers": list(summary.peers),
        "first": summary.first,
        "last": summary.last,
        "parameters": summary.parameters,
        "recompute": planned.seats[planned.pipeline.seats[stage][0]].recompute,
        **{key: value for key, value in replicas[0].items() if key not in ("name", "num_microbatches")},
    }
    if len(replicas) == 1:
        return found
    averaging_seconds = planned.simulation.averaging_seconds[stage]
    return {**found, "replicas": replicas, "deal": list(planned.deals[stage]), "averaging_seconds": averaging_seconds}


def _replica_dict(answer: Answer, number: int) -> dict[str, Any]:
    seat, one = answer.planned.seats[number], answer.forecasts[number]
    return {
        "name": seat.peer,
        "num_microbatches": one.num_microbatches,
        "predicted_memory_bytes": one.memory_bytes,
        "allowed_memory_bytes": one.allowed_bytes,
        "in_flight": seat.in_flight,
        "microbatch_seconds": seat.compute_seconds,
        "busy_share": one.busy_share,
        "sent_bytes": one.sent_bytes,
        "received_bytes": one.received_bytes,
        "estimated_compute": one.estimated_compute,
        "estimated_link": one.estimated_link,
    }


def _link_dict(link: LinkForecast) -> dict[str, Any]:
    """A link of the answer; a bandwidth without limit is null."""
    values = dataclasses.asdict(link)
    return {**values, "bytes_per_second": link.bytes_per_second if math.isfinite(link.bytes_per_second) else None}


def draw(answer: Answer, title: str) -> str:
    from atoll.coordinator.cli.timeline import timeline

    planned = answer.planned
    lanes = [f"{one.stage} · {one.peer}" for one in planned.seats]
    heading = f"{title}: a predicted step of {formatting.seconds(planned.step_seconds)} in {len(lanes)} stages"
    notes = [f"bottleneck: {planned.bottleneck.sentence}", *(f"{ESTIMATED} estimated: {one}" for one in _estimates(answer))]
    return timeline(lanes, planned.simulation, heading, notes)
