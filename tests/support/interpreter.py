"""Executes a whole op graph in the plainest way, for tests of what a trace means."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from atoll.protocol import calling, operators
from atoll.protocol.graph import (
    BufferReference,
    InputReference,
    OpGraph,
    ParameterReference,
    Reference,
    ValueReference,
    bind,
)

_CPU = torch.device("cpu")


def state_of(graph: OpGraph, module: nn.Module) -> dict[Reference, Tensor]:
    """The tensors of ``module`` (the one that names the weights) as the graph refers to them."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    state: dict[Reference, Tensor] = {ParameterReference(spec.name): parameters[spec.name] for spec in graph.parameters}
    state.update((BufferReference(spec.name), buffers[spec.name]) for spec in graph.buffers if spec.name in buffers)
    return state


def interpret(
    graph: OpGraph, state: Mapping[Reference, Tensor], inputs: Mapping[str, Tensor], *, evaluation: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the metrics of one batch."""
    bindings = bind(graph.inputs, {name: tuple(tensor.shape) for name, tensor in inputs.items()})
    values: dict[Reference, Tensor] = {**state, **{InputReference(name): tensor for name, tensor in inputs.items()}}
    for node in graph.nodes:
        if evaluation and node.training_only:
            continue
        operator = operators.resolve(node.operator)
        arguments = calling.arguments_in(node, evaluation)
        with torch.set_grad_enabled(node.gradient and torch.is_grad_enabled()):
            results = calling.call(operator, arguments, node, values.__getitem__, bindings, _CPU)
        values.update((ValueReference(node.index, number), result) for number, result in enumerate(results))
    return values[graph.loss], {name: values[value] for name, value in graph.metrics}
