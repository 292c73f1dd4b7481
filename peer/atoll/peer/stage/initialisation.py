"""First values of parameters and buffers, replayed from the small programs that the op graph carries.

A value depends on the run's seed and on the tensor's name alone (or on the name of the tensor that it starts as a copy of), and
is made on the CPU whatever the peer's device: any placement starts from the same weights.
"""

from __future__ import annotations

import torch

from atoll.protocol import calling, operators
from atoll.protocol.errors import GraphRefused
from atoll.protocol.graph import BufferSpec, Initialisation, ParameterSpec, Reference, ValueReference
from atoll.protocol.randomness import name_seed, seeded

_CPU = torch.device("cpu")


def initial_value(spec: ParameterSpec | BufferSpec, run_seed: int) -> torch.Tensor:
    """The first value of ``spec`` on the CPU; raises GraphRefused when its program fails or makes another shape."""
    if spec.initialisation is None:
        raise GraphRefused(f"{spec.name} has no initialisation program; its first value has to be sent")
    with torch.no_grad(), seeded(_CPU, name_seed(run_seed, spec.initialisation.seed or spec.name)):
        value = _replay(spec.initialisation, spec.name)
    if tuple(value.shape) != spec.shape:
        raise GraphRefused(f"the initialisation of {spec.name} makes shape {tuple(value.shape)} instead of {spec.shape}")
    return value.to(spec.dtype, copy=False).contiguous()


def _replay(program: Initialisation, name: str) -> torch.Tensor:
    results: dict[ValueReference, torch.Tensor] = {}

    def lookup(reference: Reference) -> torch.Tensor:
        if not isinstance(reference, ValueReference) or reference not in results:
            raise GraphRefused(f"the initialisation of {name} refers to {reference}, which it does not compute")
        return results[reference]

    for node in program.nodes:
        operator = operators.resolve(node.operator)
        try:
            values = calling.call(operator, node.arguments, node, lookup, {}, _CPU)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise GraphRefused(f"the initialisation of {name} fails in {node.operator}: {error}", node.index) from error
        results.update((ValueReference(node.index, position), value) for position, value in enumerate(values))
    return lookup(program.result)
