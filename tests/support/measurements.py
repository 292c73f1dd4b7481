"""What a coordinator would ask peers to measure of a graph that a test has made itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from atoll.compression.registry import decode_message
from atoll.coordinator.survey.segment_measuring import encode_measurement
from atoll.coordinator.tracing.kinds import KindSettings, SegmentKinds, segment_kinds
from atoll.coordinator.tracing.rehearsal import rehearse
from atoll.coordinator.tracing.segments import segments_of
from atoll.protocol.assignment import OptimizerSettings
from atoll.protocol.graph import OpGraph, bind
from atoll.protocol.messages import Message

SETTINGS = KindSettings(precision="fp32", optimizer=OptimizerSettings(), clips=True)


def kinds_in(graph: OpGraph, settings: KindSettings = SETTINGS) -> SegmentKinds:
    """The kinds of the segments between the cuts that a planner would be given."""
    rehearsal = rehearse(graph)
    positions = segments_of(rehearsal, copies=1).positions
    return segment_kinds(rehearsal, positions, settings, dict(graph.example))


def measurements_of(
    graph: OpGraph, inputs: Mapping[str, torch.Tensor], settings: KindSettings = SETTINGS, *, limit_seconds: float = 0.05
) -> list[Message]:
    """A MEASUREMENT message for each kind, as a peer has it before it; ``inputs`` are those of one microbatch."""
    bindings = bind(graph.inputs, {name: tuple(value.shape) for name, value in inputs.items()})
    messages = (
        encode_measurement(kind, settings, inputs, bindings, _no_value, limit_seconds)
        for kind in kinds_in(graph, settings).kinds
    )
    return [decode_message(message) for message in messages]


def _no_value(name: str) -> torch.Tensor:
    raise AssertionError(f"{name} has a program, so nothing needs to be sent")
