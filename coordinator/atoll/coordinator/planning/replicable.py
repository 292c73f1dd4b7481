"""Which stages may have replicas at all, and local steps. Pure."""

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


def refuse_local_steps(graphs: Sequence[StageGraph]) -> None:
    """Raises PlacementError, with what to do, for stages that would have to tell others of a change in the middle of a step."""
    for graph in graphs:
        if graph.shared:
            what = f"averaging.local_steps cannot be had where stages share a parameter, as {graph.shared[0].name} here"
            raise PlacementError(f"{what}: set plan.stages to 1, or untie the model's weights", hopeless=True)
        changed = next((buffer.name for buffer in graph.buffers if buffer.mutated), None)
        if changed is not None:
            what = f"averaging.local_steps cannot be had where microbatches change a buffer, as {changed} here"
            raise PlacementError(f"{what}: set averaging.local_steps to 1", hopeless=True)
