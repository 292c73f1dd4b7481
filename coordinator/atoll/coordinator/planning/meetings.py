"""Which peers exchange tensors under a plan. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.coordinator.planning.plan import Plan
from atoll.protocol.graph import StageGraph
from atoll.protocol.ids import PeerId, StageIndex


def crossing_stages(graph: StageGraph) -> frozenset[StageIndex]:
    """The stages that values or their gradients go to or come from."""
    return frozenset({boundary.source for boundary in graph.receives} | {boundary.target for boundary in graph.sends})


def sharing_stages(graph: StageGraph) -> frozenset[StageIndex]:
    """The other stages that hold a copy of a parameter of this one."""
    met = {other for shared in graph.shared if graph.stage in shared.stages for other in shared.stages}
    return frozenset(met - {graph.stage})


def met_stages(graph: StageGraph) -> frozenset[StageIndex]:
    """All stages that this one exchanges tensors with."""
    return crossing_stages(graph) | sharing_stages(graph)


def met_peers(plan: Plan, graphs: Sequence[StageGraph], peer: PeerId) -> tuple[PeerId, ...]:
    """Whom ``peer`` exchanges tensors with, in the plan's order: those with which it has a microbatch in common, the other
    replicas of its stage, and, for gradients of shared parameters, the first replicas of other stages (if it is one itself,
    all of them)."""
    stage = plan.stage_of(peer)
    assert stage is not None, f"{peer} is not in the plan"
    own, graph = plan.stages[stage], graphs[stage]
    met = set(own.replicas) - {peer}
    for other in crossing_stages(graph):
        met |= {theirs for ours, theirs in own.group.meets(plan.stages[other].group) if ours == peer}
    for other in sharing_stages(graph):
        group = plan.stages[other]
        met |= {group.leader} if peer != own.leader else set(group.replicas)
    return tuple(one for one in plan.peers if one in met)
