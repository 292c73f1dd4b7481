"""What a segment's time depends on, as plain tuples: its operators and shapes, without names and without its place in the
graph."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from atoll.protocol.graph import (
    Argument,
    BufferReference,
    InputReference,
    Node,
    Operation,
    OwnDevice,
    ParameterReference,
    Reference,
    StageGraph,
    Symbol,
    TensorSpec,
    ValueReference,
    evaluate,
)

_HALVES = 2
"""Numbers that are multiples of a half count exactly: exponents and switches are such, and kernels have cases for them. Of
others (a probability, a scale by depth) only the presence counts, or each layer could be a kind of its own."""


def describe_segment(graph: StageGraph, bindings: Mapping[str, int]) -> tuple[Any, ...]:
    """Equal for two segments of one structure, whatever their names and indices."""
    return _Describing(graph, bindings).description()


class _Describing:
    """Numbers parameters, buffers and inputs in the order in which nodes use them, and values in that of the nodes."""

    def __init__(self, graph: StageGraph, bindings: Mapping[str, int]) -> None:
        self._graph = graph
        self._bindings = bindings
        self._labels: dict[Reference, tuple[Any, ...]] = {}
        self._used: Counter[str] = Counter()
        for number, boundary in enumerate(graph.receives):
            self._labels[boundary.value] = ("received", number, self._spec(boundary.spec), boundary.differentiable)
        for number, node in enumerate(graph.nodes):
            for output in range(len(node.outputs)):
                self._labels[ValueReference(node.index, output)] = ("value", number, output)
        self._specs: dict[Reference, tuple[Any, ...]] = {
            ParameterReference(spec.name): ("parameter", spec.shape, str(spec.dtype), spec.trainable)
            for spec in graph.parameters
        }
        self._specs |= {
            BufferReference(spec.name): ("buffer", spec.shape, str(spec.dtype), spec.mutated) for spec in graph.buffers
        }
        self._specs |= {InputReference(name): ("input", self._spec(spec)) for name, spec in graph.inputs}

    def description(self) -> tuple[Any, ...]:
        nodes = tuple(self._node(node) for node in self._graph.nodes)
        sends = tuple((self._label(item.value), item.differentiable) for item in self._graph.sends)
        loss = None if self._graph.loss is None else self._label(self._graph.loss)
        metrics = tuple(self._label(value) for _, value in self._graph.metrics)
        unused = sorted(map(repr, (spec for reference, spec in self._specs.items() if reference not in self._labels)))
        return nodes, sends, loss, metrics, tuple(unused)

    def _node(self, node: Node) -> tuple[Any, ...]:
        return (
            node.operator,
            tuple(map(self._argument, node.arguments)),
            tuple((name, self._argument(value)) for name, value in node.keywords),
            tuple(None if spec is None else self._spec(spec) for spec in node.outputs),
            node.gradient and node.index not in self._graph.recomputed,
            node.full_precision,
        )

    def _argument(self, argument: Argument) -> Any:
        match argument:
            case ValueReference() | ParameterReference() | BufferReference() | InputReference():
                return self._label(argument)
            case tuple():
                return tuple(map(self._argument, argument))
            case Symbol() | Operation():
                return evaluate(argument, self._bindings)
            case float():
                return _number(argument)
            case OwnDevice() | complex() | torch.dtype() | torch.layout() | torch.memory_format():
                return str(argument)
        return argument

    def _label(self, reference: Reference) -> tuple[Any, ...]:
        if reference not in self._labels:
            spec = self._specs[reference]
            self._labels[reference] = (*spec, self._used[spec[0]])
            self._used[spec[0]] += 1
        return self._labels[reference]

    def _spec(self, spec: TensorSpec) -> tuple[Any, ...]:
        return spec.sizes(self._bindings), str(spec.dtype)


def _number(value: float) -> float | str:
    exact = not math.isfinite(value) or (value * _HALVES).is_integer()
    return repr(value) if exact else "a number"
