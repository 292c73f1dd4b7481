"""How much memory a part of the graph needs on the peer that runs it.

A stage always holds its weights, their gradients, the optimizer's state and room to compute in; for each microbatch in flight
it holds what it received and sends, and what autograd saved.
"""

from __future__ import annotations

from atoll.coordinator.planning.placement import StageMemory
from atoll.coordinator.tracing.cuts import crossing_values
from atoll.coordinator.tracing.dataflow import Dataflow
from atoll.coordinator.tracing.rehearsal import Rehearsal
from atoll.protocol.graph import BufferReference, InputReference, Node, ParameterReference, ValueReference

_OPTIMIZER_COPIES = {"adamw": 2, "sgd": 0}
_WORKSPACE_COPIES = 3
"""Of the largest result of a node: the result, its gradient, and what the kernel uses meanwhile."""


class MemoryModel:
    """Memory needs of the ranges of one graph, for one optimizer."""

    def __init__(self, rehearsal: Rehearsal, flow: Dataflow, optimizer: str, momentum: float = 0.0) -> None:
        graph = rehearsal.graph
        self._nodes = graph.nodes
        self._costs = rehearsal.costs
        self._bindings = dict(graph.example)
        self._parameters = {spec.name: spec for spec in graph.parameters}
        self._buffers = {spec.name: _bytes(spec.shape) * spec.dtype.itemsize for spec in graph.buffers}
        self._inputs = {name: spec.num_bytes(self._bindings) for name, spec in graph.inputs}
        self._optimizer_copies = 1 if optimizer == "sgd" and momentum else _OPTIMIZER_COPIES[optimizer]
        self._uses: dict[str, int] = {}
        for node in graph.nodes:
            for reference in node.references():
                if isinstance(reference, ParameterReference):
                    self._uses[reference.name] = self._uses.get(reference.name, 0) + 1
        self._crossing = [
            (value.node, last, graph.spec(value).num_bytes(self._bindings)) for value, last in crossing_values(graph, flow)
        ]

    def need(self, first: int, end: int, *, recompute: bool) -> StageMemory:
        """The need of a stage with the nodes from ``first`` up to ``end``."""
        nodes = self._nodes[first:end]
        costs = self._costs[first:end]
        received = sum(size for made, last, size in self._crossing if made < first <= last)
        sent = sum(size for made, last, size in self._crossing if first <= made < end <= last)
        saved: dict[int, int] = {}
        for cost in costs:
            saved.update(cost.saved)
        largest = max((cost.output_bytes for cost in costs), default=0)
        state, inputs = self._state_bytes(nodes)
        activations = sum(saved.values())
        moving = 2 * (received + sent) + inputs
        workspace = _WORKSPACE_COPIES * largest + (activations if recompute else 0)
        return StageMemory(fixed_bytes=state + workspace, microbatch_bytes=moving if recompute else moving + activations)

    def _state_bytes(self, nodes: tuple[Node, ...]) -> tuple[int, int]:
        """(weights, gradients and optimizer state; batch inputs) of ``nodes``."""
        held = {reference for node in nodes for reference in node.references() if not isinstance(reference, ValueReference)}
        state = inputs = 0
        for reference in held:
            if isinstance(reference, ParameterReference):
                spec = self._parameters[reference.name]
                gradients = self._uses[reference.name] if spec.trainable else 0
                copies = 1 + gradients + (self._optimizer_copies if spec.trainable else 0)
                state += copies * spec.num_bytes
            elif isinstance(reference, BufferReference):
                state += 2 * self._buffers[reference.name]
            elif isinstance(reference, InputReference):
                inputs += self._inputs[reference.name]
        return state, inputs


def _bytes(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
