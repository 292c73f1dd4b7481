"""What a stage does next in a step: pure, no tensors, no clock, no threads.

Theory of operation. A microbatch passes through a stage in three works: FORWARD, BACKWARD (the gradient of what was received,
which the earlier stage waits for) and ACCUMULATE (the gradients of the weights, which nobody waits for). Each kind of work
takes this peer's microbatches in ascending order, so sums do not depend on timing. The stage prefers backward, then forward,
then accumulate: what another stage waits for goes first, and the deferred half fills the gaps. But a deferred half holds the
gradients of its microbatch's activations, with recomputation beside the activations, so nothing else begins while more than
``MOST_DEFERRED`` wait, even where the gradients of many microbatches arrive at once.
At most ``in_flight`` microbatches have begun forward and not ended accumulate, which bounds memory. No work waits for a later
microbatch, and every stage admits at least one, so stages that all follow this rule never wait for one another in a circle.

An evaluation has forward work alone; there, a microbatch is in flight until the messages it caused have been taken by the
next stage, so that a slow stage holds back a fast one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from atoll.protocol.assignment import MOST_DEFERRED
from atoll.protocol.ids import MicrobatchIndex, StageIndex


class Work(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    ACCUMULATE = "accumulate"


class Need(StrEnum):
    """What a work may wait for; the values are words for people."""

    BATCH = "batch"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    DELIVERY = "delivery"


@dataclass(frozen=True, slots=True)
class Action:
    work: Work
    microbatch: MicrobatchIndex


@dataclass(frozen=True, slots=True)
class Awaited:
    """Something that has not arrived; ``stage`` is None for what the coordinator sends."""

    need: Need
    microbatch: MicrobatchIndex
    stage: StageIndex | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What one step of one stage consists of for one of its replicas.

    ``microbatches`` are those that it has, in ascending order; an evaluation may have none for it. ``activation_sources`` send
    a message before each forward, ``gradient_sources`` before each backward, and ``activation_targets`` get one after each
    forward.
    """

    microbatches: tuple[MicrobatchIndex, ...]
    in_flight: int
    evaluation: bool = False
    activation_sources: frozenset[StageIndex] = frozenset()
    gradient_sources: frozenset[StageIndex] = frozenset()
    activation_targets: frozenset[StageIndex] = frozenset()

    def __post_init__(self) -> None:
        if self.in_flight < 1 or not (self.microbatches or self.evaluation):
            raise ValueError(f"a step needs at least one microbatch and one in flight, got {self}")


@dataclass(slots=True)
class StepSchedule:
    """Progress of one step: tell it what arrived and what was done, ask it what to do."""

    shape: StepShape
    _next: dict[Work, int] = field(default_factory=lambda: dict.fromkeys(Work, 0))
    _arrived: set[Awaited] = field(default_factory=set)

    def arrived(self, need: Need, microbatch: MicrobatchIndex, stage: StageIndex | None = None) -> None:
        """Something that a work waits for is here."""
        self._arrived.add(Awaited(need, microbatch, stage))

    def finished(self, action: Action) -> None:
        """``action``, which ``next_action`` had returned, is done."""
        assert action.microbatch == self._microbatch(action.work), f"{action} done out of order: {self._next}"
        self._next[action.work] += 1

    @property
    def complete(self) -> bool:
        """Whether every microbatch has passed through all its works."""
        last = Work.FORWARD if self.shape.evaluation else Work.ACCUMULATE
        return self._next[last] == len(self.shape.microbatches)

    @property
    def num_in_flight(self) -> int:
        """Microbatches that hold memory here."""
        if not self.shape.evaluation:
            return self._next[Work.FORWARD] - self._next[Work.ACCUMULATE]
        return sum(1 for index in self._forwarded if any(self._missing(self._deliveries(index))))

    def next_action(self) -> Action | None:
        """The work to do now, or None when each waits for something or all are done."""
        many_deferred = self._next[Work.BACKWARD] - self._next[Work.ACCUMULATE] > MOST_DEFERRED
        works = (Work.ACCUMULATE,) if many_deferred else (Work.BACKWARD, Work.FORWARD, Work.ACCUMULATE)
        for work in works:
            if self._open(work) and not any(self._missing(self._needs(work, self._microbatch(work)))):
                return Action(work, self._microbatch(work))
        return None

    def waiting_for(self) -> tuple[Awaited, ...]:
        """What is missing for the next backward and then for the next forward, most overdue first; empty when ready or done."""
        if self.complete or self.next_action() is not None:
            return ()
        found: list[Awaited] = []
        for work in (Work.BACKWARD, Work.FORWARD):
            if self._open(work):
                found.extend(self._missing(self._needs(work, self._microbatch(work))))
        if not found:
            found.extend(missing for index in self._forwarded for missing in self._missing(self._deliveries(index)))
        return tuple(found)

    @property
    def _forwarded(self) -> tuple[MicrobatchIndex, ...]:
        return self.shape.microbatches[: self._next[Work.FORWARD]]

    def _microbatch(self, work: Work) -> MicrobatchIndex:
        """The next one of an open work."""
        return self.shape.microbatches[self._next[work]]

    def _open(self, work: Work) -> bool:
        """Whether this stage itself allows ``work`` now."""
        done = self._next
        if work is Work.FORWARD:
            return done[work] < len(self.shape.microbatches) and self.num_in_flight < self.shape.in_flight
        if self.shape.evaluation:
            return False
        return done[work] < done[Work.FORWARD if work is Work.BACKWARD else Work.BACKWARD]

    def _needs(self, work: Work, microbatch: MicrobatchIndex) -> Iterable[Awaited]:
        if work is Work.FORWARD:
            yield Awaited(Need.BATCH, microbatch)
            for stage in sorted(self.shape.activation_sources):
                yield Awaited(Need.ACTIVATION, microbatch, stage)
        elif work is Work.BACKWARD:
            for stage in sorted(self.shape.gradient_sources):
                yield Awaited(Need.GRADIENT, microbatch, stage)

    def _deliveries(self, microbatch: MicrobatchIndex) -> Iterable[Awaited]:
        for stage in sorted(self.shape.activation_targets):
            yield Awaited(Need.DELIVERY, microbatch, stage)

    def _missing(self, needs: Iterable[Awaited]) -> Iterable[Awaited]:
        return (need for need in needs if need not in self._arrived)
