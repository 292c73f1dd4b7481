"""Transfers in the background take what training leaves of a line.

Theory of operation. State in the background travels over connections of its own, and TCP shares a line evenly between
connections: a copy would make the gradient beside it take twice as long. Nor can be called back what TCP has. So whoever sends
in the background keeps to a rate, by what links have shown the line to carry: to ``BESIDE`` of that while something of training
is under way, for a copy that never ends is none, and to ``BETWEEN`` while nothing is, so that no queue builds up in front of
the next gradient. Where nothing of training was under way for ``QUIET_SECONDS``, there is nothing to disturb and no limit.
A gradient is delayed by these shares, and by the one chunk that may be on its way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from atoll.protocol.pacing import Pacer

BESIDE = 0.05
BETWEEN = 0.75
"""Rates that links show are lower bounds most of the time, but a line may also have become slower since."""
QUIET_SECONDS = 3.0
"""Longer than the pauses of a step on a slow line, and not felt by a run that moves its state between two steps."""
UNLIMITED = 1e15


class Courtesy(Pacer):
    """For what one peer sends in the background; one pacer among those that ``take_turns`` waits for. Links :meth:`tell` it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(UNLIMITED, clock)
        self._line = math.inf
        self._under_way = False
        self._ended = -math.inf

    @property
    def bytes_per_second(self) -> float:
        """The most that is sent while there is training: chunks should be small enough for it."""
        return min(UNLIMITED, BETWEEN * self._line)

    def tell(self, *, under_way: bool, line_bytes_per_second: float | None) -> None:
        """Whether something of training is under way from here, and what the line was last seen to carry, if it was."""
        if line_bytes_per_second is not None:
            self._line = line_bytes_per_second
        if self._under_way and not under_way:
            self._ended = self._clock()
        self._under_way = under_way
        self._serve()

    def _serve(self) -> None:
        self._limit(self._rate())
        super()._serve()

    def _rate(self) -> float:
        if self._under_way:
            return min(UNLIMITED, BESIDE * self._line)
        if self._clock() - self._ended >= QUIET_SECONDS:
            return UNLIMITED
        return self.bytes_per_second
