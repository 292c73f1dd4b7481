"""How long the run waits in each state before it gives up, and how the limit of a step follows the steps seen. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

REMEMBERED_STEPS = 20
STEP_FACTOR = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Limits in seconds. ``waiting`` is how long a run that cannot go on waits for peers, or for a link between them, which
    may come the next day; ``settle`` how long nobody must have joined before a plan is made, so that peers that come together
    are placed together; ``returning`` how long a restarted coordinator waits for the peers of its last plan, which look for it
    every few seconds; ``stored`` how long a peer may be silent while it sends its state, ``snapshot`` how long nothing may
    come of one, ``keeping`` how long a run that is over waits for its last snapshot to be in the store."""

    waiting_seconds: float = 24 * 3600.0
    settle_seconds: float = 1.0
    returning_seconds: float = 30.0
    planning_seconds: float = 300.0
    loading_seconds: float = 600.0
    step_seconds: float = 60.0
    longest_step_seconds: float = 3600.0
    voiding_seconds: float = 60.0
    stored_seconds: float = 120.0
    snapshot_seconds: float = 600.0
    keeping_seconds: float = 1800.0


class StepTimer:
    """The deadline of a step: 20 times the median of the last steps, or of the prediction before there is one."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._seconds: deque[float] = deque(maxlen=REMEMBERED_STEPS)

    def observe(self, seconds: float) -> None:
        self._seconds.append(seconds)

    @property
    def usual(self) -> float:
        """What a step takes, 0 before there is one."""
        return statistics.median(self._seconds) if self._seconds else 0.0

    def limit(self, predicted_seconds: float) -> float:
        """Seconds that a step may take."""
        longest = STEP_FACTOR * (self.usual if self._seconds else predicted_seconds)
        return min(max(self._deadlines.step_seconds, longest), self._deadlines.longest_step_seconds)
