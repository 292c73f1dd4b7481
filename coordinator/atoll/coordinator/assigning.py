"""From a plan to what each of its peers is told: its stage, its neighbours, the settings of the run. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from atoll.compression.registry import encode_message
from atoll.coordinator.first_values import FirstValues, held_specs
from atoll.coordinator.learning_rates import local_steps, step_optimizer
from atoll.coordinator.moves import Donations
from atoll.coordinator.planning.meetings import met_peers, met_stages
from atoll.coordinator.planning.network import Network
from atoll.coordinator.planning.plan import Plan
from atoll.coordinator.reach.ways import Way, Ways
from atoll.protocol.assignment import Assignment, Donor, Neighbour, assignment_to_bytes
from atoll.protocol.graph import StageGraph
from atoll.protocol.ids import Generation, MicrobatchIndex, PeerId, StepNumber
from atoll.protocol.job import Job
from atoll.protocol.messages import EncodedMessage, Kind, Message, MessageKey

TENSOR = "assignment"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSources:
    """Where the state of the last committed step comes from: ``somewhere`` are the names that somebody holds. Those that only a
    store has are in ``stored``, each with the tensors that it stands for."""

    committed: StepNumber
    somewhere: Collection[str]
    donations: Mapping[PeerId, Donations]
    stored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def make_assignment(
    job: Job,
    generation: Generation,
    plan: Plan,
    graphs: Sequence[StageGraph],
    peer: PeerId,
    ways: Ways,
    first_values: FirstValues,
    state: StateSources,
    download_shares: Mapping[PeerId, float],
    codecs: Mapping[PeerId, str],
    network: Network,
) -> Assignment:
    """What ``peer`` is told of the plan whose stages are ``graphs``. Of ``download_shares`` see :func:`share_downloads`;
    ``codecs`` are for what is sent to each neighbour, ``network`` is what the plan was made with."""
    number = plan.stage_of(peer)
    assert number is not None, f"{peer} is not in the plan"
    stage, graph = plan.stages[number], graphs[number]
    return Assignment(
        generation=generation,
        graph=graph,
        neighbours=_neighbours(plan, graphs, peer, ways, download_shares, codecs),
        run_seed=job.training.seed,
        in_flight=stage.of(peer).in_flight,
        recompute=stage.recompute,
        precision=job.training.precision,
        optimizer=step_optimizer(job),
        fetch=(
            *(name for name in first_values.to_send(graph) if name not in state.somewhere),
            *(tensor for spec in held_specs(graph) for tensor in state.stored.get(spec.name, ())),
        ),
        link_seconds=job.network.link_seconds,
        committed_step=state.committed,
        donors=tuple(_donor(ways.to(peer, donor), donor, names) for donor, names in state.donations[peer]),
        groups=tuple(plan.stages[met].group for met in sorted({number, *met_stages(graph)})),
        replica=stage.replicas.index(peer),
        averaging=job.averaging.settings(bandwidths_of(network, stage.replicas)),
        local=local_steps(job),
        predicted_memory_bytes=stage.of(peer).memory_bytes,
    )


def relayed_pairs(assignment: Assignment) -> frozenset[frozenset[PeerId]]:
    """With whom the peer of an assignment exchanges something through the coordinator."""
    others = {other.peer for other in assignment.neighbours if other.relayed}
    others |= {donor.peer for donor in assignment.donors if donor.relayed}
    return frozenset(frozenset((assignment.peer, other)) for other in others)


def encode_assignment(assignment: Assignment) -> EncodedMessage:
    """The ASSIGNMENT message."""
    data = torch.frombuffer(bytearray(assignment_to_bytes(assignment)), dtype=torch.uint8)
    key = MessageKey(
        generation=assignment.generation,
        step=assignment.committed_step,
        microbatch=MicrobatchIndex(0),
        kind=Kind.ASSIGNMENT,
        source=assignment.graph.stage,
        target=assignment.graph.stage,
    )
    return encode_message(Message(key=key, tensors=((TENSOR, data),)))


def bandwidths_of(network: Network, replicas: Sequence[PeerId]) -> tuple[float | None, ...]:
    """Of each replica's line, the slower direction; None where nobody knows."""
    known = [replica for replica in replicas if replica in network.names]
    lines = network.select(known)
    slower = dict(zip(known, np.minimum(lines.upload, lines.download).tolist(), strict=True))
    return tuple(slower[replica] if 0.0 < slower.get(replica, np.inf) < np.inf else None for replica in replicas)


def share_downloads(plan: Plan, graphs: Sequence[StageGraph], caps: Mapping[PeerId, float | None]) -> Mapping[PeerId, float]:
    """What each neighbour of a peer may send to it, in bytes a second, where its owner has capped what it receives: even
    shares, so that the cap holds when all of them send at once."""
    shares = {}
    for peer in plan.peers:
        cap, senders = caps.get(peer), len(met_peers(plan, graphs, peer))
        if cap is not None and senders:
            shares[peer] = cap / senders
    return shares


def _neighbours(
    plan: Plan,
    graphs: Sequence[StageGraph],
    peer: PeerId,
    ways: Ways,
    download_shares: Mapping[PeerId, float],
    codecs: Mapping[PeerId, str],
) -> tuple[Neighbour, ...]:
    """Of two neighbours the one that comes first in the plan dials, if it can."""
    order = {name: place for place, name in enumerate(plan.peers)}
    found = []
    for other in met_peers(plan, graphs, peer):
        stage = plan.stage_of(other)
        assert stage is not None
        way = ways.between(*sorted((peer, other), key=lambda name: order[name]))
        neighbour = Neighbour(
            stage=stage,
            peer=other,
            address=way.address if way.dialler == peer else "",
            dial=way.dialler == peer,
            relayed=way.relayed,
            max_bytes_per_second=download_shares.get(other),
            codec=codecs.get(other, "raw"),
        )
        found.append(neighbour)
    return tuple(found)


def _donor(way: Way, donor: PeerId, names: tuple[str, ...]) -> Donor:
    return Donor(peer=donor, address=way.address, names=names, relayed=way.relayed)
