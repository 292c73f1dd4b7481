"""Everything the placement asks of a traced model, in one object."""

from __future__ import annotations

from functools import cache

from atoll.coordinator.planning.placement import Segments, StageMemory
from atoll.coordinator.tracing.cuts import narrow_cuts
from atoll.coordinator.tracing.dataflow import Dataflow
from atoll.coordinator.tracing.memory import MemoryModel
from atoll.coordinator.tracing.rehearsal import Rehearsal
from atoll.protocol.ids import NodeIndex


def segments_of(rehearsal: Rehearsal, *, optimizer: str, momentum: float = 0.0) -> Segments:
    """The segments of a graph between its narrow cuts, with their costs and the memory of every range."""
    graph = rehearsal.graph
    flow = Dataflow(graph)
    cuts = narrow_cuts(graph, (cost.matrix_flops for cost in rehearsal.costs), flow)
    positions = (NodeIndex(0), *(cut.position for cut in cuts), NodeIndex(len(graph.nodes)))
    before = [0.0]
    for cost in rehearsal.costs:
        before.append(before[-1] + cost.flops)
    model = MemoryModel(rehearsal, flow, optimizer, momentum)

    @cache
    def memory(first: int, end: int, recompute: bool) -> StageMemory:
        return model.need(positions[first], positions[end], recompute=recompute)

    return Segments(
        positions=positions,
        flops=tuple(before[position] for position in positions),
        crossing_bytes=(0, *(cut.num_bytes for cut in cuts), 0),
        memory=memory,
    )
