"""Runs an op graph once on meta tensors, with autograd on: what a real run would do, without its numbers.

Used to learn which values carry gradients, what is saved for the backward pass and what each node costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from atoll.coordinator.tracing.effects import overload
from atoll.protocol.errors import TraceError
from atoll.protocol.graph import (
    Argument,
    BufferReference,
    InputReference,
    Node,
    Operation,
    OpGraph,
    OwnDevice,
    ParameterReference,
    Reference,
    Symbol,
    ValueReference,
    evaluate,
)

Results = tuple[Tensor | None, ...]

_META = torch.device("meta")


def rehearse(graph: OpGraph) -> Iterator[tuple[Node, Results]]:
    """Executes the nodes of ``graph`` in order on meta tensors of the example's sizes; yields each with its results."""
    bindings = dict(graph.example)
    state = initial_state(graph, bindings)

    def lookup(reference: Reference) -> Tensor | None:
        return state[reference]

    for node in graph.nodes:
        try:
            with torch.set_grad_enabled(node.gradient):
                results = _call(node, lookup, bindings)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            where = f" (in {node.module})" if node.module else ""
            raise TraceError(f"{node.operator}{where} cannot be rehearsed without data: {error}") from error
        state.update((ValueReference(node.index, number), result) for number, result in enumerate(results))
        yield node, results


def initial_state(graph: OpGraph, bindings: Mapping[str, int]) -> dict[Reference, Tensor | None]:
    """Parameters, buffers and inputs of ``graph`` as meta tensors."""
    state: dict[Reference, Tensor | None] = {}
    for parameter in graph.parameters:
        tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device=_META, requires_grad=parameter.trainable)
        state[ParameterReference(parameter.name)] = tensor
    for buffer in graph.buffers:
        state[BufferReference(buffer.name)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=_META)
    for name, spec in graph.inputs:
        state[InputReference(name)] = torch.empty(spec.sizes(bindings), dtype=spec.dtype, device=_META)
    return state


def differentiable_values(graph: OpGraph) -> frozenset[ValueReference]:
    """The values through which a gradient flows back to a trainable parameter.

    Looked at when everything has run: writing a differentiable value into a constant tensor makes it differentiable.
    """
    values = {
        ValueReference(node.index, number): result for node, results in rehearse(graph) for number, result in enumerate(results)
    }
    return frozenset(value for value, result in values.items() if result is not None and result.requires_grad)


def _call(node: Node, lookup: Callable[[Reference], Tensor | None], bindings: Mapping[str, int]) -> Results:
    positional = [_value(argument, lookup, bindings) for argument in node.arguments]
    keywords = {name: _value(argument, lookup, bindings) for name, argument in node.keywords}
    result = overload(node.operator)(*positional, **keywords)
    return tuple(result) if isinstance(result, list | tuple) else (result,)


def _value(argument: Argument, lookup: Callable[[Reference], Tensor | None], bindings: Mapping[str, int]) -> Any:
    if isinstance(argument, ValueReference | ParameterReference | BufferReference | InputReference):
        return lookup(argument)
    if isinstance(argument, tuple):
        return [_value(item, lookup, bindings) for item in argument]
    if isinstance(argument, Symbol | Operation):
        return evaluate(argument, bindings)
    return _META if isinstance(argument, OwnDevice) else argument
