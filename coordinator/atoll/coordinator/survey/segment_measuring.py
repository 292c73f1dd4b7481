"""Asks peers to measure a model's kinds of segments, and makes of their answers what the planner wants to know. Pure.

Use: :func:`prepare_measuring` once a run; send each of :meth:`SegmentMeasuring.messages` to a peer, which answers each with a
``Measured`` that names the kind; give what came back to :meth:`SegmentMeasuring.seconds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from atoll.compression.registry import encode_message
from atoll.coordinator.data.feed import Feed
from atoll.coordinator.learning_rates import optimizer_settings
from atoll.coordinator.planning.segments import MeasuredSeconds
from atoll.coordinator.traced_model import TracedModel
from atoll.coordinator.tracing.kinds import KindSettings, SegmentKind, SegmentKinds, segment_kinds
from atoll.protocol.errors import RunFailed
from atoll.protocol.graph import bind
from atoll.protocol.ids import Generation, MicrobatchIndex, StageIndex, StepNumber
from atoll.protocol.job import Job
from atoll.protocol.measurement import (
    BUFFER_PREFIX,
    INPUT_PREFIX,
    REQUEST_TENSOR,
    MeasurementRequest,
    request_to_bytes,
)
from atoll.protocol.messages import EncodedMessage, Kind, Message, MessageKey
from atoll.protocol.v1 import session_pb2

TOTAL_SECONDS = 2.5
"""About what a peer may take for all kinds together, unless it is so slow that measuring each once takes longer."""
MOST_SECONDS = 1.0
LEAST_SECONDS = 0.1
"""Bounds of what it may take for one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """What a peer's answers amount to: ``seconds``, or the ``reason`` why they amount to nothing."""

    seconds: MeasuredSeconds | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMeasuring:
    """The same for all peers. ``limit_seconds`` is about what a peer takes for one kind."""

    kinds: SegmentKinds
    limit_seconds: float
    encoded: tuple[EncodedMessage, ...] = field(repr=False)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The kinds, in the order of the messages."""
        return tuple(kind.fingerprint for kind in self.kinds.kinds)

    def messages(self, generation: Generation) -> tuple[EncodedMessage, ...]:
        """The MEASUREMENT messages, one a kind; ``generation`` is the one that the session is at, or they would be dropped."""
        return tuple(replace(message, key=replace(message.key, generation=generation)) for message in self.encoded)

    def seconds(self, answers: Mapping[str, session_pb2.Measured]) -> Combined:
        """What one peer's ``answers``, by fingerprint, say of every segment."""
        for fingerprint in self.fingerprints:
            reason = _unusable(answers.get(fingerprint))
            if reason:
                return Combined(seconds=None, reason=reason)
        return Combined(seconds=combine(self.kinds, answers))


def prepare_measuring(model: TracedModel, feed: Feed, *, total_seconds: float = TOTAL_SECONDS) -> SegmentMeasuring:
    """What ``model``'s peers are to measure, with the first microbatch of ``feed``. Takes a second for a large model.

    Raises RunFailed when the data does not suit the model.
    """
    inputs = feed.example_inputs()
    try:
        bindings = bind(model.graph.inputs, {name: tuple(tensor.shape) for name, tensor in inputs.items()})
    except ValueError as error:
        raise RunFailed(f"the data does not suit the traced model: {error}") from error
    settings = kind_settings(model.job)
    kinds = segment_kinds(model.rehearsal, model.segments.positions, settings, bindings)
    limit_seconds = min(MOST_SECONDS, max(LEAST_SECONDS, total_seconds / len(kinds.kinds)))
    values = model.first_values.value
    encoded = tuple(encode_measurement(kind, settings, inputs, bindings, values, limit_seconds) for kind in kinds.kinds)
    return SegmentMeasuring(kinds=kinds, limit_seconds=limit_seconds, encoded=encoded)


def kind_settings(job: Job) -> KindSettings:
    """How the job's segments are run."""
    training = job.training
    return KindSettings(precision=training.precision, optimizer=optimizer_settings(job), clips=training.clip_norm is not None)


def encode_measurement(
    kind: SegmentKind,
    settings: KindSettings,
    inputs: Mapping[str, Tensor],
    bindings: Mapping[str, int],
    first_value: Callable[[str], Tensor],
    limit_seconds: float,
) -> EncodedMessage:
    """The MEASUREMENT message of one kind. ``first_value`` gives a buffer by name: masks and tables must be the real ones."""
    request = MeasurementRequest(
        kind=kind.fingerprint,
        graph=kind.graph,
        precision=settings.precision,
        optimizer=settings.optimizer,
        clips=settings.clips,
        limit_seconds=limit_seconds,
    )
    data = torch.frombuffer(bytearray(request_to_bytes(request)), dtype=torch.uint8)
    tensors = [(REQUEST_TENSOR, data)]
    tensors += [(INPUT_PREFIX + name, inputs[name].contiguous()) for name in kind.inputs]
    tensors += [
        (BUFFER_PREFIX + spec.name, first_value(spec.name)) for spec in kind.graph.buffers if spec.initialisation is None
    ]
    key = MessageKey(
        generation=Generation(0),
        step=StepNumber(0),
        microbatch=MicrobatchIndex(0),
        kind=Kind.MEASUREMENT,
        source=StageIndex(0),
        target=StageIndex(0),
    )
    numbers = {f"size:{symbol}": float(size) for symbol, size in bindings.items()}
    return encode_message(Message(key=key, tensors=tuple(tensors), numbers=numbers)).sealed()


def combine(kinds: SegmentKinds, measured: Mapping[str, session_pb2.Measured]) -> MeasuredSeconds:
    """The sums over all segments before each position; ``measured`` has every kind by its fingerprint.

    The optimizer's time of a parameter that several segments use counts in each of them: each may be a stage of its own.
    """
    answers = [measured[kinds.kinds[kind].fingerprint] for kind in kinds.of_segment]

    def sums(seconds: Callable[[session_pb2.Measured], float]) -> tuple[float, ...]:
        return (0.0, *accumulate(map(seconds, answers)))

    return MeasuredSeconds(
        forward=sums(lambda answer: answer.forward_seconds),
        backward=sums(lambda answer: answer.backward_seconds),
        accumulate=sums(lambda answer: answer.accumulate_seconds),
        update=sums(lambda answer: answer.update_seconds),
    )


def _unusable(answer: session_pb2.Measured | None) -> str:
    """Why nothing can be planned with an answer; empty when it can."""
    if answer is None:
        return "it did not answer in time"
    if answer.failure:
        return answer.failure
    said = (answer.forward_seconds, answer.backward_seconds, answer.accumulate_seconds, answer.update_seconds)
    if not all(math.isfinite(seconds) and seconds >= 0.0 for seconds in said) or answer.forward_seconds <= 0.0:
        return f"it says that it took {said} s for a kind of segment, which cannot be"
    return ""
