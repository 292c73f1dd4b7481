"""Runs an op graph once on fake tensors, with autograd on: what a real run on a CPU would do, without its numbers.

Used to learn which values carry gradients, what is saved for the backward pass, what is alive meanwhile, and what each node
costs. Fake tensors choose kernels, memory layouts and, under bf16, dtypes as real ones do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge

from atoll.coordinator.tracing.allocation import AllocationWatch, Phase
from atoll.coordinator.tracing.costs import FlopCounter
from atoll.coordinator.tracing.effects import overload
from atoll.coordinator.tracing.export import first_line
from atoll.protocol import calling
from atoll.protocol.errors import TraceError
from atoll.protocol.graph import (
    BufferReference,
    InputReference,
    Node,
    OpGraph,
    ParameterReference,
    Reference,
    ValueReference,
)

Results = tuple[Tensor | None, ...]

_META = torch.device("meta")
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCost:
    """What one node costs for the example's sizes.

    ``matrix_flops`` are those of ``flops`` that are matrix products and convolutions. ``saved`` are the pieces of memory that
    the node keeps for the backward pass, by a number for each piece, with their bytes; parameters are not among them.
    ``passing_bytes`` is the most that is alive at once while the node runs and not saved afterwards, ``gradient_bytes`` the
    most that the gradients of values take while the node goes backward, those of parameters left out.
    """

    flops: float
    matrix_flops: float
    output_bytes: int
    saved: Mapping[int, int]
    passing_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What is known of a graph after a run without data. ``memory_of`` has the number of the memory of each value."""

    graph: OpGraph
    costs: tuple[NodeCost, ...]
    differentiable: frozenset[ValueReference]
    memory_of: Mapping[ValueReference, int]


def rehearse(graph: OpGraph, precision: str = "fp32") -> Rehearsal:
    """Runs ``graph`` in training mode at the example's sizes; raises TraceError where a node cannot run."""
    differentiable = differentiable_values(graph)
    with FakeTensorMode():
        costs, memory_of = _Rehearsing(graph, precision).run()
    return Rehearsal(graph=graph, costs=costs, differentiable=differentiable, memory_of=memory_of)


def differentiable_values(graph: OpGraph) -> frozenset[ValueReference]:
    """The values through which a gradient flows back to a trainable parameter."""
    run = _Run(graph, _META)
    for node in graph.nodes:
        run.execute(node)
    return run.differentiable()


@dataclass(slots=True)
class _Run:
    """One execution without data. ``precision`` bf16 stands for autocast, as on peers."""

    graph: OpGraph
    device: torch.device
    precision: str = "fp32"
    bindings: dict[str, int] = field(init=False)
    values: dict[Reference, Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        self.bindings = dict(self.graph.example)
        self.values = dict(self._initial())

    def _initial(self) -> Iterator[tuple[Reference, Tensor]]:
        for spec in self.graph.parameters:
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self.device, requires_grad=spec.trainable)
            yield ParameterReference(spec.name), tensor
        for buffer in self.graph.buffers:
            yield BufferReference(buffer.name), torch.empty(buffer.shape, dtype=buffer.dtype, device=self.device)
        for name, given in self.graph.inputs:
            yield InputReference(name), torch.empty(given.sizes(self.bindings), dtype=given.dtype, device=self.device)

    def execute(self, node: Node) -> Results:
        try:
            with nullcontext() if node.gradient else torch.no_grad(), self._autocast(node):
                results: Results = calling.call(
                    overload(node.operator), node.arguments, node, self.values.__getitem__, self.bindings, self.device
                )
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            where = f" (in {node.module})" if node.module else ""
            raise TraceError(f"{node.operator}{where} cannot be run without data: {first_line(error)}") from error
        self.values.update((ValueReference(node.index, number), result) for number, result in enumerate(results))
        return results

    def _autocast(self, node: Node) -> AbstractContextManager[object]:
        if self.precision == "bf16" and not node.full_precision:
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def differentiable(self) -> frozenset[ValueReference]:
        """Asked when everything has run: writing a differentiable value into a constant tensor makes it differentiable."""
        return frozenset(
            reference
            for reference, value in self.values.items()
            if isinstance(reference, ValueReference) and value is not None and value.requires_grad
        )


class _Rehearsing:
    """Forward node by node, then backward in one, under the eyes of an allocation watch."""

    def __init__(self, graph: OpGraph, precision: str) -> None:
        self._graph = graph
        self._run = _Run(graph, _CPU, precision)
        self._watch = AllocationWatch(self._changed)
        self._flops = FlopCounter()
        self._state = {self._watch.exempt(value) for value in self._run.values.values() if value is not None}
        self._last = self._last_uses()
        self._peak = 0
        self._gradients: dict[int, int] = defaultdict(int)
        self._makers: dict[torch.autograd.graph.Node, int] = {}
        self._starts: list[GradientEdge] = []

    def run(self) -> tuple[tuple[NodeCost, ...], dict[ValueReference, int]]:
        memory_of: dict[ValueReference, int] = {}
        forward: list[NodeCost] = []
        every: dict[int, int] = {}
        for node in self._graph.nodes:
            cost, numbers = self._forward(node, every)
            forward.append(cost)
            memory_of.update((ValueReference(node.index, place), number) for place, number in numbers.items())
        self._backward()
        costs = (replace(cost, gradient_bytes=self._gradients[node]) for node, cost in enumerate(forward))
        return tuple(costs), memory_of

    def _forward(self, node: Node, every: dict[int, int]) -> tuple[NodeCost, dict[int, int]]:
        """One node; ``every`` is what all nodes so far have saved."""
        saved: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            number = self._watch.number(tensor)
            if number not in self._state:
                saved[number] = tensor.untyped_storage().nbytes()
            return tensor

        self._peak = self._watch.alive[Phase.FORWARD]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), self._watch, self._flops:
            results = self._run.execute(node)
        every.update(saved)
        flops, matrix_flops = self._flops.take()
        present = {place: result for place, result in enumerate(results) if result is not None}
        self._remember(node, list(present.values()))
        numbers = {place: self._watch.number(result) for place, result in present.items()}
        cost = NodeCost(
            flops=flops,
            matrix_flops=matrix_flops,
            output_bytes=sum(result.numel() * result.itemsize for result in present.values()),
            saved=saved,
            passing_bytes=max(0, self._peak - sum(every.values())),
            gradient_bytes=0,
        )
        for reference in self._last.get(node.index, ()):
            self._run.values[reference] = None
        return cost, numbers

    def _remember(self, node: Node, results: list[Tensor]) -> None:
        """Which autograd nodes the node has made, and whether the gradients of values end there."""
        pending: list[torch.autograd.graph.Node | None] = [result.grad_fn for result in results]
        while pending:
            found = pending.pop()
            if found is not None and found not in self._makers:
                self._makers[found] = node.index
                pending += [below for below, _ in found.next_functions]
        taken = (self._run.values[reference] for reference in node.references() if isinstance(reference, ValueReference))
        if not any(value is not None and value.requires_grad for value in taken):
            self._starts += [get_gradient_edge(result) for result in results if result.requires_grad]

    def _backward(self) -> None:
        loss = self._run.values[self._graph.loss]
        if loss is None or not loss.requires_grad or not self._starts:
            return
        self._watch.phase = Phase.BACKWARD
        with self._watch:
            torch.autograd.grad(loss, self._starts, torch.ones_like(loss), allow_unused=True)

    def _changed(self) -> None:
        self._peak = max(self._peak, self._watch.alive[Phase.FORWARD])
        if self._watch.phase is Phase.BACKWARD:
            maker = self._makers.get(torch._C._current_autograd_node())
            if maker is not None:
                self._gradients[maker] = max(self._gradients[maker], self._watch.alive[Phase.BACKWARD])

    def _last_uses(self) -> dict[int, list[ValueReference]]:
        """For each node the values that no later one needs."""
        last: dict[ValueReference, int] = {}
        for node in self._graph.nodes:
            last.update((ValueReference(node.index, place), node.index) for place in range(len(node.outputs)))
            last.update((reference, node.index) for reference in node.references() if isinstance(reference, ValueReference))
        ended: dict[int, list[ValueReference]] = defaultdict(list)
        for reference, node_index in last.items():
            if reference != self._graph.loss:
                ended[node_index].append(reference)
        return ended
