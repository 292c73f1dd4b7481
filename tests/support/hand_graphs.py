"""Op graphs written by hand: for tests of what executes and validates them, one operator at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from atoll.protocol import calling, operators
from atoll.protocol.graph import (
    Argument,
    BufferReference,
    BufferSpec,
    Dimension,
    ExpressionOperator,
    Initialisation,
    InputReference,
    Node,
    Operation,
    OpGraph,
    OwnDevice,
    ParameterReference,
    ParameterSpec,
    Reference,
    Symbol,
    TensorSpec,
    ValueReference,
)
from atoll.protocol.ids import NodeIndex

Named = TypeVar("Named", InputReference, ParameterReference, BufferReference)

BATCH = Symbol("b")
_EXAMPLES = (4, 6)
_META = torch.device("meta")


class GraphBuilder:
    """Collects nodes; shapes are found by calling them on meta tensors, for two sizes of the symbol ``b``."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.parameters: list[ParameterSpec] = []
        self.buffers: list[BufferSpec] = []
        self.inputs: list[tuple[str, TensorSpec]] = []
        self._known: tuple[dict[Reference, torch.Tensor], ...] = ({}, {})

    def input(self, name: str, *shape: Dimension, dtype: torch.dtype = torch.float32) -> InputReference:
        spec = TensorSpec(shape, dtype)
        self.inputs.append((name, spec))
        return self._know(InputReference(name), spec)

    def parameter(self, name: str, *shape: int, trainable: bool = True, scale: float = 0.2) -> ParameterReference:
        spec = ParameterSpec(
            name=name, shape=shape, dtype=torch.float32, trainable=trainable, initialisation=normal(shape, scale)
        )
        self.parameters.append(spec)
        return self._know(ParameterReference(name), TensorSpec(shape, spec.dtype))

    def buffer(
        self, name: str, *shape: int, dtype: torch.dtype = torch.float32, mutated: bool = False, value: float = 0.0
    ) -> BufferReference:
        program = filled(shape, value, dtype)
        self.buffers.append(BufferSpec(name=name, shape=shape, dtype=dtype, mutated=mutated, initialisation=program))
        return self._know(BufferReference(name), TensorSpec(shape, dtype))

    def _know(self, reference: Named, spec: TensorSpec) -> Named:
        for size, known in zip(_EXAMPLES, self._known, strict=True):
            known[reference] = torch.empty(spec.sizes({"b": size}), dtype=spec.dtype, device="meta")
        return reference

    def call(self, operator: str, *arguments: Argument, keywords: Mapping[str, Argument] | None = None, **rest: Any) -> Any:
        """Adds a node; returns the reference of its result, or a tuple of them. ``rest`` are other fields of the node."""
        index = NodeIndex(len(self.nodes))
        named = tuple((keywords or {}).items())
        node = Node(index=index, operator=operator, arguments=arguments, keywords=named, outputs=(), **rest)
        overload = operators.resolve(operator)
        results = [
            calling.call(overload, arguments, node, known.__getitem__, {"b": size}, _META)
            for size, known in zip(_EXAMPLES, self._known, strict=True)
        ]
        values = tuple(ValueReference(index, position) for position in range(len(results[0])))
        for known, found in zip(self._known, results, strict=True):
            known.update(zip(values, found, strict=True))
        self.nodes.append(replace(node, outputs=tuple(_spec(*pair) for pair in zip(*results, strict=True))))
        return values if len(values) != 1 else values[0]

    def graph(self, loss: ValueReference, **metrics: ValueReference) -> OpGraph:
        return OpGraph(
            nodes=tuple(self.nodes),
            parameters=tuple(self.parameters),
            buffers=tuple(self.buffers),
            inputs=tuple(self.inputs),
            loss=loss,
            metrics=tuple(metrics.items()),
            example=(("b", _EXAMPLES[0]),),
        )


def _spec(small: torch.Tensor, large: torch.Tensor) -> TensorSpec:
    shape: list[Dimension] = []
    for first, second in zip(small.shape, large.shape, strict=True):
        if first == second:
            shape.append(first)
        else:
            factor, rest = divmod(first, _EXAMPLES[0])
            assert not rest, f"size {first} is no multiple of b"
            assert second == factor * _EXAMPLES[1], f"size {second} is no multiple of b"
            shape.append(BATCH if factor == 1 else Operation(ExpressionOperator.MULTIPLY, (factor, BATCH)))
    return TensorSpec(tuple(shape), small.dtype)


def normal(shape: tuple[int, ...], scale: float) -> Initialisation:
    """A program that draws from a normal distribution."""
    spec = TensorSpec(shape, torch.float32)
    empty = Node(
        index=NodeIndex(0),
        operator="aten.empty.memory_format",
        arguments=(shape,),
        keywords=(("device", OwnDevice()),),
        outputs=(spec,),
    )
    value = ValueReference(NodeIndex(0))
    fill = Node(index=NodeIndex(1), operator="aten.normal_.default", arguments=(value, 0.0, scale), outputs=(spec,))
    return Initialisation(nodes=(empty, fill), result=ValueReference(NodeIndex(1)))


def filled(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Initialisation:
    """A program that makes a constant tensor."""
    number = value if dtype.is_floating_point else int(value)
    node = Node(
        index=NodeIndex(0),
        operator="aten.full.default",
        arguments=(shape, number),
        keywords=(("dtype", dtype), ("device", OwnDevice())),
        outputs=(TensorSpec(shape, dtype),),
    )
    return Initialisation(nodes=(node,), result=ValueReference(NodeIndex(0)))
