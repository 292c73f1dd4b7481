"""Measures one kind of segment on this peer's device: what a microbatch of it will take within a stage.

Theory of operation. The segment is run alone, by the very :class:`Stage` that runs in training, on the real sizes and the real
batch inputs; weights, received values and gradients are noise. Within a stage it is one of many: when its turn comes, its
weights have left the caches, and the optimizer's code is warm. So several copies run in turn, as consecutive segments of
a stage do, with two microbatches in flight; the first gradients of a step, for which memory is cleared first, do not count.

Of all times the median counts. A run's usual step is to be predicted, and usual steps have the usual interruptions: the best
time would promise too much, the mean would be spoilt by one long interruption. Nothing counts from the first round, in which
memory is claimed for the first time.

The owner calls ``advance`` on the computing thread, piece by piece, so that it can drop the work at any moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch

from atoll.peer.measuring.profile import synchronise
from atoll.peer.stage.stage import MicrobatchInput, Stage, StageSettings
from atoll.peer.stage.staging import resident_staging
from atoll.peer.stage.step import bindings_of
from atoll.peer.stage.work_seconds import WorkSeconds
from atoll.protocol.errors import WireError
from atoll.protocol.graph import Bindings, Boundary, ParameterSpec, ValueReference
from atoll.protocol.ids import MicrobatchIndex, StepNumber
from atoll.protocol.limits import Limits
from atoll.protocol.measurement import BUFFER_PREFIX, INPUT_PREFIX, REQUEST_TENSOR, MeasurementRequest, request_from_bytes
from atoll.protocol.messages import Message
from atoll.protocol.tensors import tensor_to_bytes
from atoll.protocol.validation import validate_stage

_IN_FLIGHT = 2
_MOST_COPIES = 4
_COLD_BYTES = 128 * 2**20
"""What copies need to touch between two turns of one of them so that it finds the caches cold; more copies are no use."""
_MOST_ROUNDS = 12
_FEWEST_ROUNDS = 3
_NOISE = 2**16  # different numbers; a larger tensor repeats them, which is much quicker than drawing more
_WEIGHT_SCALE = 0.02
_GRADIENT_SCALE = 1e-3
_SCALE = 0.125  # of a microbatch's loss in the step's
_CLIPPING = 0.5
_LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringSurroundings:
    """Where it is measured. A graph that takes more than ``memory_bytes`` is refused."""

    device: torch.device
    memory_bytes: int
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A request with what came along with it."""

    request: MeasurementRequest
    inputs: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    bindings: Bindings


def read_task(message: Message) -> Task:
    """What a MEASUREMENT message asks for; raises WireError."""
    tensors = dict(message.tensors)
    if REQUEST_TENSOR not in tensors:
        raise WireError("a message asks for a measurement without saying which")
    return Task(
        request=request_from_bytes(bytes(tensor_to_bytes(tensors[REQUEST_TENSOR]))),
        inputs=_prefixed(tensors, INPUT_PREFIX),
        buffers=_prefixed(tensors, BUFFER_PREFIX),
        bindings=bindings_of(message.numbers),
    )


def _prefixed(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


@dataclass(slots=True)
class _Times:
    """One list a kind of work."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    accumulate: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)

    def medians(self) -> WorkSeconds:
        return WorkSeconds(
            forward=median(self.forward),
            backward=median(self.backward),
            accumulate=median(self.accumulate),
            update=median(self.update),
        )


class Measuring:
    """``advance`` until ``seconds`` is there. Raises what a stage raises: GraphRefused, WireError, ResourceError ..."""

    def __init__(self, task: Task, surroundings: MeasuringSurroundings) -> None:
        self.task = task
        self.seconds: WorkSeconds | None = None
        self._with = surroundings
        self._copies: list[_Copy] = []
        self._work = self._measure()

    @property
    def kind(self) -> str:
        return self.task.request.kind

    def advance(self) -> None:
        """Does one piece of work."""
        next(self._work, None)

    def close(self) -> None:
        """Gives its memory back."""
        self._work.close()
        self._copies.clear()

    def _measure(self) -> Generator[None, None, None]:
        limits = Limits(max_state_bytes=self._with.memory_bytes, max_tensor_bytes=self._with.memory_bytes)
        validate_stage(self.task.request.graph, limits)
        yield
        began = self._with.clock()
        yield from self._add_copy(limits)
        yield from self._round(_Times())
        wanted = self._num_copies(self._with.clock() - began)
        while len(self._copies) < wanted:
            yield from self._add_copy(limits)
        if wanted > 1:
            yield from self._round(_Times())
        times, rounds = _Times(), 0
        while rounds < _MOST_ROUNDS and (rounds == 0 or self._with.clock() - began < self.task.request.limit_seconds):
            yield from self._round(times)
            rounds += 1
        self.seconds = times.medians()

    def _num_copies(self, round_seconds: float) -> int:
        """As many as caches, memory and time ask for, given what the first round of one copy took."""
        held = max(1, self._copies[0].num_bytes)
        in_time = self.task.request.limit_seconds / ((1 + _FEWEST_ROUNDS) * max(round_seconds, 1e-6))
        return int(max(1, min(_MOST_COPIES, -(-_COLD_BYTES // held), self._with.memory_bytes // (2 * held), in_time)))

    def _add_copy(self, limits: Limits) -> Iterator[None]:
        self._copies.append(_Copy(self.task, self._with, limits))
        yield

    def _round(self, times: _Times) -> Iterator[None]:
        """A step of all copies, as of the segments of one stage."""
        for copy in self._copies:
            copy.stage.begin(StepNumber(1))
        for index in range(_IN_FLIGHT):
            for copy in self._copies:
                times.forward.append(copy.forward(MicrobatchIndex(index)))
                yield
        for index in range(_IN_FLIGHT):
            for copy in reversed(self._copies):
                backward, accumulate = copy.backward(MicrobatchIndex(index))
                if index > 0:
                    times.backward.append(backward)
                    times.accumulate.append(accumulate)
                yield
        for copy in self._copies:
            times.update.append(copy.update())
            yield


class _Copy:
    """The segment as a stage, with everything that it is given."""

    def __init__(self, task: Task, surroundings: MeasuringSurroundings, limits: Limits) -> None:
        request, self._with = task.request, surroundings
        self._clips = request.clips
        settings = StageSettings(
            run_seed=0,
            device=surroundings.device,
            optimizer=request.optimizer,
            precision=request.precision,
            limits=limits,
        )
        self._noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(0))
        self.stage = Stage(request.graph, settings, staging=resident_staging())
        given = {spec.name: self._weights(spec) for spec in request.graph.parameters}
        self.stage.initialise({**given, **task.buffers})
        self._bindings = task.bindings
        self._inputs = {name: tensor.to(surroundings.device) for name, tensor in task.inputs.items()}
        self._received = self._values(request.graph.receives, 1.0)
        self._gradients = self._values((item for item in request.graph.sends if item.differentiable), _GRADIENT_SCALE)

    @property
    def num_bytes(self) -> int:
        """About what this copy holds at most: state, and every result of its nodes for each microbatch in flight."""
        specs = (spec for node in self.stage.graph.nodes for spec in node.outputs if spec is not None)
        return self.stage.resident_bytes + _IN_FLIGHT * sum(spec.num_bytes(self._bindings) for spec in specs)

    def forward(self, index: MicrobatchIndex) -> float:
        microbatch = MicrobatchInput(
            index=index,
            step=StepNumber(1),
            inputs=self._inputs,
            received=self._received,
            bindings=self._bindings,
            scale=_SCALE,
        )
        return self._timed(lambda: self.stage.forward(microbatch))

    def backward(self, index: MicrobatchIndex) -> tuple[float, float]:
        """The seconds until the received values' gradients are there, and those of the weights' after that."""
        first = self._timed(lambda: self.stage.backward(index, self._gradients))
        return first, self._timed(lambda: self.stage.accumulate(index))

    def update(self) -> float:
        """What happens once a step."""

        def finish_and_commit() -> None:
            self.stage.finish()
            self.stage.commit(_CLIPPING if self._clips else 1.0, _LEARNING_RATE)

        return self._timed(finish_and_commit)

    def _timed(self, work: Callable[[], object]) -> float:
        started = self._with.clock()
        work()
        synchronise(self._with.device)
        return self._with.clock() - started

    def _weights(self, spec: ParameterSpec) -> torch.Tensor:
        return self._filled(spec.shape, spec.dtype, _WEIGHT_SCALE)

    def _values(self, boundaries: Iterable[Boundary], scale: float) -> dict[ValueReference, torch.Tensor]:
        return {
            item.value: self._filled(item.spec.sizes(self._bindings), item.spec.dtype, scale).to(self._with.device)
            for item in boundaries
        }

    def _filled(self, shape: tuple[int, ...], dtype: torch.dtype, scale: float) -> torch.Tensor:
        """Noise, or zeros where numbers are indices or switches."""
        if not (dtype.is_floating_point or dtype.is_complex):
            return torch.zeros(shape, dtype=dtype)
        tensor = torch.empty(shape, dtype=dtype)
        for piece in torch.split(tensor.view(-1), _NOISE):
            piece.copy_(self._noise[: piece.numel()]).mul_(scale)
        return tensor
