"""Plans that keep certain pairs of peers from being neighbours, because the link between them is broken. Pure.

The planner sees such a link as so slow that it is the last thing to choose; a plan that needs it all the same is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence, Set
from itertools import combinations, pairwise, product

from atoll.coordinator.planning.meetings import met_stages
from atoll.coordinator.planning.network import Network
from atoll.coordinator.planning.plan import Plan
from atoll.protocol.errors import PlacementError
from atoll.protocol.graph import StageGraph
from atoll.protocol.ids import PeerId

AVOIDED_BYTES_PER_SECOND = 1e-3
"""Far below any link that is up, so that not even a little state is moved over it to save time in all steps that are left; and
no zero, by which costs could not be compared."""


def avoiding(network: Network, pairs: Iterable[frozenset[PeerId]]) -> Network:
    """``network`` with the links of these pairs as bad as can be; pairs of strangers are nothing."""
    places = {name: index for index, name in enumerate(network.names)}
    rate = network.rate.copy()
    for pair in pairs:
        ends = [places[name] for name in pair if name in places]
        if len(ends) == 2:
            rate[ends[0], ends[1]] = rate[ends[1], ends[0]] = AVOIDED_BYTES_PER_SECOND
    return dataclasses.replace(network, rate=rate)


def refuse_needed(needed: Set[frozenset[PeerId]]) -> None:
    """Raises PlacementError, with what to do, when a plan needs the links of these pairs, which are broken."""
    if needed:
        links, are = ("links", "are") if len(needed) > 1 else ("link", "is")
        raise PlacementError(
            f"no plan does without the {links} {describe(needed)}, which {are} broken: "
            "mend the network between these peers, or let another peer join"
        )


def describe(pairs: Iterable[frozenset[PeerId]]) -> str:
    """``a - b and c - d``, for sentences."""
    return " and ".join(sorted(" - ".join(sorted(pair)) for pair in pairs))


def neighbours(plan: Plan, graphs: Sequence[StageGraph]) -> frozenset[frozenset[PeerId]]:
    """The pairs of peers that exchange tensors under ``plan``, whose stages are ``graphs``."""
    met = {(one.stage, other.stage) for one, other in pairwise(plan.stages)}
    met |= {(graph.stage, stage) for graph in graphs for stage in met_stages(graph)}
    pairs = {pair for one, other in met for pair in product(plan.stages[one].replicas, plan.stages[other].replicas)}
    pairs |= {pair for stage in plan.stages for pair in combinations(stage.replicas, 2)}
    return frozenset(map(frozenset, pairs))
