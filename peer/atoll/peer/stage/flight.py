"""What a stage keeps of a microbatch between its forward and its backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from atoll.peer.stage.arrivals import MicrobatchInput
from atoll.protocol.graph import ValueReference


@dataclass(slots=True)
class Recording:
    """The autograd side of one forward: the leaves that stand for received values, and where gradients enter."""

    leaves: Mapping[ValueReference, torch.Tensor]
    edges: Mapping[ValueReference, GradientEdge]
    loss: GradientEdge | None
    loss_dtype: torch.dtype


@dataclass(slots=True)
class Executed:
    """What one execution of the graph leaves behind; ``buffers`` are the changed copies of the mutated ones."""

    leaves: Mapping[ValueReference, torch.Tensor]
    outputs: Mapping[ValueReference, torch.Tensor]
    loss: torch.Tensor | None
    metrics: Mapping[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]

    def recording(self) -> Recording:
        return Recording(
            leaves=self.leaves,
            edges={value: get_gradient_edge(tensor) for value, tensor in self.outputs.items() if tensor.requires_grad},
            loss=get_gradient_edge(self.loss) if self.loss is not None and self.loss.requires_grad else None,
            loss_dtype=torch.float32 if self.loss is None else self.loss.dtype,
        )


@dataclass(slots=True)
class Flight:
    """A microbatch between its forward and its backward. With recomputation, ``microbatch`` keeps its inputs."""

    microbatch: MicrobatchInput
    buffers: Mapping[str, torch.Tensor]
    recording: Recording | None
