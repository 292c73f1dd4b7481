"""What the loss of state leads to: the run goes on, waits for a moment, or goes back. Pure.

As long as everything that training changes is somewhere, in memory or on a disk, as of the step at which the run stands,
nothing is lost. Else the run goes back to the newest snapshot that is complete among the peers that are here, and before the
first one to the first values, which can always be made anew. Nobody is waited for who has a later snapshot on its disk: the
run does steps again meanwhile, and leaves for that snapshot the moment it is complete. But what peers hold in memory is dropped
when a run goes back; where somebody may come back with it, it can pay to wait first (``absences``).

A run that began at a snapshot in a store has no first values: where nothing is left to go back to, it waits for those who
have a snapshot on their disks, as long as it pauses for anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from atoll.coordinator.run.snapshots import FIRST_VALUES, Moment, Snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class GoOn:
    """Nothing is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Somebody may come back with what is missing: wait until then, and go to ``otherwise``. None: there is nothing else."""

    until: float
    otherwise: Moment | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GoTo:
    """Load the state of another moment: an earlier one, or a later one while the run does steps again."""

    moment: Moment


Decision: TypeAlias = GoOn | Wait | GoTo


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """``stands`` is where the run stands, ``covered`` whether everything of that is with somebody who is here. It ``began`` at
    that step. ``patience_seconds(saved)`` is how long it pays to wait for what is missing, if that saves so many seconds; 0
    where nobody can come back with it."""

    stands: Moment
    covered: bool
    began: int
    step_seconds: float
    patience_seconds: Callable[[float], float]


def decide(situation: Situation, snapshots: Snapshots, now: float) -> Decision:
    """What to do before the next plan is made."""
    newest = snapshots.newest_complete() or FIRST_VALUES
    if situation.covered:
        # Only a run that does steps again can find a snapshot that is ahead of it.
        return GoTo(moment=newest) if newest.step > situation.stands.step else GoOn()
    if newest.step < situation.began:
        hoped = snapshots.newest_complete(also_away=True)
        possible = hoped is not None and hoped.step >= situation.began
        return Wait(until=math.inf, otherwise=None) if possible else GoTo(moment=newest)
    saved = (situation.stands.step - newest.step) * situation.step_seconds
    patience = situation.patience_seconds(saved)
    return Wait(until=now + patience, otherwise=newest) if patience > 0.0 else GoTo(moment=newest)
