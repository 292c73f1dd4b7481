"""What changes hands when a plan changes: for each peer of the new plan, which names it lacks and who gives them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from atoll.coordinator.first_values import held_specs
from atoll.protocol.graph import StageGraph
from atoll.protocol.ids import PeerId

Donations = Mapping[PeerId, tuple[str, ...]]


def donations(
    graphs: Iterable[StageGraph], peers: Sequence[PeerId], holders: Mapping[str, tuple[PeerId, ...]]
) -> dict[PeerId, Donations]:
    """For each of ``peers``, in the order of their stages: by donor, the names to fetch from it. ``holders`` says who holds the
    state of a name; where several do, the one that gives the fewest bytes so far does."""
    given: dict[PeerId, int] = {}
    found: dict[PeerId, Donations] = {}
    for graph, peer in zip(graphs, peers, strict=True):
        parts: dict[PeerId, list[str]] = {}
        for spec in held_specs(graph):
            owners = holders.get(spec.name, ())
            if peer in owners or not owners:
                continue
            donor = min(owners, key=lambda owner: (given.get(owner, 0), owner))
            given[donor] = given.get(donor, 0) + prod(spec.shape) * spec.dtype.itemsize
            parts.setdefault(donor, []).append(spec.name)
        found[peer] = {donor: tuple(names) for donor, names in parts.items()}
    return found
