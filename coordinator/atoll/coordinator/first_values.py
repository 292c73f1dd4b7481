"""First values of parameters and buffers that a peer cannot make itself: from a checkpoint, or made here.

One tensor at a time: a checkpoint stays on the disk, so memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from atoll.protocol.errors import JobError, RunFailed
from atoll.protocol.graph import BufferSpec, OpGraph, ParameterSpec, StageGraph

FIELD = "model.weights"


def held_specs(graph: OpGraph | StageGraph) -> tuple[ParameterSpec | BufferSpec, ...]:
    """The parameters and buffers of a graph."""
    return (*graph.parameters, *graph.buffers)


class FirstValues:
    """``made`` gives a value by name, on any thread, for tensors that have no program; ``checkpoint`` is a safetensors file.

    Raises JobError when the checkpoint does not suit the model.
    """

    def __init__(self, graph: OpGraph, made: Callable[[str], torch.Tensor], checkpoint: Path | None) -> None:
        self._specs = {spec.name: spec for spec in held_specs(graph)}
        self._made = made
        self._checkpoint = checkpoint
        self._stored: dict[str, str] = {}
        if checkpoint is not None:
            self._stored = self._names_in(checkpoint)

    def to_send(self, graph: StageGraph) -> tuple[str, ...]:
        """The names whose first value a stage's peer must fetch."""
        return tuple(spec.name for spec in held_specs(graph) if spec.name in self._stored or spec.initialisation is None)

    def value(self, name: str) -> torch.Tensor:
        """The first value of one tensor, as the graph declares it. Raises RunFailed when it cannot be read."""
        spec = self._specs[name]
        if name not in self._stored:
            return self._made(name).to(spec.dtype)
        assert self._checkpoint is not None
        try:
            with safe_open(self._checkpoint, framework="pt") as opened:
                tensor: torch.Tensor = opened.get_tensor(self._stored[name])
        except (OSError, SafetensorError) as error:
            raise RunFailed(f"{FIELD}: {self._checkpoint} cannot be read any more: {error}") from error
        # Own memory: a tensor over the mapped file would die with it.
        return tensor.to(spec.dtype).clone()

    def _names_in(self, checkpoint: Path) -> dict[str, str]:
        """For each tensor of the model that the file has, its name there: its own or one of its ties."""
        try:
            with safe_open(checkpoint, framework="pt") as opened:
                shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise JobError(FIELD, f"{str(checkpoint)!r} is no safetensors file: {error}") from error
        found: dict[str, str] = {}
        for spec in self._specs.values():
            stored = next((name for name in (spec.name, *spec.ties) if name in shapes), None)
            if stored is not None and shapes[stored] != tuple(spec.shape):
                sizes = f"{shapes[stored]} in {str(checkpoint)!r} but {tuple(spec.shape)} in the model"
                raise JobError(FIELD, f"{stored} is {sizes}; give weights of this model")
            if stored is not None:
                found[spec.name] = stored
            elif isinstance(spec, ParameterSpec):
                raise JobError(FIELD, f"{str(checkpoint)!r} has no {spec.name}; give weights of this model")
        return found
