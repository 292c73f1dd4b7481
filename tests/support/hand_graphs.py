"""Op graphs written by hand, and cut by hand: for tests of what executes and validates them, without a tracer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from atoll.protocol import calling, operators
from atoll.protocol.graph import (
    Argument,
    Boundary,
    BufferReference,
    BufferSpec,
    Dimension,
    ExpressionOperator,
    Initialisation,
    InputReference,
    Node,
    OpGraph,
    Operation,
    OwnDevice,
    ParameterReference,
    ParameterSpec,
    Reference,
    SharedParameter,
    StageGraph,
    Symbol,
    TensorSpec,
    Use,
    ValueReference,
)
from atoll.protocol.ids import NodeIndex, StageIndex

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

    def _know(self, reference: Any, spec: TensorSpec) -> Any:
        for size, known in zip(_EXAMPLES, self._known, strict=True):
            known[reference] = torch.empty(spec.sizes({"b": size}), dtype=spec.dtype, device="meta")
        return reference

    def call(self, operator: str, *arguments: Argument, keywords: Mapping[str, Argument] | None = None, **rest: Any) -> Any:
        """Adds a node; returns the reference of its result, or a tuple of them. ``rest`` are other fields of the node."""
        index = NodeIndex(len(self.nodes))
        named = tuple((keywords or {}).items())
        node = Node(index=index, operator=operator, arguments=arguments, keywords=named, outputs=(), **rest)
        results = [
            calling.call(
                operators.resolve(operator), arguments, node, lambda item, known=known: known[item], {"b": size}, _META
            )
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
            assert not rest and second == factor * _EXAMPLES[1], "a size that is no multiple of b"
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


def cut(graph: OpGraph, *cuts: int) -> tuple[StageGraph, ...]:
    """``graph`` as stages that begin at nodes 0 and ``cuts``; values travel along the chain of their users."""
    home = [StageIndex(sum(node.index >= position for position in cuts)) for node in graph.nodes]
    boundaries = _boundaries(graph, home)
    shared = _shared(graph, home)
    return tuple(_stage(graph, StageIndex(stage), home, boundaries, shared) for stage in range(len(cuts) + 1))


def whole(graph: OpGraph) -> StageGraph:
    """``graph`` as one stage."""
    return cut(graph)[0]


def _stage(
    graph: OpGraph,
    stage: StageIndex,
    home: list[StageIndex],
    boundaries: list[Boundary],
    shared: tuple[SharedParameter, ...],
) -> StageGraph:
    nodes = tuple(node for node in graph.nodes if home[node.index] == stage)
    used = {reference for node in nodes for reference in node.references()}
    receives = tuple(boundary for boundary in boundaries if boundary.target == stage)
    sends = tuple(boundary for boundary in boundaries if boundary.source == stage)
    return StageGraph(
        stage=stage,
        num_stages=max(home) + 1,
        nodes=nodes,
        parameters=tuple(spec for spec in graph.parameters if ParameterReference(spec.name) in used),
        buffers=tuple(spec for spec in graph.buffers if BufferReference(spec.name) in used),
        inputs=tuple((name, spec) for name, spec in graph.inputs if InputReference(name) in used),
        receives=receives,
        sends=sends,
        shared=tuple(item for item in shared if stage in item.stages),
        loss=graph.loss if home[graph.loss.node] == stage else None,
        metrics=tuple((name, value) for name, value in graph.metrics if home[value.node] == stage),
        example=graph.example,
    )


def _boundaries(graph: OpGraph, home: list[StageIndex]) -> list[Boundary]:
    users: dict[ValueReference, set[StageIndex]] = {}
    for node in graph.nodes:
        for reference in node.references():
            if isinstance(reference, ValueReference):
                users.setdefault(reference, {home[reference.node]}).add(home[node.index])
    learned = _learned(graph)
    found: list[Boundary] = []
    for value in sorted(users):
        chain = sorted(users[value])
        for source, target in zip(chain, chain[1:], strict=False):
            spec = graph.spec(value)
            differentiable = value.node in learned and spec.dtype.is_floating_point
            found.append(Boundary(value=value, spec=spec, source=source, target=target, differentiable=differentiable))
    return found


def _learned(graph: OpGraph) -> set[int]:
    """The nodes whose results depend on a trainable parameter."""
    trainable = {ParameterReference(spec.name) for spec in graph.parameters if spec.trainable}
    learned: set[int] = set()
    for node in graph.nodes:
        for reference in node.references():
            if reference in trainable or (isinstance(reference, ValueReference) and reference.node in learned):
                learned.add(node.index)
    return learned


def _shared(graph: OpGraph, home: list[StageIndex]) -> tuple[SharedParameter, ...]:
    uses: dict[str, list[Use]] = {spec.name: [] for spec in graph.parameters if spec.trainable}
    for node in graph.nodes:
        for position, reference in enumerate(node.references()):
            if isinstance(reference, ParameterReference) and reference.name in uses:
                uses[reference.name].append(Use(node.index, position, home[node.index]))
    return tuple(SharedParameter(name=name, uses=tuple(found)) for name, found in uses.items() if len(found) > 1)
