"""What a plan means for each peer and link, and what a change to the swarm would bring. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from atoll.compression.context import Direction
from atoll.coordinator.planning.costs import allowed_bytes
from atoll.coordinator.planning.network import Matrix, Network
from atoll.coordinator.planning.planner import Planned, PlanRequest, link_plans, plan_placement
from atoll.coordinator.planning.simulator import sums_of
from atoll.protocol.errors import PlacementError
from atoll.protocol.ids import PeerId
from atoll.protocol.quantities import format_seconds

NOTICEABLE = 0.01
"""A smaller change of the step is called none."""
FASTER = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageForecast:
    """One peer's share of a step: what it is busy with, holds, sends and receives. ``stage`` it holds with others perhaps."""

    stage: int
    num_microbatches: int
    """How many of a step's it gets."""
    averaging_seconds: float
    """How long its stage's replicas wait for the sum of their gradients, at a step's end."""

    peer: PeerId
    busy_share: float
    memory_bytes: int
    allowed_bytes: int
    sent_bytes: float
    received_bytes: float
    estimated_compute: bool
    """Whether its times follow from the peer's speed alone, and not from measured parts of this model."""
    estimated_link: bool
    """Whether the rate of a link of its to the next stage, in one direction at least, is an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkForecast:
    """One direction between two neighbouring stages; ``num_bytes`` are a microbatch's as they cross, encoded."""

    source: PeerId
    target: PeerId
    direction: Direction
    codec: str
    num_bytes: float
    bytes_per_second: float
    latency_seconds: float
    busy_share: float
    estimated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A change to the swarm and the step that would then be planned."""

    change: str
    step_seconds: float
    sentence: str


def forecast(request: PlanRequest, planned: Planned) -> tuple[StageForecast, ...]:
    """One for each seat."""
    offers = {offer.name: offer for offer in request.peers}
    place = {name: index for index, name in enumerate(request.network.names)}
    sent, received = _traffic(planned)
    pipeline, estimated = planned.pipeline, request.network.estimated
    forecasts = []
    for index, stage in enumerate(planned.seats):
        own = place[stage.peer]
        onward = [place[planned.seats[other].peer] for one, other in pipeline.ends if one == index]
        forecasts.append(
            StageForecast(
                stage=stage.stage,
                num_microbatches=pipeline.holders[stage.stage].count(index),
                averaging_seconds=planned.simulation.averaging_seconds[stage.stage],
                peer=stage.peer,
                busy_share=planned.simulation.busy_seconds[index] / planned.step_seconds,
                memory_bytes=stage.memory_bytes,
                allowed_bytes=allowed_bytes(offers[stage.peer], request.constraints),
                sent_bytes=sent[index],
                received_bytes=received[index],
                estimated_compute=offers[stage.peer].measured is None,
                estimated_link=any(bool(estimated[own, other] or estimated[other, own]) for other in onward),
            )
        )
    return tuple(forecasts)


def forecast_links(request: PlanRequest, planned: Planned) -> tuple[LinkForecast, ...]:
    """Two for each pair of neighbours: activations forward, gradients backward."""
    place = {name: index for index, name in enumerate(request.network.names)}
    return tuple(
        LinkForecast(
            source=link.source,
            target=link.target,
            direction=link.direction,
            codec=link.codec,
            num_bytes=link.num_bytes,
            bytes_per_second=link.bytes_per_second,
            latency_seconds=link.latency_seconds,
            busy_share=link.step_seconds / planned.step_seconds,
            estimated=bool(request.network.estimated[place[link.source], place[link.target]]),
        )
        for link in link_plans(planned)
    )


def _traffic(planned: Planned) -> tuple[list[float], list[float]]:
    """Bytes that each seat sends and receives in a step."""
    pipeline = planned.pipeline
    sent, received = [0.0] * len(planned.seats), [0.0] * len(planned.seats)
    for link, (one, other), count in zip(pipeline.links, pipeline.ends, pipeline.loads, strict=True):
        sent[one] += count * link.forward.num_bytes
        received[other] += count * link.forward.num_bytes
        sent[other] += count * link.backward.num_bytes
        received[one] += count * link.backward.num_bytes
    for source, target, part in sums_of(pipeline):
        sent[source] += 2.0 * part.num_bytes
        received[target] += 2.0 * part.num_bytes
    for exchange in planned.pipeline.exchanges:
        sent[exchange.source] += exchange.transfer.num_bytes
        received[exchange.target] += exchange.transfer.num_bytes
    return sent, received


def what_if(request: PlanRequest, planned: Planned) -> tuple[WhatIf, ...]:
    """One more peer like a typical one of the plan; the busiest link twice as fast."""
    changes = [_one_more_peer(request, planned)]
    faster = _faster_link(request, planned)
    if faster is not None:
        changes.append(faster)
    results = []
    for change, changed in changes:
        try:
            step_seconds = plan_placement(changed).step_seconds
        except PlacementError:
            continue
        # The search may miss what is no worse than before.
        step_seconds = min(step_seconds, planned.step_seconds)
        sentence = _compare(change, step_seconds, planned)
        if len(changed.peers) > len(request.peers) and request.constraints.num_stages is not None:
            sentence += f", with plan.stages at {request.constraints.num_stages}"
        results.append(WhatIf(change=change, step_seconds=step_seconds, sentence=sentence))
    return tuple(results)


def _compare(change: str, step_seconds: float, planned: Planned) -> str:
    gain = 1.0 - step_seconds / planned.step_seconds
    if gain < NOTICEABLE:
        return f"{change}: no faster"
    return f"{change}: {format_seconds(step_seconds)} a step, {gain:.0%} less"


def _one_more_peer(request: PlanRequest, planned: Planned) -> tuple[str, PlanRequest]:
    used = [offer for offer in request.peers if offer.name in {seat.peer for seat in planned.seats}]
    typical = sorted(used, key=lambda offer: (offer.flops_per_second, offer.name))[len(used) // 2]
    # On a machine of its own: on that of the original it would add no processors.
    twin = replace(typical, name=PeerId(f"{typical.name} (another)"), machine="")
    network = _with_twin(request.network, typical.name, twin.name)
    return f"one more peer like {typical.name}", replace(request, peers=(*request.peers, twin), network=network)


def _with_twin(network: Network, name: PeerId, twin: PeerId) -> Network:
    """The network with ``twin``, whose links are those of ``name``; between the two the best that ``name`` has."""
    own = network.names.index(name)
    others = [index for index in range(len(network.names)) if index != own]
    order = np.array([*range(len(network.names)), own])
    pairs = np.ix_(order, order)

    def grown(matrix: Matrix, between: float, itself: float) -> Matrix:
        larger: Matrix = matrix[pairs]
        larger[own, -1] = larger[-1, own] = between
        larger[-1, -1] = itself
        return larger

    best = float(network.rate[own, others].max()) if others else 125e6
    nearest = float(network.latency[own, others].min()) if others else 0.0005
    estimated = network.estimated[pairs]
    estimated[-1, :] = estimated[:, -1] = True
    return Network(
        names=(*network.names, twin),
        rate=grown(network.rate, best, np.inf),
        latency=grown(network.latency, nearest, 0.0),
        upload=network.upload[order],
        download=network.download[order],
        estimated=estimated,
        relayed=network.relayed,
    )


def _faster_link(request: PlanRequest, planned: Planned) -> tuple[str, PlanRequest] | None:
    """The link that is busy for longest, and the lines at its ends, at twice the rate."""
    busy = planned.simulation.sent_seconds
    if not busy:
        return None
    index = max(range(len(busy)), key=lambda number: max(busy[number]))
    names = tuple(planned.seats[end].peer for end in planned.pipeline.ends[index])
    ends = [request.network.names.index(name) for name in names]
    rate, upload, download = (
        matrix.copy() for matrix in (request.network.rate, request.network.upload, request.network.download)
    )
    for one, other in (ends, ends[::-1]):
        rate[one, other] *= FASTER
    upload[ends] *= FASTER
    download[ends] *= FASTER
    network = replace(request.network, rate=rate, upload=upload, download=download)
    return f"twice the bandwidth between {names[0]} and {names[1]}", replace(request, network=network)
