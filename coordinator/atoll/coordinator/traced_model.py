"""A job's model as the coordinator holds it: an op graph with what placing and starting it need. Holds no weights."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeAlias

import torch

from atoll.coordinator.data.feed import Feed
from atoll.coordinator.events import StageSummary
from atoll.coordinator.first_values import FirstValues
from atoll.coordinator.learning_rates import held_copies, lasting_copies
from atoll.coordinator.moves import Holders, blocked, fetch_seconds
from atoll.coordinator.planning.avoidance import avoiding, neighbours, refuse_needed
from atoll.coordinator.planning.network import Network, build_network
from atoll.coordinator.planning.pinned import pinned_plan
from atoll.coordinator.planning.plan import Plan, StagePlan
from atoll.coordinator.planning.planner import PlanRequest, as_plan, plan_placement
from atoll.coordinator.planning.replanning import MoveCost, replan
from atoll.coordinator.planning.replicable import refuse_local_steps, refuse_replicas
from atoll.coordinator.planning.segments import PeerOffer, Segments
from atoll.coordinator.planning.standing_in import stand_in
from atoll.coordinator.tracing.cuts import module_range
from atoll.coordinator.tracing.rehearsal import Rehearsal, rehearse
from atoll.coordinator.tracing.segments import segments_of
from atoll.coordinator.tracing.slicing import slice_graph
from atoll.coordinator.tracing.source import BuiltModel, open_source
from atoll.coordinator.tracing.trace import trace
from atoll.coordinator.wishes import constraints_of, offers_under, pinned_segments
from atoll.protocol.errors import PlacementError, TraceError
from atoll.protocol.graph import OpGraph, StageGraph, bind
from atoll.protocol.ids import PeerId, StageIndex
from atoll.protocol.job import Job
from atoll.protocol.state import changing_names
from atoll.protocol.wording import listed

_log = logging.getLogger(__name__)

Pairs: TypeAlias = frozenset[frozenset[PeerId]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan with the graphs of its stages."""

    plan: Plan
    graphs: tuple[StageGraph, ...]
    summaries: tuple[StageSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """Links that a plan must do without: those of the pairs in ``broken``, be it for tensors or for state. ``holders`` have the
    state in memory, in stages as under ``previous`` (None: nothing is learned yet), and those of ``on_disks`` in snapshots."""

    broken: Pairs
    previous: Plan | None = None
    holders: Holders = field(default_factory=dict)
    on_disks: Holders = field(default_factory=dict)
    steps_left: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """Made once a run; every method is pure and may take seconds."""

    job: Job
    rehearsal: Rehearsal = field(repr=False)
    segments: Segments = field(repr=False)
    first_values: FirstValues = field(repr=False)
    pins: tuple[tuple[int, str], ...] = ()
    """Segments that the job ties to a peer."""

    @property
    def graph(self) -> OpGraph:
        return self.rehearsal.graph

    @property
    def trainable(self) -> tuple[str, ...]:
        """The trained parameters, in the graph's order."""
        return tuple(spec.name for spec in self.graph.parameters if spec.trainable)

    @property
    def changing(self) -> frozenset[str]:
        """The parameters and buffers whose state training changes."""
        return changing_names(self.graph)

    def request(self, peers: Sequence[PeerOffer], network: Network | None = None) -> PlanRequest:
        """What is to be planned for ``peers``. Without a network, links count as equal. Raises PlacementError."""
        links = build_network(peer.name for peer in peers) if network is None else network
        return PlanRequest(
            segments=self.segments,
            peers=offers_under(self.job, peers),
            network=links,
            constraints=constraints_of(self.job, self.pins, peers),
        )

    def propose(self, peers: Sequence[PeerOffer], network: Network | None = None, around: Around | None = None) -> Proposal:
        """Place the stages on ``peers``, without the links that ``around`` names. Raises PlacementError."""
        if self.job.plan.pinned_stages:
            pinned = self.sliced(pinned_plan(self.request(peers, network), self.job.plan.pinned_stages))
            if around is not None:
                self._check(pinned, around.broken, around.holders, around.on_disks)
            return pinned
        try:
            if around is not None and around.previous is not None:
                request, cost = self._request(peers, network, around.broken), self._move_cost()
                planned = replan(request, around.previous, cost=cost, steps_left=around.steps_left).planned
            else:
                planned = plan_placement(self._request(peers, network, around.broken if around is not None else frozenset()))
        except PlacementError as error:
            raise self._naming_layers(error) from error
        proposal = self.sliced(as_plan(planned, self.segments))
        if around is not None:
            self._check(proposal, around.broken, around.holders, around.on_disks)
        return proposal

    def as_before(self, peers: Sequence[PeerOffer], previous: Plan) -> Proposal | None:
        """``previous`` as it is, None where a peer of it is missing or offers too little, or its stages are none of this
        graph's. Raises PlacementError for names that are wrong."""
        offered = {offer.name: offer.memory_bytes for offer in self.request(peers).peers}
        fits = all(stage.of(peer).memory_bytes <= offered.get(peer, -1) for stage in previous.stages for peer in stage.replicas)
        if not fits or not {stage.end for stage in previous.stages} <= set(self.segments.positions):
            return None
        spares = tuple(offer.name for offer in peers if offer.name not in previous.peers)
        why = tuple((name, reason) for name, reason in previous.why_spare if name in spares)
        return self.sliced(replace(previous, spares=spares, why_spare=why))

    def stand_in(self, peers: Sequence[PeerOffer], network: Network, previous: Plan, holders: Holders) -> Proposal | None:
        """``previous`` with each peer that is missing replaced at once, None where nobody can take its place; ``holders`` say
        who has the state of a name, in memory or on a disk. Raises PlacementError."""
        if self.job.plan.pinned_stages:
            return None  # who shall replace whom is the job's
        graphs, copies = slice_graph(self.graph, previous.cuts, self.rehearsal.differentiable), self._move_cost().state_copies

        def fetching(stage: StageIndex, peer: PeerId) -> float:
            return fetch_seconds(graphs[stage], peer, holders, network, copies)

        planned = stand_in(self.request(peers, network), previous, fetching)
        return None if planned is None else self.sliced(as_plan(planned, self.segments))

    def _request(self, peers: Sequence[PeerOffer], network: Network | None, broken: Pairs) -> PlanRequest:
        request = self.request(peers, network)
        return replace(request, network=avoiding(request.network, broken)) if broken else request

    def _move_cost(self) -> MoveCost:
        return MoveCost(state_copies=lasting_copies(self.job))

    def _check(self, proposal: Proposal, broken: Pairs, holders: Holders, on_disks: Holders) -> None:
        plan, graphs = proposal.plan, proposal.graphs
        refuse_needed((broken & neighbours(plan, graphs)) | blocked(plan.spread(graphs), plan.peers, holders, on_disks, broken))

    def _naming_layers(self, error: PlacementError) -> PlacementError:
        """The same with the layers that find no room, as people know them."""
        ranges = [module_range(self.graph.nodes[first:end]) for first, end in error.uncovered]
        if not ranges:
            return error
        named = listed(first if first == last else f"{first} to {last}" for first, last in ranges)
        told = f"{error}; uncovered: {named}"
        return PlacementError(told, error.missing_bytes, uncovered=error.uncovered, hopeless=error.hopeless)

    def reconsider(
        self,
        peers: Sequence[PeerOffer],
        current: Plan,
        steps_left: int,
        network: Network | None = None,
        broken: Pairs = frozenset(),
    ) -> tuple[Proposal | None, str]:
        """A plan that is worth leaving ``current`` for, None when there is none; and why. Raises PlacementError."""
        if self.job.plan.pinned_stages:
            pinned = pinned_plan(self.request(peers, network), self.job.plan.pinned_stages)
            same = pinned.peers == current.peers
            return (
                (None, "every stage is where plan.pin has it") if same else (self.sliced(pinned), "others of plan.pin are here")
            )
        request = self._request(peers, network, broken)
        found = replan(request, current, cost=self._move_cost(), steps_left=steps_left)
        if not found.move:
            return None, found.reason
        proposal = self.sliced(as_plan(found.planned, self.segments))
        self._check(proposal, broken, {}, {})
        return proposal, found.reason

    def sliced(self, plan: Plan) -> Proposal:
        """``plan`` with the graphs of its stages."""
        plan = replace(plan, microbatch=self.job.training.microbatch_samples)
        graphs = slice_graph(self.graph, plan.cuts, self.rehearsal.differentiable)
        refuse_replicas(plan, graphs)
        if self.job.averaging.local_steps > 1:
            refuse_local_steps(graphs)
        return summed_up(plan, graphs)


def summed_up(plan: Plan, graphs: tuple[StageGraph, ...]) -> Proposal:
    """``plan``, whose stages are ``graphs``, with what people are told of it."""
    return Proposal(plan=plan, graphs=graphs, summaries=tuple(map(_summary, graphs, plan.stages)))


def trace_model(job: Job, feed: Feed) -> TracedModel:
    """Trace the job's model for the feed's batches. Raises TraceError or JobError with what to change."""
    began = time.monotonic()
    built = open_source(job.model).build()
    graph = trace(built, feed.example_inputs(), feed.dynamic_dimensions)
    model = _costed(job, graph, FirstValues(graph, _Maker(built, job.training.seed).make, job.model.weights))
    num_parameters = sum(prod(spec.shape) for spec in graph.parameters)
    _log.info(
        "traced %d nodes, %d parameters and %d possible cuts in %.1f s",
        len(graph.nodes),
        num_parameters,
        model.segments.num_segments - 1,
        time.monotonic() - began,
    )
    return model


def with_sizes_of(model: TracedModel, feed: Feed) -> TracedModel:
    """The same trace, costed for the sizes of ``feed``'s microbatches. Raises TraceError where it does not hold for them."""
    job = model.job.with_microbatch(feed.microbatch)
    shapes = {name: tuple(tensor.shape) for name, tensor in feed.example_inputs().items()}
    try:
        sizes = bind(model.graph.inputs, shapes)
    except ValueError as error:
        raise TraceError(f"the model was traced for other microbatches: {error}") from error
    return _costed(job, replace(model.graph, example=tuple(sizes.items())), model.first_values)


def _costed(job: Job, graph: OpGraph, first_values: FirstValues) -> TracedModel:
    rehearsal = rehearse(graph, job.training.precision)
    segments = segments_of(rehearsal, copies=held_copies(job))
    pins = pinned_segments(job, graph, segments)
    return TracedModel(job=job, rehearsal=rehearsal, segments=segments, pins=pins, first_values=first_values)


class _Maker:
    """Makes the first value of a tensor that has no program. One at a time: torch's random state is the process's."""

    def __init__(self, built: BuiltModel, seed: int) -> None:
        self._built = built
        self._seed = seed
        self._lock = threading.Lock()

    def make(self, name: str) -> torch.Tensor:
        with self._lock:
            return self._built.computed_value(name, self._seed)


def _summary(graph: StageGraph, stage: StagePlan) -> StageSummary:
    first, last = module_range(graph.nodes)
    return StageSummary(
        stage=graph.stage,
        peers=stage.replicas,
        first=first,
        last=last,
        parameters=sum(prod(spec.shape) for spec in graph.parameters),
        predicted_memory_bytes=stage.memory_bytes,
    )
