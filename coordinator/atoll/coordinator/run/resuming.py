"""A run that goes on after its coordinator was restarted, or a peer after its session was: where the run begins again, whose
return is waited for, and of what use the state is that a peer brings. A part of the state machine; pure.

A peer whose session breaks keeps what it has, and the gradients of a step that it has reported. When it is back it says so:
state of the committed step counts as held, a reported step that was committed under that very generation is committed there
too, and everything else is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from atoll.coordinator.planning.plan import Plan
from atoll.coordinator.run.snapshots import Moment, Part
from atoll.protocol.ids import Generation, PeerId, StepNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A committed step, as the journal has it, without the samples themselves."""

    step: StepNumber
    generation: Generation
    loss: float
    grad_norm: float
    clip_factor: float
    learning_rate: float
    seconds: float
    num_tokens: int
    samples: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Where a run is taken up: no generation up to ``generation`` is used again, ``last`` is the last committed step, ``plan``
    the last plan, ``codecs`` are those of its links. ``snapshots`` were ordered, and ``parts`` of them are on
    the disks of these peers. ``owed_evaluation``: the one after the last step is
    still to be done."""

    generation: Generation
    last: Committed | None = None
    plan: Plan | None = None
    codecs: Mapping[tuple[PeerId, PeerId], str] = field(default_factory=dict)
    snapshots: tuple[Moment, ...] = ()
    parts: tuple[tuple[PeerId, Part], ...] = ()
    owed_evaluation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """State of the committed ``step`` that a peer still has in memory. ``reported_step``, if not 0, is the step after it, which
    it reported under ``generation`` and whose gradients wait for the commit."""

    step: StepNumber
    generation: Generation
    reported_step: StepNumber
    names: frozenset[str]


class Use(StrEnum):
    """Of what use it is."""

    NONE = "none"
    KEEP = "keep"
    COMMIT = "commit"


def use_of(held: Held, committed: StepNumber, last: Committed | None) -> Use:
    """Of what use ``held`` is to a run whose state is of step ``committed``; ``last`` is how the run committed that step."""
    if committed == 0 or not held.names:
        return Use.NONE
    if held.step == committed:
        return Use.KEEP
    if last is None or (held.reported_step, last.step) != (committed, committed):
        return Use.NONE
    return Use.COMMIT if held.generation == last.generation else Use.NONE


class Present(Protocol):
    """Who is here."""

    def is_present(self, peer: PeerId) -> bool: ...


class Returning:
    """Whose return a restarted run waits for before its first plan, until ``deadline``."""

    def __init__(self, peers: tuple[PeerId, ...] = (), deadline: float = float("-inf")) -> None:
        self._peers = peers
        self._deadline = deadline

    def away(self, present: Present, now: float) -> tuple[PeerId, ...]:
        """Those that are still waited for."""
        return tuple(peer for peer in self._peers if not present.is_present(peer)) if now < self._deadline else ()
