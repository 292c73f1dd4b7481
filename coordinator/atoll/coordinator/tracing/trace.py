"""Traces a model with its loss into an op graph.

Theory of operation. The model lives on the meta device, so nothing here holds weights. It is exported twice, in training and in
evaluation mode; both become nodes, and ``modes`` lines them up into one list. What does not contribute to the loss, to a metric
or to a buffer is dropped. Parameters and buffers get their canonical names, their ties and their initialisation programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from atoll.coordinator.tracing.conversion import Converted, convert
from atoll.coordinator.tracing.effects import written_references
from atoll.coordinator.tracing.export import Dynamic, default_dynamic, export, meta_inputs
from atoll.coordinator.tracing.initialisation import Programs, constant_program
from atoll.coordinator.tracing.modes import merge_modes
from atoll.coordinator.tracing.pruning import prune
from atoll.coordinator.tracing.source import BuiltModel
from atoll.coordinator.tracing.state_names import StateNames
from atoll.protocol.errors import GraphRefused, TraceError
from atoll.protocol.graph import (
    BufferReference,
    BufferSpec,
    InputReference,
    Node,
    OpGraph,
    ParameterReference,
    ParameterSpec,
    TensorSpec,
)
from atoll.protocol.validation import validate_graph


def trace(model: BuiltModel, example: Mapping[str, Tensor], dynamic: Dynamic | None = None) -> OpGraph:
    """The op graph of ``model`` for batches like ``example``.

    ``dynamic`` says which dimensions of each input vary between microbatches; by default the first, and the second of integer
    matrices, where they are not 1. Raises TraceError with what to change in the model.
    """
    dynamic = default_dynamic(example) if dynamic is None else dynamic
    inputs = meta_inputs(example, dynamic)
    names = StateNames(model.state_module)
    training = _traced(model, names, inputs, dynamic, training=True)
    evaluation = _traced(model, names, inputs, dynamic, training=False)
    _check_sizes(training, dynamic)
    merged = prune(merge_modes(training, evaluation))
    _check_loss(merged)
    _check_writes(merged)
    programs = model.recording.programs(names)
    model.constants.update(merged.constants)
    graph = OpGraph(
        nodes=merged.nodes,
        parameters=_parameters(names, programs),
        buffers=_buffers(names, programs, merged),
        inputs=merged.inputs,
        loss=merged.loss,
        metrics=merged.metrics,
        example=merged.example,
    )
    _check_executable(graph)
    return graph


def _check_executable(graph: OpGraph) -> None:
    """What a peer would refuse is better said before any peer is asked."""
    try:
        validate_graph(graph)
    except GraphRefused as error:
        module = graph.nodes[error.node].module if error.node is not None and error.node < len(graph.nodes) else ""
        where = f" in {module}" if module else ""
        raise TraceError(
            f"peers would not execute this model: {error.reason}{where}; write that part in other torch operations"
        ) from error


def _traced(
    model: BuiltModel, names: StateNames, inputs: Mapping[str, Tensor], dynamic: Dynamic, *, training: bool
) -> Converted:
    return convert(export(model, inputs, dynamic, training=training), names, model.source.inner, inputs)


def _check_sizes(converted: Converted, dynamic: Dynamic) -> None:
    for name, spec in converted.inputs:
        for dimension in dynamic.get(name, ()):
            if isinstance(spec.shape[dimension], int):
                raise TraceError(
                    f"the model only works when dimension {dimension} of its input {name} is {spec.shape[dimension]}, but this "
                    "size varies between microbatches; compute with tensor.shape instead of fixed sizes"
                )


def _check_loss(converted: Converted) -> None:
    spec = converted.nodes[converted.loss.node].outputs[converted.loss.output]
    if spec is None or spec.shape != () or not spec.dtype.is_floating_point:
        found = "no tensor" if spec is None else f"{spec.dtype} of shape {_shape(spec)}"
        raise TraceError(f"the loss that the model's forward returns is {found}; it must be one floating-point number, a mean")


def _shape(spec: TensorSpec) -> str:
    sizes = ("?" if not isinstance(size, int) else str(size) for size in spec.shape)
    return f"({', '.join(sizes)})"


def _check_writes(converted: Converted) -> None:
    for node in converted.nodes:
        for reference in written_references(node):
            if isinstance(reference, ParameterReference):
                raise TraceError(f"the model's forward modifies its parameter {reference.name} in place; modify a copy")
            if isinstance(reference, InputReference):
                raise TraceError(f"the model's forward modifies its input {reference.name} in place; modify a clone of it")


def _parameters(names: StateNames, programs: Programs) -> tuple[ParameterSpec, ...]:
    return tuple(
        ParameterSpec(
            name=named.name,
            shape=tuple(named.tensor.shape),
            dtype=named.tensor.dtype,
            trainable=named.tensor.requires_grad,
            ties=named.ties,
            initialisation=programs[named.name],
        )
        for named in names.parameters
    )


def _buffers(names: StateNames, programs: Programs, converted: Converted) -> tuple[BufferSpec, ...]:
    used = set(_buffer_names(converted.nodes))
    mutated = {
        reference.name
        for node in converted.nodes
        for reference in written_references(node)
        if isinstance(reference, BufferReference)
    }
    own = tuple(
        BufferSpec(
            name=named.name,
            shape=tuple(named.tensor.shape),
            dtype=named.tensor.dtype,
            persistent=named.persistent,
            mutated=named.name in mutated,
            ties=named.ties,
            initialisation=programs[named.name],
        )
        for named in names.buffers
        if named.persistent or named.name in used
    )
    constants = tuple(
        BufferSpec(
            name=name,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            persistent=False,
            mutated=False,
            initialisation=constant_program(tensor),
        )
        for name, tensor in converted.constants.items()
        if name in used
    )
    return own + constants


def _buffer_names(nodes: tuple[Node, ...]) -> Iterator[str]:
    for node in nodes:
        for reference in node.references():
            if isinstance(reference, BufferReference):
                yield reference.name
