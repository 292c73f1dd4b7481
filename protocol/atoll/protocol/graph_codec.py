"""Op graphs as protobuf and back.

Decoding checks the form alone: every field present and of a known kind. Whether a graph may be executed (operators, references,
shapes, sizes) is decided by ``validation``. Nonsense raises :class:`~atoll.protocol.errors.WireError` with the field's name.
"""

from __future__ import annotations

from collections.abc import Iterable

from atoll.protocol.argument_codec import (
    argument_from_proto,
    argument_to_proto,
    expression_from_proto,
    expression_to_proto,
    value_from_proto,
    value_to_proto,
)
from atoll.protocol.graph import (
    Boundary,
    BufferSpec,
    Initialisation,
    Node,
    OpGraph,
    ParameterSpec,
    SharedParameter,
    StageGraph,
    TensorSpec,
    Use,
    ValueReference,
)
from atoll.protocol.ids import NodeIndex, StageIndex
from atoll.protocol.tensors import dtype_from_name, dtype_name
from atoll.protocol.v1 import graph_pb2 as wire


def op_graph_to_proto(graph: OpGraph) -> wire.OpGraph:
    """The message that :func:`op_graph_from_proto` reads back."""
    return wire.OpGraph(
        nodes=map(_node_to_proto, graph.nodes),
        parameters=map(_parameter_to_proto, graph.parameters),
        buffers=map(_buffer_to_proto, graph.buffers),
        inputs=_inputs_to_proto(graph.inputs),
        loss=value_to_proto(graph.loss),
        metrics=_metrics_to_proto(graph.metrics),
        example=_example_to_proto(graph.example),
    )


def op_graph_from_proto(message: wire.OpGraph) -> OpGraph:
    """The graph that ``message`` describes; raises WireError."""
    return OpGraph(
        nodes=tuple(map(_node_from_proto, message.nodes)),
        parameters=tuple(map(_parameter_from_proto, message.parameters)),
        buffers=tuple(map(_buffer_from_proto, message.buffers)),
        inputs=_inputs_from_proto(message.inputs),
        loss=value_from_proto(message.loss),
        metrics=_metrics_from_proto(message.metrics),
        example=_example_from_proto(message.example),
    )


def stage_graph_to_proto(graph: StageGraph) -> wire.StageGraph:
    """The message that :func:`stage_graph_from_proto` reads back."""
    return wire.StageGraph(
        stage=graph.stage,
        num_stages=graph.num_stages,
        nodes=map(_node_to_proto, graph.nodes),
        recomputed=sorted(graph.recomputed),
        parameters=map(_parameter_to_proto, graph.parameters),
        buffers=map(_buffer_to_proto, graph.buffers),
        inputs=_inputs_to_proto(graph.inputs),
        receives=map(_boundary_to_proto, graph.receives),
        sends=map(_boundary_to_proto, graph.sends),
        shared=map(_shared_to_proto, graph.shared),
        loss=None if graph.loss is None else value_to_proto(graph.loss),
        metrics=_metrics_to_proto(graph.metrics),
        example=_example_to_proto(graph.example),
    )


def stage_graph_from_proto(message: wire.StageGraph) -> StageGraph:
    """The stage that ``message`` describes; raises WireError."""
    return StageGraph(
        stage=StageIndex(message.stage),
        num_stages=message.num_stages,
        nodes=tuple(map(_node_from_proto, message.nodes)),
        recomputed=frozenset(map(NodeIndex, message.recomputed)),
        parameters=tuple(map(_parameter_from_proto, message.parameters)),
        buffers=tuple(map(_buffer_from_proto, message.buffers)),
        inputs=_inputs_from_proto(message.inputs),
        receives=tuple(map(_boundary_from_proto, message.receives)),
        sends=tuple(map(_boundary_from_proto, message.sends)),
        shared=tuple(map(_shared_from_proto, message.shared)),
        loss=value_from_proto(message.loss) if message.HasField("loss") else None,
        metrics=_metrics_from_proto(message.metrics),
        example=_example_from_proto(message.example),
    )


def _spec_to_proto(spec: TensorSpec) -> wire.TensorSpec:
    return wire.TensorSpec(shape=map(expression_to_proto, spec.shape), dtype=dtype_name(spec.dtype))


def _spec_from_proto(message: wire.TensorSpec) -> TensorSpec:
    return TensorSpec(tuple(map(expression_from_proto, message.shape)), dtype_from_name(message.dtype))


def _node_to_proto(node: Node) -> wire.Node:
    return wire.Node(
        index=node.index,
        operator=node.operator,
        arguments=map(argument_to_proto, node.arguments),
        keywords=(wire.Keyword(name=name, value=argument_to_proto(value)) for name, value in node.keywords),
        outputs=(wire.Output(tensor=None if spec is None else _spec_to_proto(spec)) for spec in node.outputs),
        module=node.module,
        evaluation=None if node.evaluation is None else wire.ArgumentList(items=map(argument_to_proto, node.evaluation)),
        training_only=node.training_only,
        no_gradient=not node.gradient,
        full_precision=node.full_precision,
    )


def _node_from_proto(message: wire.Node) -> Node:
    evaluation = tuple(map(argument_from_proto, message.evaluation.items)) if message.HasField("evaluation") else None
    return Node(
        index=NodeIndex(message.index),
        operator=message.operator,
        arguments=tuple(map(argument_from_proto, message.arguments)),
        keywords=tuple((keyword.name, argument_from_proto(keyword.value)) for keyword in message.keywords),
        outputs=tuple(_spec_from_proto(output.tensor) if output.HasField("tensor") else None for output in message.outputs),
        module=message.module,
        evaluation=evaluation,
        training_only=message.training_only,
        gradient=not message.no_gradient,
        full_precision=message.full_precision,
    )


def _initialisation_to_proto(program: Initialisation | None) -> wire.Initialisation | None:
    if program is None:
        return None
    return wire.Initialisation(
        nodes=map(_node_to_proto, program.nodes), result=value_to_proto(program.result), seed=program.seed
    )


def _initialisation_from_proto(message: wire.Parameter | wire.Buffer) -> Initialisation | None:
    if not message.HasField("initialisation"):
        return None
    program = message.initialisation
    nodes = tuple(map(_node_from_proto, program.nodes))
    return Initialisation(nodes=nodes, result=value_from_proto(program.result), seed=program.seed)


def _parameter_to_proto(spec: ParameterSpec) -> wire.Parameter:
    return wire.Parameter(
        name=spec.name,
        shape=spec.shape,
        dtype=dtype_name(spec.dtype),
        frozen=not spec.trainable,
        ties=spec.ties,
        initialisation=_initialisation_to_proto(spec.initialisation),
    )


def _parameter_from_proto(message: wire.Parameter) -> ParameterSpec:
    return ParameterSpec(
        name=message.name,
        shape=tuple(message.shape),
        dtype=dtype_from_name(message.dtype),
        trainable=not message.frozen,
        ties=tuple(message.ties),
        initialisation=_initialisation_from_proto(message),
    )


def _buffer_to_proto(spec: BufferSpec) -> wire.Buffer:
    return wire.Buffer(
        name=spec.name,
        shape=spec.shape,
        dtype=dtype_name(spec.dtype),
        persistent=spec.persistent,
        mutated=spec.mutated,
        ties=spec.ties,
        initialisation=_initialisation_to_proto(spec.initialisation),
    )


def _buffer_from_proto(message: wire.Buffer) -> BufferSpec:
    return BufferSpec(
        name=message.name,
        shape=tuple(message.shape),
        dtype=dtype_from_name(message.dtype),
        persistent=message.persistent,
        mutated=message.mutated,
        ties=tuple(message.ties),
        initialisation=_initialisation_from_proto(message),
    )


def _inputs_to_proto(inputs: tuple[tuple[str, TensorSpec], ...]) -> list[wire.NamedSpec]:
    return [wire.NamedSpec(name=name, spec=_spec_to_proto(spec)) for name, spec in inputs]


def _inputs_from_proto(messages: Iterable[wire.NamedSpec]) -> tuple[tuple[str, TensorSpec], ...]:
    return tuple((message.name, _spec_from_proto(message.spec)) for message in messages)


def _metrics_to_proto(metrics: tuple[tuple[str, ValueReference], ...]) -> list[wire.NamedValue]:
    return [wire.NamedValue(name=name, value=value_to_proto(value)) for name, value in metrics]


def _metrics_from_proto(messages: Iterable[wire.NamedValue]) -> tuple[tuple[str, ValueReference], ...]:
    return tuple((message.name, value_from_proto(message.value)) for message in messages)


def _example_to_proto(example: tuple[tuple[str, int], ...]) -> list[wire.Example]:
    return [wire.Example(symbol=symbol, size=size) for symbol, size in example]


def _example_from_proto(messages: Iterable[wire.Example]) -> tuple[tuple[str, int], ...]:
    return tuple((message.symbol, message.size) for message in messages)


def _boundary_to_proto(boundary: Boundary) -> wire.Boundary:
    return wire.Boundary(
        value=value_to_proto(boundary.value),
        spec=_spec_to_proto(boundary.spec),
        source=boundary.source,
        target=boundary.target,
        differentiable=boundary.differentiable,
    )


def _boundary_from_proto(message: wire.Boundary) -> Boundary:
    return Boundary(
        value=value_from_proto(message.value),
        spec=_spec_from_proto(message.spec),
        source=StageIndex(message.source),
        target=StageIndex(message.target),
        differentiable=message.differentiable,
    )


def _shared_to_proto(shared: SharedParameter) -> wire.SharedParameter:
    uses = (wire.Use(node=use.node, position=use.position, stage=use.stage) for use in shared.uses)
    return wire.SharedParameter(name=shared.name, uses=uses)


def _shared_from_proto(message: wire.SharedParameter) -> SharedParameter:
    uses = tuple(Use(NodeIndex(use.node), use.position, StageIndex(use.stage)) for use in message.uses)
    return SharedParameter(name=message.name, uses=uses)
