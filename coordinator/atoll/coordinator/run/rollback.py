"""What the loss of state leads to: the run goes on, waits for a moment, or goes back. Pure.

As long as everything that training changes is somewhere, in memory or on a disk, as of the step at which the run stands,
nothing is lost. Else the run goes back to the newest snapshot that is complete among the peers that are here, and before the
first one to the first values, which can always be made anew. Where that would cost much, and somebody may come back with what
is missing, it pays to wait for a while: never longer than a part of what going back costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from atoll.coordinator.run.snapshots import FIRST_VALUES, Moment, Snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class PatienceSettings:
    """Going back costs ``worth_waiting_seconds`` of training or more: the run waits for ``share`` of that first, but for no
    longer than ``longest_seconds``."""

    worth_waiting_seconds: float = 60.0
    share: float = 0.25
    longest_seconds: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GoOn:
    """Nothing is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Somebody may come back with what is missing: wait until then."""

    until: float
    otherwise: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class GoTo:
    """Load the state of another moment: an earlier one, or a later one while the run does steps again."""

    moment: Moment


Decision: TypeAlias = GoOn | Wait | GoTo


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """``stands`` is where the run stands, ``covered`` whether everything of that is with somebody who is here. ``hoped`` is the
    latest moment that could be gone on from if everybody came back, ``since`` when the wait for that began."""

    stands: Moment
    covered: bool
    hoped: Moment
    since: float
    step_seconds: float


def decide(situation: Situation, snapshots: Snapshots, patience: PatienceSettings, now: float) -> Decision:
    """What to do before the next plan is made."""
    newest = snapshots.newest_complete() or FIRST_VALUES
    if situation.covered:
        # Only a run that does steps again can find a snapshot that is ahead of it.
        return GoTo(moment=newest) if newest.step > situation.stands.step else GoOn()
    until = situation.since + patience_seconds(situation.hoped.step - newest.step, situation.step_seconds, patience)
    return Wait(until=until, otherwise=newest) if now < until else GoTo(moment=newest)


def patience_seconds(num_steps: int, step_seconds: float, patience: PatienceSettings) -> float:
    """How long to wait for somebody whose return saves ``num_steps`` steps from being done again."""
    cost = num_steps * step_seconds
    return 0.0 if cost < patience.worth_waiting_seconds else min(patience.share * cost, patience.longest_seconds)
