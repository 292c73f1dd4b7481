"""The planner: which peers, how many stages, in what order, cut where, how many microbatches in flight, and who is left
over.

Pure, and the same for any order of its inputs: peers are sorted by name before anything is decided, random choices come
from a fixed seed, and effort is counted in evaluations. The search is ``search``; this module prepares it and says what
came of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from atoll.compression.context import Direction
from atoll.coordinator.planning.bottleneck import Bottleneck, find_bottleneck
from atoll.coordinator.planning.costs import Constraints, cost_table, memory_table
from atoll.coordinator.planning.layouts import Layout
from atoll.coordinator.planning.network import Network
from atoll.coordinator.planning.pipeline import Pipeline, Simulation
from atoll.coordinator.planning.plan import LinkPlan, Plan, ReplicaPlan, StagePlan
from atoll.coordinator.planning.prediction import LinkCodecs, Predictor, seats
from atoll.coordinator.planning.refusal import refuse
from atoll.coordinator.planning.search import search
from atoll.coordinator.planning.segments import PeerOffer, Segments, natural_order
from atoll.coordinator.planning.shortlist import SHORTLIST, shortlist
from atoll.coordinator.planning.simulator import simulate
from atoll.coordinator.planning.spares import Situation, Spare, explain_spares
from atoll.protocol.errors import PlacementError
from atoll.protocol.ids import PeerId, StageIndex


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanRequest:
    """What is to be placed, on whom, under which constraints. ``network`` knows all ``peers``."""

    segments: Segments
    peers: tuple[PeerOffer, ...]
    network: Network
    constraints: Constraints


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSeat:
    """A replica of ``stage``: positions ``first`` to ``end`` on ``peer``. ``compute_seconds`` are for one microbatch."""

    stage: int
    peer: PeerId
    first: int
    end: int
    in_flight: int
    recompute: bool
    memory_bytes: int
    compute_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planned:
    """The decision and what it is predicted to do. ``seats`` are stage by stage, those of one in the order in which replicas
    sum their gradients; ``deals`` say, for each stage with several, which of them gets which microbatch. ``codecs`` has an
    entry for each of the pipeline's links. ``spares`` say why each peer is left over."""

    seats: tuple[PlannedSeat, ...]
    deals: tuple[tuple[int, ...], ...]
    codecs: tuple[LinkCodecs, ...]
    spares: tuple[Spare, ...]
    step_seconds: float
    bottleneck: Bottleneck
    pipeline: Pipeline
    simulation: Simulation


def plan_placement(request: PlanRequest) -> Planned:
    """The best placement found. Raises PlacementError with a sentence that says what is missing, and how much."""
    situation = situation_of(request)
    predictor = predictor_of(situation)
    found = search(predictor, request.constraints.num_stages)
    if found is None:
        raise refuse(predictor, request.constraints)
    return describe(situation, predictor, found.layout, found.in_flight)


def situation_of(request: PlanRequest) -> Situation:
    """The request with its peers in the planner's order. Raises PlacementError for names that are wrong."""
    peers = tuple(sorted(request.peers, key=lambda peer: (natural_order(peer.name), peer.name)))
    _check_names(peers, request)
    return Situation(
        segments=request.segments,
        peers=peers,
        network=request.network.select([peer.name for peer in peers]),
        constraints=request.constraints,
        memory=memory_table(request.segments),
    )


def predictor_of(situation: Situation, always: frozenset[PeerId] = frozenset()) -> Predictor:
    """Everything the search looks up, for all peers or, where these are very many, for the useful ones and ``always``."""
    peers, network = situation.peers, situation.network
    segments, constraints, memory = situation.segments, situation.constraints, situation.memory
    if len(peers) > SHORTLIST:
        chosen = frozenset(shortlist(segments, peers, network, constraints, memory))
        peers = tuple(peer for index, peer in enumerate(peers) if index in chosen or peer.name in always)
        network = network.select([peer.name for peer in peers])
    table = cost_table(segments, peers, network, constraints, memory)
    return Predictor.of(segments, peers, network, constraints, memory, table)


def describe(situation: Situation, predictor: Predictor, layout: Layout, in_flight: tuple[int, ...]) -> Planned:
    """What ``layout`` is predicted to do."""
    codecs = predictor.codecs(layout)
    pipeline = predictor.pipeline(layout, in_flight, codecs)
    simulation = simulate(pipeline, record=True)
    used = tuple(predictor.peers[peer].name for peer in layout.seats)
    return Planned(
        seats=_seats(predictor, layout, in_flight),
        deals=predictor.deals(layout),
        codecs=codecs,
        spares=explain_spares(situation, frozenset(used), pipeline),
        step_seconds=simulation.step_seconds,
        bottleneck=find_bottleneck(used, pipeline, simulation, predictor.most_in_flight(layout)),
        pipeline=pipeline,
        simulation=simulation,
    )


def as_plan(planned: Planned, segments: Segments) -> Plan:
    """The decision as the run takes it, in nodes of the graph."""
    stages = tuple(_stage_plan(planned, segments, index) for index in range(len(planned.deals)))
    return Plan(
        stages=stages,
        spares=tuple(spare.peer for spare in planned.spares),
        step_seconds=planned.step_seconds,
        why_spare=tuple((spare.peer, spare.reason) for spare in planned.spares),
        bottleneck=planned.bottleneck.sentence,
        links=tuple(link_plans(planned)),
    )


def _stage_plan(planned: Planned, segments: Segments, stage: int) -> StagePlan:
    numbers = planned.pipeline.seats[stage]
    leader, several = planned.seats[numbers[0]], len(numbers) > 1
    replicas = tuple(_replica_plan(planned, number) for number in numbers)
    return StagePlan(
        stage=StageIndex(stage),
        replicas=tuple(replica.peer for replica in replicas),
        first=segments.positions[leader.first],
        end=segments.positions[leader.end],
        in_flight=leader.in_flight,
        recompute=leader.recompute,
        memory_bytes=leader.memory_bytes,
        microbatch_seconds=leader.compute_seconds,
        sent_bytes=int(segments.forward_bytes[leader.end]),
        step_compute_seconds=replicas[0].step_compute_seconds,
        deal=planned.deals[stage],
        differing=replicas if several else (),
    )


def _replica_plan(planned: Planned, number: int) -> ReplicaPlan:
    seat = planned.seats[number]
    return ReplicaPlan(
        peer=seat.peer,
        in_flight=seat.in_flight,
        memory_bytes=seat.memory_bytes,
        microbatch_seconds=seat.compute_seconds,
        step_compute_seconds=planned.simulation.busy_seconds[number],
    )


def link_plans(planned: Planned) -> Iterator[LinkPlan]:
    """Two for each pair of neighbours: activations forward, gradients backward."""
    for index, (link, codecs) in enumerate(zip(planned.pipeline.links, planned.codecs, strict=True)):
        one, other = planned.pipeline.ends[index]
        ends = planned.seats[one].peer, planned.seats[other].peer
        ways = (
            (Direction.FORWARD, ends, link.forward, codecs.forward),
            (Direction.BACKWARD, ends[::-1], link.backward, codecs.backward),
        )
        for way, busy in zip(ways, planned.simulation.sent_seconds[index], strict=True):
            direction, (source, target), transfer, codec = way
            yield LinkPlan(
                source=source,
                target=target,
                direction=direction,
                codec=codec.name,
                num_bytes=transfer.num_bytes,
                bytes_per_second=transfer.bytes_per_second,
                latency_seconds=transfer.latency_seconds,
                step_seconds=busy,
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicrobatchOption:
    """The same global batch in microbatches of ``num_samples`` samples."""

    num_samples: int
    request: PlanRequest


def plan_microbatches(options: Iterable[MicrobatchOption]) -> tuple[tuple[MicrobatchOption, Planned], ...]:
    """A plan for each option that fits, the largest microbatch first. Raises PlacementError when none fits."""
    plans: list[tuple[MicrobatchOption, Planned]] = []
    refusal: PlacementError | None = None
    for option in sorted(options, key=lambda option: -option.num_samples):
        try:
            plans.append((option, plan_placement(option.request)))
        except PlacementError as error:
            refusal = error
    if not plans:
        raise refusal or PlacementError("there is no size of microbatch to choose from")
    return tuple(plans)


def _check_names(peers: tuple[PeerOffer, ...], request: PlanRequest) -> None:
    if not peers:
        raise PlacementError("no peer has joined; start one with atoll-peer join")
    names = [peer.name for peer in peers]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PlacementError(f"two peers are named {twice!r}; give one of them another name")
    for segment, owner in request.constraints.pins:
        if owner not in names:
            raise PlacementError(f"segment {segment} is pinned to {owner!r}, which has not joined; start it or remove the pin")


def _seats(predictor: Predictor, layout: Layout, in_flight: tuple[int, ...]) -> tuple[PlannedSeat, ...]:
    memory = predictor.memory_bytes(layout, in_flight)
    return tuple(
        PlannedSeat(
            stage=seat.stage,
            peer=predictor.peers[seat.peer].name,
            first=seat.first,
            end=seat.end,
            in_flight=in_flight[number],
            recompute=seat.anew,
            memory_bytes=memory[number],
            compute_seconds=float(predictor.table.compute[int(seat.anew), seat.peer, seat.first, seat.end]),
        )
        for number, seat in enumerate(seats(layout))
    )
