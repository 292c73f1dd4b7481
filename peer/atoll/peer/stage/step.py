"""One step (or evaluation) of one stage: carries out what the schedule decides, over the stage, the mailbox and the links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import torch

from atoll.peer.stage.boundaries import Boundaries, NamedTensors, Values
from atoll.peer.stage.events import BeginStep, Consumed, GradientsReady, MicrobatchLoss, Notice, Reported
from atoll.peer.stage.local_steps import LocalTraining
from atoll.peer.stage.mailbox import Mailbox
from atoll.peer.stage.plausibility import Plausibility
from atoll.peer.stage.schedule import Action, Need, StepSchedule, StepShape, Work
from atoll.peer.stage.stage import MicrobatchInput, Stage
from atoll.peer.stage.timeline import Timeline
from atoll.protocol.assignment import LEARNING_RATE
from atoll.protocol.errors import LinkError, WireError
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.graph import ValueReference
from atoll.protocol.groups import Group
from atoll.protocol.ids import MicrobatchIndex, PeerId, StageIndex
from atoll.protocol.messages import Kind, Message, MessageKey
from atoll.protocol.samples import sample_numbers, samples_of

_NEED_OF_KIND = {Kind.BATCH: Need.BATCH, Kind.ACTIVATION: Need.ACTIVATION, Kind.GRADIENT: Need.GRADIENT}
_KIND_OF_NEED = {need: kind for kind, need in _NEED_OF_KIND.items()}
_SIZE_PREFIX = "size:"
_LARGEST_SIZE = 2.0**53  # beyond it, a number does not say which whole one it is
COORDINATOR_STAGE = StageIndex(0)  # what a BATCH message has as its source


class Phase(StrEnum):
    """Where a step stands; the values are words for people."""

    WORKING = "working"
    AVERAGING = "summing with replicas"
    TIED = "tied"
    REPORTED = "waiting for commit"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSurroundings:
    """What a step works with; ``groups`` holds who has this stage and each neighbouring one, ``own`` is this peer. With
    ``local`` steps there are several inner ones in each."""

    stage: Stage
    boundaries: Boundaries
    mailbox: Mailbox
    groups: Mapping[StageIndex, Group]
    own: PeerId
    in_flight: int
    send: Callable[[PeerId, Message], None]
    notify: Callable[[Notice], None]
    clock: Callable[[], float]
    chaos: FaultPoints = field(default_factory=FaultPoints)
    plausibility: Plausibility = field(default_factory=Plausibility)
    local: LocalTraining | None = None


class StepRun:
    """Created when a step starts; ``advance`` does one piece of work at a time until the step is reported."""

    def __init__(self, start: BeginStep, surroundings: StepSurroundings) -> None:
        self.start = start
        self.phase = Phase.WORKING
        self._with = surroundings
        boundaries = surroundings.boundaries
        self._group = surroundings.groups[boundaries.stage]
        self._local = None if start.evaluation else surroundings.local
        self._stage = surroundings.stage if self._local is None else self._local.inner
        share = self._group.share_of(surroundings.own, start.num_microbatches)
        self._parts = [share] if self._local is None else self._local.parts(share, start.num_microbatches)
        self._bindings: dict[MicrobatchIndex, dict[str, int]] = {}
        self._losses: list[MicrobatchLoss] = []
        self._compute_seconds = 0.0
        self._timeline = Timeline(surroundings.clock())
        if not start.evaluation:
            surroundings.stage.begin(start.step)
        if self._local is not None:
            self._local.begin(start.step)
        self._schedule = self._scheduled(self._parts.pop(0))

    def _scheduled(self, microbatches: tuple[MicrobatchIndex, ...]) -> StepSchedule:
        """What is to be done with ``microbatches``, as far as it came already."""
        boundaries = self._with.boundaries
        schedule = StepSchedule(
            StepShape(
                microbatches=microbatches,
                in_flight=self._with.in_flight,
                evaluation=self.start.evaluation,
                activation_sources=boundaries.activation_sources,
                gradient_sources=boundaries.gradient_sources,
                activation_targets=boundaries.activation_targets,
            )
        )
        for key in self._with.mailbox.keys_of(self.start.generation, self.start.step, evaluation=self.start.evaluation):
            _tell(schedule, key)
        return schedule

    def arrived(self, key: MessageKey) -> None:
        """A message of this step is in the mailbox."""
        _tell(self._schedule, key)

    def delivered(self, key: MessageKey) -> None:
        """An activation that this step sent has been taken."""
        self._schedule.arrived(Need.DELIVERY, key.microbatch, key.target)

    def belongs(self, key: MessageKey) -> bool:
        """Whether a message of this key is for this step."""
        return (key.generation, key.step, key.evaluation) == (self.start.generation, self.start.step, self.start.evaluation)

    def advance(self) -> bool:
        """Does one piece of work; False when there is nothing to do but wait."""
        if self.phase is Phase.WORKING:
            action = self._schedule.next_action()
            if action is not None:
                self._perform(action)
                return True
            if self._schedule.complete:
                self._end_of_part()
                return True
        elif self.phase is Phase.TIED and not self._missing_ties():
            self._finish()
            return True
        self._timeline.waits(*self.waiting_for())
        return False

    @property
    def activity(self) -> str:
        """What ``advance`` would do now, in a word."""
        action = self._schedule.next_action() if self.phase is Phase.WORKING else None
        return self.phase.value if action is None else action.work.value

    def waiting_for(self) -> tuple[str, PeerId | None]:
        """What this step waits for, in words, and from which peer (None: the coordinator)."""
        if self.phase is Phase.TIED:
            missing = self._missing_ties()
            return "tied gradient", self._with.groups[missing[0]].leader if missing else None
        if self.phase is Phase.AVERAGING:
            return "sums of gradients", None
        if self.phase is Phase.REPORTED:
            return "commit", None
        awaited = self._schedule.waiting_for()
        if not awaited:
            return "", None
        stage = awaited[0].stage
        return awaited[0].need.value, None if stage is None else self._with.groups[stage].holder_of(awaited[0].microbatch)

    def _perform(self, action: Action) -> None:
        started = self._with.clock()
        match action.work:
            case Work.FORWARD:
                self._reached("forward", action.microbatch)
                self._forward(action.microbatch)
            case Work.BACKWARD:
                self._reached("backward", action.microbatch)
                self._backward(action.microbatch)
            case Work.ACCUMULATE:
                self._stage.accumulate(action.microbatch)
        self._with.chaos.computed(self._with.clock() - started)
        self._worked(action.work.value, action.microbatch, started)
        self._schedule.finished(action)

    def _worked(self, what: str, microbatch: MicrobatchIndex | None, started: float) -> None:
        # On a device with a queue this is when the call returned: what nothing waited for counts with what comes next.
        ended = self._with.clock()
        self._compute_seconds += ended - started
        self._timeline.worked(what, microbatch, started, ended)

    def _reached(self, phase: Literal["forward", "backward"], index: MicrobatchIndex) -> None:
        if not self.start.evaluation:
            self._with.chaos.reached(phase, step=self.start.step, microbatch=index)

    def _forward(self, index: MicrobatchIndex) -> None:
        boundaries = self._with.boundaries
        _, batch = self._take(Kind.BATCH, index, COORDINATOR_STAGE)
        bindings = bindings_of(batch.numbers)
        received: Values = {}
        for source in sorted(boundaries.activation_sources):
            sender, message = self._take(Kind.ACTIVATION, index, source)
            with _blaming(sender):
                values = boundaries.read_activation(source, message.tensors, bindings)
            self._look_at(Kind.ACTIVATION, sender, values, boundaries.sensitive(source))
            received |= values
        scale = batch.numbers.get("scale", 1.0)
        if self._local is not None:
            self._local.forwarded(scale, batch.numbers.get(LEARNING_RATE, 0.0))
        result = self._stage.forward(
            MicrobatchInput(
                index=index,
                step=self.start.step,
                inputs=boundaries.read_batch(batch.tensors, bindings),
                received=received,
                bindings=bindings,
                scale=scale,
                evaluation=self.start.evaluation,
            )
        )
        if not self.start.evaluation:
            self._bindings[index] = bindings
        for target in sorted(boundaries.activation_targets):
            self._send(Kind.ACTIVATION, index, target, boundaries.activation(target, result.sends), samples_of(batch.numbers))
        if result.loss is not None:
            self._losses.append(MicrobatchLoss(microbatch=index, loss=result.loss, metrics=dict(result.metrics)))

    def _backward(self, index: MicrobatchIndex) -> None:
        boundaries = self._with.boundaries
        bindings = self._bindings.pop(index)
        gradients: Values = {}
        for source in sorted(boundaries.gradient_sources):
            sender, message = self._take(Kind.GRADIENT, index, source)
            with _blaming(sender):
                values = boundaries.read_gradient(source, message.tensors, bindings)
            self._look_at(Kind.GRADIENT, sender, values, values)
            gradients |= values
        results = self._stage.backward(index, gradients)
        for target in sorted(boundaries.gradient_targets):
            self._send(Kind.GRADIENT, index, target, boundaries.gradient(target, results))

    def _look_at(self, kind: Kind, sender: PeerId | None, values: Values, only: Iterable[ValueReference]) -> None:
        """Raises Implausible for what no honest stage would send."""
        assert sender is not None, "only peers send what is computed"
        self._with.plausibility.check(kind, sender, values, only)

    def _end_of_part(self) -> None:
        """Of all that there is to do with microbatches, unless an inner step ends here."""
        if self._local is not None:
            started = self._with.clock()
            self._local.update()
            if not self._parts:
                self._local.end()
            self._worked("inner update", None, started)
        if self._parts:
            self._schedule = self._scheduled(self._parts.pop(0))
        else:
            self._end_of_work()

    def _end_of_work(self) -> None:
        if self.start.evaluation:
            self._report({})
            return
        if len(self._group.replicas) == 1:
            self._exchange_tied()
            return
        self.phase = Phase.AVERAGING
        gradients = self._with.stage.own_gradients()
        self._with.notify(GradientsReady(generation=self.start.generation, step=self.start.step, gradients=gradients))

    def summed(self, gradients: Sequence[torch.Tensor]) -> None:
        """The gradients of all replicas of this stage, summed."""
        assert self.phase is Phase.AVERAGING, f"gradients were summed while {self.phase.value}"
        self._with.stage.take_gradients(gradients)
        self._exchange_tied()

    @property
    def _leads(self) -> bool:
        return self._group.leader == self._with.own

    def _exchange_tied(self) -> None:
        """The first replica sends; each replica of the other stages gets it."""
        self.phase = Phase.TIED
        others = sorted(self._with.boundaries.tied_stages)
        if others and self._leads:
            own = self._with.stage.tied_gradients()
            for target in others:
                tensors = self._with.boundaries.tied(target, own)
                for peer in self._with.groups[target].replicas:
                    self._send_to(peer, Kind.TIED_GRADIENT, MicrobatchIndex(0), target, tensors)

    def _finish(self) -> None:
        boundaries = self._with.boundaries
        tied: dict[str, torch.Tensor] = {}
        for source in sorted(boundaries.tied_stages):
            sender, message = self._take(Kind.TIED_GRADIENT, MicrobatchIndex(0), source)
            with _blaming(sender):
                gradients = boundaries.read_tied(message.tensors)
            assert sender is not None, "only peers send what is computed"
            for name, gradient in gradients.items():
                self._with.plausibility.check_weights(Kind.TIED_GRADIENT, sender, name, gradient)
            tied |= gradients
        started = self._with.clock()
        squared_norms = self._with.stage.finish(tied)
        self._worked("summing up", None, started)
        self._report(squared_norms)

    def _report(self, squared_norms: Mapping[str, float]) -> None:
        self.phase = Phase.REPORTED
        self._with.notify(
            Reported(
                generation=self.start.generation,
                step=self.start.step,
                evaluation=self.start.evaluation,
                losses=tuple(self._losses),
                squared_norms=dict(squared_norms),
                compute_seconds=self._compute_seconds,
                spans=self._timeline.spans,
            )
        )

    def _missing_ties(self) -> list[StageIndex]:
        here = {
            key.source
            for key in self._with.mailbox.keys_of(self.start.generation, self.start.step, evaluation=False)
            if key.kind is Kind.TIED_GRADIENT
        }
        return sorted(self._with.boundaries.tied_stages - here)

    def _key(self, kind: Kind, index: MicrobatchIndex, source: StageIndex, target: StageIndex) -> MessageKey:
        return MessageKey(
            generation=self.start.generation,
            step=self.start.step,
            microbatch=index,
            kind=kind,
            source=source,
            target=target,
            evaluation=self.start.evaluation,
        )

    def _take(self, kind: Kind, index: MicrobatchIndex, source: StageIndex) -> tuple[PeerId | None, Message]:
        key = self._key(kind, index, source, self._with.boundaries.stage)
        found = self._with.mailbox.take(key)
        assert found is not None, f"{key} was scheduled before it arrived"
        sender = found[0]
        if sender is not None:
            self._with.notify(Consumed(sender=sender, key=key))
        return found

    def _send(
        self, kind: Kind, index: MicrobatchIndex, target: StageIndex, tensors: NamedTensors, samples: tuple[int, ...] = ()
    ) -> None:
        self._send_to(self._with.groups[target].holder_of(index), kind, index, target, tensors, samples)

    def _send_to(
        self,
        peer: PeerId,
        kind: Kind,
        index: MicrobatchIndex,
        target: StageIndex,
        tensors: NamedTensors,
        samples: tuple[int, ...] = (),
    ) -> None:
        key = self._key(kind, index, self._with.boundaries.stage, target)
        self._with.send(peer, Message(key=key, tensors=tensors, numbers=sample_numbers(samples)))


def _tell(schedule: StepSchedule, key: MessageKey) -> None:
    """A message is in the mailbox."""
    need = _NEED_OF_KIND.get(key.kind)
    if need is not None:
        schedule.arrived(need, key.microbatch, None if need is Need.BATCH else key.source)


def bindings_of(numbers: Mapping[str, float]) -> dict[str, int]:
    """The sizes sent with a batch, by symbol. Raises WireError for one that is none."""
    sizes = {name.removeprefix(_SIZE_PREFIX): value for name, value in numbers.items() if name.startswith(_SIZE_PREFIX)}
    for name, value in sizes.items():
        if not 0.0 <= value <= _LARGEST_SIZE or not value.is_integer():
            raise WireError(f"a batch came with the size {name} = {value}")
    return {name: int(value) for name, value in sizes.items()}


@contextmanager
def _blaming(sender: PeerId | None) -> Iterator[None]:
    """What is wrong with a message is the fault of its sender (None: the coordinator)."""
    try:
        yield
    except WireError as error:
        if sender is None:
            raise
        raise LinkError(sender, f"it sent what the graph does not declare: {error}", corrupt=True) from error
