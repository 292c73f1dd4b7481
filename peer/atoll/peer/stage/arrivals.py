"""What comes into a stage and what goes out: the values of one microbatch, checked against the graph and moved to the device.

What another process sent is not believed: a missing tensor or another shape is a WireError, before any node runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from atoll.peer.stage.staging import Staging
from atoll.protocol.errors import GraphRefused, ResourceError, WireError
from atoll.protocol.graph import Bindings, Boundary, StageGraph, TensorSpec, ValueReference
from atoll.protocol.ids import MicrobatchIndex, StepNumber
from atoll.protocol.limits import Limits, check_nodes

# Sets of sizes that are known to fit; with more, some are checked again.
_MAX_REMEMBERED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchInput:
    """What one forward needs. ``scale`` is the weight of the microbatch's loss in the step's; ``bindings`` are its sizes."""

    index: MicrobatchIndex
    step: StepNumber
    inputs: Mapping[str, torch.Tensor]
    received: Mapping[ValueReference, torch.Tensor] = field(default_factory=dict)
    bindings: Bindings = field(default_factory=dict)
    scale: float = 1.0
    evaluation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """What one forward gives: values to send, and on the last stage the loss and the metrics."""

    sends: Mapping[ValueReference, torch.Tensor]
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def describe(value: ValueReference) -> str:
    """How messages name a value."""
    return f"value {value.node}:{value.output}"


class Arrivals:
    """Checks tensors from the host against a stage's graph and puts them on the device.

    ``lower_precision`` lets bfloat16 arrive where the graph says float32, as autocast makes it.
    """

    def __init__(self, graph: StageGraph, staging: Staging, limits: Limits, *, lower_precision: bool) -> None:
        self._graph = graph
        self._staging = staging
        self._limits = limits
        self._lower_precision = lower_precision
        self._fitting: set[tuple[tuple[str, int], ...]] = set()

    def forward(self, microbatch: MicrobatchInput) -> MicrobatchInput:
        """The microbatch with the inputs and received values that the graph wants."""
        self._check_sizes(microbatch.bindings)
        inputs: dict[str, torch.Tensor] = {}
        for name, spec in self._graph.inputs:
            if name not in microbatch.inputs:
                raise WireError(f"batch input {name!r} of microbatch {microbatch.index} is missing")
            inputs[name] = self._checked(microbatch.inputs[name], spec, microbatch.bindings, f"batch input {name!r}")
        received: dict[ValueReference, torch.Tensor] = {}
        for boundary in self._graph.receives:
            what = describe(boundary.value)
            if boundary.value not in microbatch.received:
                raise WireError(f"{what} of microbatch {microbatch.index} is missing")
            tensor = microbatch.received[boundary.value]
            received[boundary.value] = self._checked(tensor, boundary.spec, microbatch.bindings, what)
        return replace(microbatch, inputs=inputs, received=received)

    def gradient(
        self, boundary: Boundary, gradients: Mapping[ValueReference, torch.Tensor], bindings: Bindings
    ) -> torch.Tensor:
        """The gradient of the value that crosses ``boundary``."""
        what = f"the gradient of {describe(boundary.value)}"
        if boundary.value not in gradients:
            raise WireError(f"{what} is missing")
        return self._checked(gradients[boundary.value], boundary.spec, bindings, what)

    def _check_sizes(self, bindings: Bindings) -> None:
        """Raises WireError for sizes that are missing or negative, ResourceError for a value beyond the limits."""
        key = tuple(sorted(bindings.items()))
        if key in self._fitting:
            return
        for symbol, _ in self._graph.example:
            if bindings.get(symbol, -1) < 0:
                raise WireError(f"a batch came without the size {symbol!r}")
        try:
            check_nodes(self._graph.nodes, bindings, self._limits)
        except GraphRefused as error:
            raise ResourceError(f"a microbatch is too large for this peer; use a smaller one: {error}") from error
        if len(self._fitting) >= _MAX_REMEMBERED:
            self._fitting.clear()
        self._fitting.add(key)

    def _checked(self, tensor: torch.Tensor, spec: TensorSpec, bindings: Bindings, what: str) -> torch.Tensor:
        try:
            sizes = spec.sizes(bindings)
        except KeyError as error:
            raise WireError(f"the size {error} of {what} is not known") from error
        if tuple(tensor.shape) != sizes:
            raise WireError(f"{what} has shape {tuple(tensor.shape)} instead of {sizes}")
        lower = self._lower_precision and spec.dtype == torch.float32 and tensor.dtype == torch.bfloat16
        if tensor.dtype != spec.dtype and not lower:
            raise WireError(f"{what} has dtype {tensor.dtype} instead of {spec.dtype}")
        return self._staging.to_device(tensor)
