"""What changes hands when a plan changes: for each peer of the new plan, which names it lacks and who gives them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from math import prod

from atoll.coordinator.first_values import held_specs
from atoll.coordinator.planning.network import Network
from atoll.coordinator.run.snapshots import THE_STORE
from atoll.protocol.graph import BufferSpec, ParameterSpec, StageGraph
from atoll.protocol.ids import PeerId

Donations = tuple[tuple[PeerId, tuple[str, ...]], ...]
"""Donors and the names to fetch from each; where a name has several, the earlier one is asked first."""
Holders = Mapping[str, tuple[PeerId, ...]]


def donations(
    graphs: Iterable[StageGraph],
    peers: Sequence[PeerId],
    holders: Holders,
    on_disks: Holders,
    broken: Set[frozenset[PeerId]] = frozenset(),
) -> dict[PeerId, Donations]:
    """For each of ``peers``, in the order of their stages, whom to fetch from. ``holders`` says who has the state of a name in
    memory, ``on_disks`` who has it in a snapshot of the same step. A peer reads its own disk first; of others, those come first
    whose link is not ``broken``, of these such as have it in memory, and of several the one that gives the fewest bytes so far.
    All others are named after these, should the first be lost."""
    given: dict[PeerId, int] = {}
    found: dict[PeerId, Donations] = {}
    for graph, peer in zip(graphs, peers, strict=True):
        firsts: dict[PeerId, list[str]] = {}
        others: dict[PeerId, list[str]] = {}
        for spec in held_specs(graph):
            in_memory, on_disk = holders.get(spec.name, ()), on_disks.get(spec.name, ())
            if peer in in_memory or not (in_memory or on_disk):
                continue
            first = peer if peer in on_disk else _first(peer, in_memory, on_disk, given, broken)
            if first != peer:
                given[first] = given.get(first, 0) + _num_bytes(spec)
            firsts.setdefault(first, []).append(spec.name)
            for other in dict.fromkeys((*in_memory, *on_disk)):
                if other != first:
                    others.setdefault(other, []).append(spec.name)
        found[peer] = tuple((donor, tuple(names)) for part in (firsts, others) for donor, names in part.items())
    return found


def fetch_seconds(graph: StageGraph, peer: PeerId, holders: Holders, network: Network, state_copies: int) -> float:
    """How long ``peer`` takes to fetch what it lacks of a stage, an estimate: all of it at the best rate from any one of those
    that hold some of it, ``state_copies`` bytes of state for each byte of a parameter."""
    lacking, donors = 0, set[PeerId]()
    for spec in held_specs(graph):
        owners = holders.get(spec.name, ())
        if owners and peer not in owners:
            lacking += _num_bytes(spec) * (state_copies if isinstance(spec, ParameterSpec) else 1)
            donors.update(owners)
    places = {name: index for index, name in enumerate(network.names)}
    rates = [float(network.rate[places[donor], places[peer]]) for donor in donors if donor in places]
    return lacking / max(rates) if rates and max(rates) > 0.0 else 0.0


def without_store(on_disks: Holders) -> dict[str, tuple[PeerId, ...]]:
    """The peers alone that have names on their disks."""
    peers = {name: tuple(holder for holder in holders if holder != THE_STORE) for name, holders in on_disks.items()}
    return {name: holders for name, holders in peers.items() if holders}


def blocked(
    graphs: Iterable[StageGraph],
    peers: Sequence[PeerId],
    holders: Holders,
    on_disks: Holders,
    broken: Set[frozenset[PeerId]],
) -> frozenset[frozenset[PeerId]]:
    """The pairs of which one would have to fetch state from the other over a ``broken`` link, for nobody else has it, in memory
    or in a snapshot of the same step. What the job's store has comes from the coordinator, over no link between peers."""
    pairs: set[frozenset[PeerId]] = set()
    for graph, peer in zip(graphs, peers, strict=True):
        for spec in held_specs(graph):
            owners = {*holders.get(spec.name, ()), *on_disks.get(spec.name, ())}
            ways = {frozenset((owner, peer)) for owner in owners}
            if peer not in owners and THE_STORE not in owners and ways <= broken:
                pairs |= ways
    return frozenset(pairs)


def _first(
    peer: PeerId,
    in_memory: Sequence[PeerId],
    on_disk: Sequence[PeerId],
    given: Mapping[PeerId, int],
    broken: Set[frozenset[PeerId]],
) -> PeerId:
    """Whom to ask first: a disk that is reached is better than a memory that is not."""

    def reached(owners: Sequence[PeerId]) -> list[PeerId]:
        return [owner for owner in owners if frozenset((owner, peer)) not in broken]

    return _least_busy(peer, reached(in_memory) or reached(on_disk) or in_memory or on_disk, given, broken)


def _least_busy(peer: PeerId, owners: Sequence[PeerId], given: Mapping[PeerId, int], broken: Set[frozenset[PeerId]]) -> PeerId:
    return min(owners, key=lambda owner: (frozenset((owner, peer)) in broken, given.get(owner, 0), owner))


def _num_bytes(spec: ParameterSpec | BufferSpec) -> int:
    return prod(spec.shape) * spec.dtype.itemsize
