"""Which stages may have replicas at all. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.coordinator.planning.plan import Plan
from atoll.protocol.errors import PlacementError
from atoll.protocol.graph import StageGraph


def obstacle(graph: StageGraph) -> str:
    """Why a stage must be on one peer alone; empty where it may be on several.

    Buffers that a forward changes, as batch norm's running statistics, pass from one microbatch to the next: replicas that have
    some of them each would come to other values, and to different ones.
    """
    changed = next((buffer.name for buffer in graph.buffers if buffer.mutated), None)
    return f"each microbatch changes {changed}, which the next one starts from" if changed is not None else ""


def refuse_replicas(plan: Plan, graphs: Sequence[StageGraph]) -> None:
    """Raises PlacementError, with what to do, for a plan that gives replicas to a stage that cannot have any."""
    for stage, graph in zip(plan.stages, graphs, strict=True):
        reason = obstacle(graph)
        if reason and len(stage.replicas) > 1:
            raise PlacementError(f"stage {stage.stage} cannot have replicas, for {reason}: leave it to one peer", hopeless=True)
