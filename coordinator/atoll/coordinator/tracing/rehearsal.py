"""Runs an op graph once on meta tensors, with autograd on: what a real run would do, without its numbers.

Used to learn which values carry gradients, what is saved for the backward pass and what each node costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.coordinator.tracing.costs import FlopCounter
from atoll.coordinator.tracing.effects import overload
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
_ATTENTION = "aten.scaled_dot_product_attention.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCost:
    """What one node costs for the example's sizes.

    ``matrix_flops`` are those of ``flops`` that are matrix products and convolutions. ``saved`` are the pieces of memory that
    the node keeps for the backward pass, by a number for each piece, with their bytes; parameters are not among them.
    """

    flops: float
    matrix_flops: float
    output_bytes: int
    saved: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What is known of a graph after a run without data."""

    graph: OpGraph
    costs: tuple[NodeCost, ...]
    differentiable: frozenset[ValueReference]


def rehearse(graph: OpGraph) -> Rehearsal:
    """Runs ``graph`` in training mode at the example's sizes; raises TraceError where a node cannot run."""
    run = _Run(graph)
    counter = FlopCounter()
    costs = []
    for node in graph.nodes:
        saved: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(run.saving_to(saved), lambda tensor: tensor), counter:
            results = run.execute(node)
        flops, matrix_flops = counter.take()
        output_bytes = sum(result.numel() * result.itemsize for result in results if result is not None)
        if node.operator == _ATTENTION:
            saved = run.saved_by_attention(node, results, saved)
        costs.append(NodeCost(flops=flops, matrix_flops=matrix_flops, output_bytes=output_bytes, saved=saved))
    return Rehearsal(graph=graph, costs=tuple(costs), differentiable=run.differentiable())


def differentiable_values(graph: OpGraph) -> frozenset[ValueReference]:
    """The values through which a gradient flows back to a trainable parameter."""
    run = _Run(graph)
    for node in graph.nodes:
        run.execute(node)
    return run.differentiable()


@dataclass(slots=True)
class _Run:
    """One execution on meta tensors; every value is kept, so that memory is recognised by its address."""

    graph: OpGraph
    bindings: dict[str, int] = field(init=False)
    values: dict[Reference, Tensor | None] = field(init=False)
    state: set[int] = field(init=False)
    numbers: dict[int, int] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bindings = dict(self.graph.example)
        self.values = dict(self._initial())
        self.state = {_memory(value) for value in self.values.values() if value is not None}

    def _initial(self) -> Iterator[tuple[Reference, Tensor]]:
        for spec in self.graph.parameters:
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=_META, requires_grad=spec.trainable)
            yield ParameterReference(spec.name), tensor
        for buffer in self.graph.buffers:
            yield BufferReference(buffer.name), torch.empty(buffer.shape, dtype=buffer.dtype, device=_META)
        for name, given in self.graph.inputs:
            yield InputReference(name), torch.empty(given.sizes(self.bindings), dtype=given.dtype, device=_META)

    def execute(self, node: Node) -> Results:
        try:
            with nullcontext() if node.gradient else torch.no_grad():
                results: Results = calling.call(
                    overload(node.operator), node.arguments, node, self.values.__getitem__, self.bindings, _META
                )
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            where = f" (in {node.module})" if node.module else ""
            raise TraceError(f"{node.operator}{where} cannot be run without data: {str(error).splitlines()[0]}") from error
        self.values.update((ValueReference(node.index, number), result) for number, result in enumerate(results))
        return results

    def differentiable(self) -> frozenset[ValueReference]:
        """Asked when everything has run: writing a differentiable value into a constant tensor makes it differentiable."""
        return frozenset(
            reference
            for reference, value in self.values.items()
            if isinstance(reference, ValueReference) and value is not None and value.requires_grad
        )

    def saving_to(self, saved: dict[int, int]) -> _Saving:
        return _Saving(self, saved)

    def note(self, tensor: Tensor, saved: dict[int, int]) -> None:
        """Counts the memory of ``tensor``, unless it is a parameter's, a buffer's or an input's."""
        memory = _memory(tensor)
        if memory not in self.state:
            self.alive.append(tensor.detach())
            saved[self.numbers.setdefault(memory, len(self.numbers))] = tensor.untyped_storage().nbytes()

    def saved_by_attention(self, node: Node, results: Results, found: dict[int, int]) -> dict[int, int]:
        """Without dropout, attention runs as one kernel that keeps its operands, its result and a number a row.

        On meta tensors it runs step by step, which would count the matrix of attention weights.
        """
        probability = node.arguments[4] if len(node.arguments) > 4 else 0.0
        if probability or not found:
            return found
        saved: dict[int, int] = {}
        for reference in list(node.references())[:3]:
            operand = self.values[reference]
            assert operand is not None
            self.note(operand, saved)
        result = results[0]
        assert result is not None
        self.note(result, saved)
        statistics = torch.empty(result.shape[:-1], dtype=torch.float32, device=_META)
        self.note(statistics, saved)
        return saved


@dataclass(slots=True)
class _Saving:
    """The hook that autograd calls with each tensor that it keeps."""

    run: _Run
    saved: dict[int, int]

    def __call__(self, tensor: Tensor) -> Tensor:
        self.run.note(tensor, self.saved)
        return tensor


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
