"""Everything the planner asks of a traced model, in one object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

from atoll.coordinator.planning.segments import Segments, SharedBytes
from atoll.coordinator.tracing.cuts import crossing_values, narrow_cuts
from atoll.coordinator.tracing.dataflow import Dataflow
from atoll.coordinator.tracing.memory import MemoryModel
from atoll.coordinator.tracing.rehearsal import NodeCost, Rehearsal
from atoll.protocol.graph import BufferReference, Node, ParameterReference, ValueReference
from atoll.protocol.ids import NodeIndex

_MOST_PRODUCTS = 2.0
"""A matrix product has a gradient for each of its two factors, and each costs as much as the product."""


def segments_of(rehearsal: Rehearsal, *, copies: int) -> Segments:
    """The segments of a graph between its narrow cuts, with their costs and the memory of every range; there are ``copies`` of
    weights, with what is kept for them."""
    graph = rehearsal.graph
    flow = Dataflow(graph)
    cuts = narrow_cuts(graph, (cost.matrix_flops for cost in rehearsal.costs), flow)
    positions = (NodeIndex(0), *(cut.position for cut in cuts), NodeIndex(len(graph.nodes)))
    backward = (_backward_flops(node, cost, rehearsal) for node, cost in zip(graph.nodes, rehearsal.costs, strict=True))
    return Segments(
        positions=positions,
        forward_flops=_sums((cost.flops for cost in rehearsal.costs), positions),
        backward_flops=_sums(backward, positions),
        parameter_bytes=_sums(_parameter_bytes(rehearsal), positions),
        forward_bytes=(0.0, *(float(cut.num_bytes) for cut in cuts), 0.0),
        backward_bytes=_gradient_bytes(rehearsal, flow, positions),
        memory=MemoryModel(rehearsal, flow, copies).between(positions),
        shared=tuple(_shared(rehearsal, positions)),
        changing=tuple(_changing(rehearsal, positions)),
    )


def _sums(values: Iterable[float], positions: Sequence[NodeIndex]) -> tuple[float, ...]:
    """For each position the sum over all nodes before it."""
    before = [0.0, *accumulate(values)]
    return tuple(before[position] for position in positions)


def _backward_flops(node: Node, cost: NodeCost, rehearsal: Rehearsal) -> float:
    """The gradients of whatever factors of the node have one; nothing for a node that no gradient passes."""
    trainable = {spec.name for spec in rehearsal.graph.parameters if spec.trainable}
    wanted = sum(
        reference in rehearsal.differentiable if isinstance(reference, ValueReference) else reference.name in trainable
        for reference in node.references()
        if isinstance(reference, ValueReference | ParameterReference)
    )
    if not node.gradient or not wanted:
        return 0.0
    return cost.flops - cost.matrix_flops + min(_MOST_PRODUCTS, float(wanted)) * cost.matrix_flops


def _parameter_bytes(rehearsal: Rehearsal) -> Iterator[float]:
    """What the optimizer updates, at the node that uses it first."""
    waiting = {spec.name: float(spec.num_bytes) for spec in rehearsal.graph.parameters if spec.trainable}
    for node in rehearsal.graph.nodes:
        names = {item.name for item in node.references() if isinstance(item, ParameterReference)}
        yield sum(waiting.pop(name, 0.0) for name in sorted(names))


def _gradient_bytes(rehearsal: Rehearsal, flow: Dataflow, positions: Sequence[NodeIndex]) -> tuple[float, ...]:
    """What comes back over a cut at each position: the gradients of the crossing values that have one."""
    bindings = dict(rehearsal.graph.example)
    crossing = [
        (value.node, last, float(rehearsal.graph.spec(value).num_bytes(bindings)))
        for value, last in crossing_values(rehearsal.graph, flow)
        if value in rehearsal.differentiable
    ]
    inner = (sum(size for made, last, size in crossing if made < position <= last) for position in positions[1:-1])
    return (0.0, *inner, 0.0)


def _changing(rehearsal: Rehearsal, positions: Sequence[NodeIndex]) -> Iterator[int]:
    """The segments that use a buffer which the forward writes into."""
    mutated = {BufferReference(spec.name) for spec in rehearsal.graph.buffers if spec.mutated}
    for number, (first, end) in enumerate(pairwise(positions)):
        if any(item in mutated for node in rehearsal.graph.nodes[first:end] for item in node.references()):
            yield number


def _shared(rehearsal: Rehearsal, positions: Sequence[NodeIndex]) -> Iterator[SharedBytes]:
    """The trainable parameters that several segments use."""
    segments: dict[str, set[int]] = {}
    for number, (first, end) in enumerate(pairwise(positions)):
        for node in rehearsal.graph.nodes[first:end]:
            for item in node.references():
                if isinstance(item, ParameterReference):
                    segments.setdefault(item.name, set()).add(number)
    for spec in rehearsal.graph.parameters:
        used = segments.get(spec.name, set())
        if spec.trainable and len(used) > 1:
            yield SharedBytes(segments=tuple(sorted(used)), num_bytes=spec.num_bytes)
