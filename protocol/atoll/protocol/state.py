"""State by name: what is kept of a parameter or a buffer, and under which names it is sent, stored and restored. Pure.

A parameter NAME stands for its weight, called ``NAME``, and for what the optimizer keeps of it, called ``NAME@MOMENT``: for
AdamW ``NAME@step`` (how often it was updated), ``NAME@exp_avg`` and ``NAME@exp_avg_sq``, for SGD with momentum
``NAME@momentum_buffer``. A parameter that has not been updated yet has a weight alone. A buffer is called by its name. All of
it is as of one committed step, and none of it says on which stage or peer it lay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b

import torch

from atoll.protocol.graph import OpGraph, StageGraph
from atoll.protocol.messages import EncodedMessage, MessageHeader

MOMENTS: Mapping[str, tuple[str, ...]] = {"adamw": ("step", "exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
"""By the optimizer's name. ``step`` is a number, the others are of the weight's shape."""
COUNTER = "step"


def moment_name(parameter: str, moment: str) -> str:
    """What a moment of a parameter is called."""
    return f"{parameter}@{moment}"


def split_name(name: str) -> tuple[str, str | None]:
    """The parameter or buffer that ``name`` belongs to, and the moment that it is, None for the tensor itself."""
    owner, at, moment = name.rpartition("@")
    known = at and any(moment in moments for moments in MOMENTS.values())
    return (owner, moment) if known else (name, None)


def grouped(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[str, torch.Tensor], ...]]:
    """All that each name stands for, the tensor itself first, in an order that does not depend on where ``state`` is from."""
    groups: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in state.items():
        groups.setdefault(split_name(name)[0], []).append((name, tensor))
    return {owner: tuple(sorted(group, key=lambda item: place_in_group(item[0]))) for owner, group in groups.items()}


def place_in_group(name: str) -> tuple[bool, str]:
    """What tensors of one group are sorted by."""
    moment = split_name(name)[1]
    return (moment is not None, moment or "")


def changing_names(graph: OpGraph | StageGraph) -> frozenset[str]:
    """The parameters and buffers that training changes. The others keep their first values, which anybody can have."""
    trained = {spec.name for spec in graph.parameters if spec.trainable}
    return frozenset(trained | {spec.name for spec in graph.buffers if spec.mutated})


def state_judge(graph: StageGraph, optimizer: str) -> Callable[[MessageHeader], str | None]:
    """Judges the header of state for a stage before anything is allocated: None when the graph and the optimizer have each of
    its tensors."""
    parameters = {spec.name: (spec.dtype, tuple(spec.shape)) for spec in graph.parameters}
    declared = parameters | {spec.name: (spec.dtype, tuple(spec.shape)) for spec in graph.buffers}
    moments = MOMENTS[optimizer]

    def wanted(name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        if name in declared:
            return declared[name]
        owner, moment = split_name(name)
        if owner not in parameters or moment not in moments:
            return None
        return (torch.float32, ()) if moment == COUNTER else parameters[owner]

    def judge(header: MessageHeader) -> str | None:
        for tensor in header.tensors:
            found, right = (tensor.dtype, tensor.shape), wanted(tensor.name)
            if found != right:
                return f"{tensor.name} is {found} where the graph declares {right}"
        return None

    return judge


def state_digest(message: EncodedMessage) -> bytes:
    """A hash over a STATE message: names, dtypes, shapes, orders and bytes. Reads every byte: call it off the event loop for a
    large message."""
    found = blake2b(digest_size=16)
    for tensor in message.tensors:
        found.update(f"{tensor.name} {tensor.dtype} {tensor.shape} {tensor.order}\n".encode())
        found.update(tensor.data)
    return found.digest()
