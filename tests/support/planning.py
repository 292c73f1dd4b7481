"""Instances for the planner, random and planted, and the exhaustive search that it is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product

import numpy as np

from atoll.coordinator.planning.bounds import LowerBounds
from atoll.coordinator.planning.costs import Constraints, cost_table, memory_table
from atoll.coordinator.planning.group_changes import every_grouping
from atoll.coordinator.planning.in_flight import choices
from atoll.coordinator.planning.judging import judge_of
from atoll.coordinator.planning.layouts import Layout, with_groups
from atoll.coordinator.planning.network import Network
from atoll.coordinator.planning.planner import PlanRequest
from atoll.coordinator.planning.prediction import Predictor
from atoll.coordinator.planning.segments import MeasuredSeconds, PeerOffer, Segments, StageMemory
from atoll.protocol.ids import NodeIndex, PeerId

MB = 1e6


@dataclass(frozen=True, slots=True)
class LinearMemory:
    """Memory that adds up over segments; with recomputation a stage keeps its input alone, and one segment's activations."""

    weights: tuple[float, ...]
    activations: tuple[float, ...]
    crossing: tuple[float, ...]

    def __call__(self, first: int, end: int, recompute: bool) -> StageMemory:
        weights = 4.0 * sum(self.weights[first:end])
        saved = sum(self.activations[first:end])
        if recompute:
            return StageMemory(fixed_bytes=int(weights + saved), microbatch_bytes=int(self.crossing[first]) + 1)
        return StageMemory(fixed_bytes=int(weights), microbatch_bytes=int(saved))


def segments_of(
    flops: Sequence[float], crossing: Sequence[float], weights: Sequence[float], activations: Sequence[float]
) -> Segments:
    """Segments from what each costs forward; ``crossing`` is for the cuts between them."""
    sums = tuple(float(value) for value in np.concatenate([[0.0], np.cumsum(flops)]))
    edges = (0.0, *(float(value) for value in crossing), 0.0)
    return Segments(
        positions=tuple(NodeIndex(10 * index) for index in range(len(sums))),
        forward_flops=sums,
        backward_flops=tuple(2.0 * value for value in sums),
        parameter_bytes=tuple(float(value) for value in np.concatenate([[0.0], np.cumsum(weights)])),
        forward_bytes=edges,
        backward_bytes=edges,
        memory=LinearMemory(tuple(weights), tuple(activations), edges),
    )


def equal_segments(count: int, *, flops: float = 1e9, crossing: float = MB, weights: float = MB) -> Segments:
    """``count`` equal ones."""
    return segments_of([flops] * count, [crossing] * (count - 1), [weights] * count, [MB] * count)


def peers_of(flops: Sequence[float], memory: Sequence[float] | None = None) -> tuple[PeerOffer, ...]:
    """Peers ``peer-00``, ``peer-01``, ... with plenty of memory by default."""
    room = memory or [1e12] * len(flops)
    return tuple(
        PeerOffer(name=PeerId(f"peer-{index:02d}"), flops_per_second=speed, memory_bytes=int(size))
        for index, (speed, size) in enumerate(zip(flops, room, strict=True))
    )


def network_of(
    names: Sequence[PeerId],
    rate: np.ndarray | float,
    latency: np.ndarray | float = 0.0,
    upload: np.ndarray | float = np.inf,
    download: np.ndarray | float = np.inf,
) -> Network:
    """A network from matrices, or from one number for all pairs."""
    count = len(names)
    rates = np.array(np.broadcast_to(rate, (count, count)), dtype=np.float64)
    latencies = np.array(np.broadcast_to(latency, (count, count)), dtype=np.float64)
    up = np.array(np.broadcast_to(upload, (count,)), dtype=np.float64)
    down = np.array(np.broadcast_to(download, (count,)), dtype=np.float64)
    rates = np.minimum(rates, np.minimum(up[:, None], down[None, :]))
    np.fill_diagonal(rates, np.inf)
    np.fill_diagonal(latencies, 0.0)
    return Network(
        names=tuple(names),
        rate=rates,
        latency=latencies,
        upload=up,
        download=down,
        estimated=np.zeros((count, count), dtype=np.bool_),
    )


def random_request(seed: int, num_peers: int, num_segments: int) -> PlanRequest:
    """Unequal peers and segments; networks of several kinds; memory that is plentiful in some instances and tight in
    others."""
    generator = np.random.default_rng(seed)
    flops = 1e9 * np.exp(0.5 * generator.standard_normal(num_segments))
    crossing = 1e6 * np.exp(generator.standard_normal(num_segments - 1))
    weights = 2e6 * np.exp(0.5 * generator.standard_normal(num_segments))
    activations = 2e6 * np.exp(0.5 * generator.standard_normal(num_segments))
    num_microbatches = int(generator.choice([1, 2, 4, 8]))
    speed = 10e9 * np.exp(generator.standard_normal(num_peers) * generator.choice([0.0, 0.4, 1.0]))
    whole = 4 * weights.sum() + activations.sum() * min(4, num_microbatches)
    tightness = float(generator.choice([0.5, 1.0, 4.0]))
    memory = tightness * whole * np.exp(0.5 * generator.standard_normal(num_peers)) + 3e7
    peers = peers_of([float(value) for value in speed], [float(value) for value in memory])
    rate = 10e6 * np.exp(generator.standard_normal((num_peers, num_peers)) * generator.choice([0.0, 0.5, 1.5]))
    rate *= float(generator.choice([0.3, 3.0, 30.0]))
    latency = generator.uniform(0.0, float(generator.choice([0.001, 0.05])), (num_peers, num_peers))
    lines = bool(generator.integers(2))
    network = network_of(
        [peer.name for peer in peers],
        rate,
        latency,
        generator.uniform(2e6, 40e6, num_peers) if lines else np.inf,
        generator.uniform(10e6, 80e6, num_peers) if lines else np.inf,
    )
    constraints = Constraints(num_microbatches=num_microbatches)
    return PlanRequest(
        segments=segments_of(list(flops), list(crossing), list(weights), list(activations)),
        peers=peers,
        network=network,
        constraints=constraints,
    )


def on_shared_machines(request: PlanRequest, seed: int) -> PlanRequest:
    """The request with its peers on a few machines of few cores, the coordinator at some distance, and some peers measured."""
    generator = np.random.default_rng((seed, 1))
    machines = [(f"machine-{number}", int(generator.integers(1, 5))) for number in range(int(generator.integers(1, 3)))]
    peers = []
    for peer in request.peers:
        name, cores = machines[int(generator.integers(len(machines)))]
        alone = generator.random() < 0.2
        peers.append(
            replace(
                peer,
                machine="" if alone else name,
                cores=cores,
                threads=int(generator.integers(1, 4)),
                coordinator_round_trip_seconds=float(generator.uniform(0.0, 0.1)),
                measured=measured_seconds(request.segments, peer, generator) if generator.random() < 0.5 else None,
            )
        )
    return replace(request, peers=tuple(peers))


def measured_seconds(segments: Segments, peer: PeerOffer, generator: np.random.Generator) -> MeasuredSeconds:
    """What a peer of that speed might measure: the first segment makes all its gradients at once."""
    own = np.diff(segments.forward_flops) / peer.flops_per_second
    forward = own * generator.uniform(0.7, 1.3, len(own))
    backward = own * generator.uniform(0.7, 1.3, len(own))
    accumulate = own * generator.uniform(0.7, 1.3, len(own))
    backward[0], accumulate[0] = backward[0] + accumulate[0], 0.0
    update = own * generator.uniform(0.1, 0.5, len(own))
    return MeasuredSeconds(forward=_sums(forward), backward=_sums(backward), accumulate=_sums(accumulate), update=_sums(update))


def _sums(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(value) for value in np.concatenate([[0.0], np.cumsum(values)]))


def predictor_of(request: PlanRequest) -> Predictor:
    """The predictor over all peers of ``request``, in their own order."""
    network = request.network.select([peer.name for peer in request.peers])
    memory = memory_table(request.segments)
    table = cost_table(request.segments, request.peers, network, request.constraints, memory)
    return Predictor.of(request.segments, request.peers, network, request.constraints, memory, table)


def brute_force(request: PlanRequest) -> tuple[float, Layout | None]:
    """The shortest simulated step over every choice and order of peers, every cut and every choice of recomputing.

    Each is simulated with as many microbatches in flight as fit, and with fewer. Layouts are simulated from the smallest lower
    bound upwards until no bound is below the best.
    """
    predictor = predictor_of(request)
    bounded = LowerBounds(predictor).of(every_layout(predictor))
    best: tuple[float, Layout | None] = (np.inf, None)
    for bound, layout in bounded:
        if bound >= best[0]:
            break
        for in_flight in _numbers_in_flight(predictor.most_in_flight(layout)):
            seconds = predictor.step_seconds(layout, in_flight)
            if seconds < best[0]:
                best = seconds, layout
    return best


def brute_force_with_replicas(request: PlanRequest) -> float:
    """The best of every grouping of the peers with every cut, as the planner judges it: a replica must be worth something.

    Replicas stand in the planner's order; a stage recomputes only where it does not fit otherwise."""
    predictor = predictor_of(request)
    judge = judge_of(predictor, None)
    best = np.inf
    for groups in every_grouping(tuple(range(len(predictor.peers))), predictor.segments.num_segments):
        for inner in combinations(range(1, predictor.segments.num_segments), len(groups) - 1):
            layout = settled_groups(predictor, groups, (0, *inner, predictor.segments.num_segments))
            if layout is not None and predictor.fits(layout):
                for in_flight in choices(predictor, layout):
                    best = min(best, judge(predictor.step_seconds(layout, in_flight), layout))
    return float(best)


def settled_groups(predictor: Predictor, groups: tuple[tuple[int, ...], ...], bounds: tuple[int, ...]) -> Layout | None:
    """The layout that recomputes only where memory demands it."""
    recompute = []
    for group, first, end in zip(groups, bounds[:-1], bounds[1:], strict=True):
        ways = (
            anew
            for anew in (False, True)
            if all(predictor.possible(peer, first, end, anew, alone=len(group) == 1) for peer in group)
        )
        recompute.append(next(ways, None))
    if None in recompute:
        return None
    return with_groups(groups, bounds, tuple(bool(anew) for anew in recompute))


def _numbers_in_flight(most: tuple[int, ...]) -> list[tuple[int, ...]]:
    count = len(most)
    deeper = [tuple(min(held, factor * (count - stage)) for stage, held in enumerate(most)) for factor in (1, 2, 3)]
    return list(dict.fromkeys([most, *deeper, *(tuple(min(held, cap) for held in most) for cap in (1, 2, 4))]))


def every_layout(predictor: Predictor) -> Iterator[Layout]:
    """Every layout that fits. A stage that can hold all microbatches anyway gains nothing by recomputing."""
    num_peers, num_segments = len(predictor.peers), predictor.segments.num_segments
    held, most = predictor.table.held, predictor.constraints.num_microbatches
    ways: dict[tuple[int, int, int], tuple[bool, ...]] = {}
    for peer in range(num_peers):
        for first, end in combinations(range(num_segments + 1), 2):
            plain, anew = held[0, peer, first, end], held[1, peer, first, end]
            options = ([False] if plain >= 1 else []) + ([True] if anew >= 1 and plain < most else [])
            ways[peer, first, end] = tuple(options)
    for count in range(1, min(num_peers, num_segments) + 1):
        for inner in combinations(range(1, num_segments), count - 1):
            bounds = (0, *inner, num_segments)
            for peers in permutations(range(num_peers), count):
                choices = [ways[peer, bounds[stage], bounds[stage + 1]] for stage, peer in enumerate(peers)]
                for recompute in product(*choices):
                    yield Layout(peers, bounds, recompute)
