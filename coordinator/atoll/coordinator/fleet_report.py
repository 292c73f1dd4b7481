"""All that a coordinator knows of its peers and of the links between them, as ``Operator.Fleet`` tells it, and back. Pure."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence

import numpy as np

from atoll.coordinator.planning.network import Network, Relayed
from atoll.coordinator.planning.segments import PeerOffer
from atoll.coordinator.sessions.membership import Member
from atoll.protocol.ids import PeerId
from atoll.protocol.v1 import operator_pb2, session_pb2


def fleet_reply(
    members: Iterable[Member],
    measured: Mapping[PeerId, Sequence[session_pb2.Measured]],
    network: Network,
    round_trips: Mapping[PeerId, float],
    trusted: Container[PeerId] = frozenset(),
) -> operator_pb2.FleetReply:
    """The answer for ``members``; ``network`` knows them all, ``round_trips`` says how far they are from the coordinator, and
    ``trusted`` whom the operator invited as such."""
    present = tuple(members)
    own = network.select([member.name for member in present])
    links = [
        operator_pb2.FleetLink(
            source=source,
            target=target,
            bytes_per_second=float(own.rate[one, other]),
            latency_seconds=float(own.latency[one, other]),
            estimated=bool(own.estimated[one, other]),
            relayed=frozenset((source, target)) in own.relayed.pairs,
        )
        for one, source in enumerate(own.names)
        for other, target in enumerate(own.names)
        if one != other
    ]
    peers = [
        _peer(member, measured.get(member.name, ()), round_trips.get(member.name, 0.0), trusted=member.name in trusted)
        for member in present
    ]
    relay = own.relayed.bytes_per_second
    return operator_pb2.FleetReply(peers=peers, links=links, relay_bytes_per_second=relay if math.isfinite(relay) else 0.0)


def _peer(
    member: Member, measured: Sequence[session_pb2.Measured], round_trip: float, *, trusted: bool
) -> operator_pb2.FleetPeer:
    said = member.introduction
    return operator_pb2.FleetPeer(
        name=said.name,
        device=said.device,
        flops_per_second=said.flops_per_second,
        memory_bytes=said.memory_bytes,
        machine=said.machine,
        cores=said.cores,
        threads=said.threads,
        max_upload_bytes_per_second=said.max_upload_bytes_per_second or 0.0,
        max_download_bytes_per_second=said.max_download_bytes_per_second or 0.0,
        measured=measured,
        coordinator_round_trip_seconds=round_trip,
        trusted=trusted,
    )


def offers_in(reply: operator_pb2.FleetReply) -> tuple[PeerOffer, ...]:
    """The peers as the planner takes them, without what was measured: that is by kinds of segments, and which segments are of
    which kind depends on the job."""
    return tuple(
        PeerOffer(
            name=PeerId(peer.name),
            flops_per_second=peer.flops_per_second,
            memory_bytes=peer.memory_bytes,
            machine=peer.machine,
            cores=peer.cores,
            threads=peer.threads,
            coordinator_round_trip_seconds=peer.coordinator_round_trip_seconds,
            vouched=peer.trusted,
        )
        for peer in reply.peers
    )


def measured_in(reply: operator_pb2.FleetReply) -> dict[PeerId, dict[str, session_pb2.Measured]]:
    """For each peer what was measured, by the kind's fingerprint."""
    return {PeerId(peer.name): {entry.kind: entry for entry in peer.measured} for peer in reply.peers}


def network_in(reply: operator_pb2.FleetReply) -> Network:
    """The links as the coordinator counts on them."""
    names = tuple(PeerId(peer.name) for peer in reply.peers)
    places = {name: index for index, name in enumerate(names)}
    shape = (len(names), len(names))
    rate, latency, estimated = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape, dtype=np.bool_)
    for link in reply.links:
        pair = places[PeerId(link.source)], places[PeerId(link.target)]
        rate[pair], latency[pair], estimated[pair] = link.bytes_per_second, link.latency_seconds, link.estimated
    return Network(
        names=names,
        rate=rate,
        latency=latency,
        upload=np.array([peer.max_upload_bytes_per_second or np.inf for peer in reply.peers]),
        download=np.array([peer.max_download_bytes_per_second or np.inf for peer in reply.peers]),
        estimated=estimated,
        relayed=Relayed(
            pairs=frozenset(frozenset((PeerId(link.source), PeerId(link.target))) for link in reply.links if link.relayed),
            bytes_per_second=reply.relay_bytes_per_second or math.inf,
        ),
    )
