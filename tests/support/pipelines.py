"""Runs the stages of a cut graph in one thread, as their peers would: for tests of numbers, without sockets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from atoll.compression.codec import RawCodec, decode_tensor, encode_tensor
from atoll.compression.context import CodecContext
from atoll.peer.stage.stage import MicrobatchInput, Stage, StageSettings
from atoll.protocol.graph import Bindings, StageGraph, ValueReference, bind
from atoll.protocol.ids import MicrobatchIndex, StepNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One microbatch: inputs by name and the weight of its loss."""

    inputs: Mapping[str, torch.Tensor]
    weight: float = 1.0


def over_the_wire(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as the peer on the other end of a lossless link gets it: other memory, same bits, same layout."""
    context = CodecContext(edge="value")
    encoded = encode_tensor("value", tensor, RawCodec(), context)
    return decode_tensor(replace(encoded, data=bytes(encoded.data)), RawCodec(), context)


class HandPipeline:
    """All stages of one graph; ``in_flight`` microbatches are forwarded before the first of them goes backward.

    ``given`` are first values by name, such as a module's state dict; the others come from their initialisation programs.
    """

    def __init__(
        self,
        graphs: Sequence[StageGraph],
        settings: StageSettings,
        in_flight: int = 1,
        given: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.stages = [Stage(graph, settings) for graph in graphs]
        self._in_flight = in_flight
        self._every_input = {name: spec for graph in graphs for name, spec in graph.inputs}
        for stage in self.stages:
            stage.initialise(given)

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the weights and buffers of all stages by name."""
        return {name: value.clone() for stage in self.stages for name, value in stage.state()}

    def step(
        self, step: int, samples: Sequence[Sample], learning_rate: float = 1e-2, clip_norm: float | None = 1.0
    ) -> tuple[float, float]:
        """One committed step; returns its loss and the norm of its gradient."""
        loss = self.gradients(step, samples)
        norm = math.sqrt(sum(self.squared_norms()))
        factor = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
        for stage in self.stages:
            stage.commit(factor, learning_rate)
        return loss, norm

    def gradients(self, step: int, samples: Sequence[Sample]) -> float:
        """Forward and backward of all microbatches; returns the step's loss."""
        total = math.fsum(sample.weight for sample in samples)
        losses: list[float] = []
        for stage in self.stages:
            stage.begin(StepNumber(step))
        for first in range(0, len(samples), self._in_flight):
            group = range(first, min(first + self._in_flight, len(samples)))
            losses += [self.forward(step, index, samples[index], samples[index].weight / total) for index in group]
            for index in group:
                self.backward(index)
        return sum(sample.weight * loss for sample, loss in zip(samples, losses, strict=True)) / total

    def squared_norms(self) -> list[float]:
        """Exchanges the gradients of shared parameters and finishes; squared norms in the order of the parameters' names."""
        tied = {name: over_the_wire(value) for stage in self.stages for name, value in stage.tied_gradients().items()}
        norms = {name: value for stage in self.stages for name, value in stage.finish(tied).items()}
        return [norms[name] for name in sorted(norms)]

    def forward(self, step: int, index: int, sample: Sample, scale: float = 1.0, *, evaluation: bool = False) -> float:
        """One microbatch through all stages; returns its loss."""
        values: dict[ValueReference, torch.Tensor] = {}
        loss = math.nan
        for stage in self.stages:
            microbatch = MicrobatchInput(
                index=MicrobatchIndex(index),
                step=StepNumber(step),
                inputs=sample.inputs,
                received={boundary.value: values[boundary.value] for boundary in stage.graph.receives},
                bindings=self.bindings(sample),
                scale=scale,
                evaluation=evaluation,
            )
            result = stage.forward(microbatch)
            values.update((value, over_the_wire(tensor)) for value, tensor in result.sends.items())
            loss = loss if result.loss is None else result.loss
        return loss

    def backward(self, index: int) -> None:
        """The backward pass of one microbatch through all stages; the weights' half right after each."""
        gradients: dict[ValueReference, torch.Tensor] = {}
        for stage in reversed(self.stages):
            found = stage.backward(MicrobatchIndex(index), gradients)
            gradients.update((value, over_the_wire(tensor)) for value, tensor in found.items())
            stage.accumulate(MicrobatchIndex(index))

    def bindings(self, sample: Sample) -> Bindings:
        shapes = {name: tuple(value.shape) for name, value in sample.inputs.items()}
        return bind(tuple(self._every_input.items()), shapes)
