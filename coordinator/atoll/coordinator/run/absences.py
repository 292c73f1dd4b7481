"""How long peers stay away that were only out of reach, and whether it pays to wait for one of them. A part of the state
machine; pure.

A peer of which nothing was heard may be behind a line that is down, with all that it holds in memory. A run that does not wait
for it does steps again; one that waits loses that time if the peer does not come. What was seen of absences in this run, beside
a few that are expected of any, says how likely a return is, and by when: the wait with the least expected loss is chosen, none
where that is best. As time passes only longer absences are left to hope for, and the answer stays the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.protocol.ids import PeerId

REMEMBERED = 50
"""Absences that count; of a run over weeks the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatienceSettings:
    """``expected_seconds`` are absences as good as seen before the first: a line that blinks, a router that starts again, a
    longer trouble, and two peers that never return. An absence is allowed to last ``margin`` times longer than one that was
    seen. Nobody is waited for longer than ``longest_seconds``."""

    expected_seconds: tuple[float, ...] = (15.0, 60.0, 240.0, math.inf, math.inf)
    margin: float = 1.25
    longest_seconds: float = 600.0


class Absences:
    """Told of peers that are out of reach and of those that come back."""

    def __init__(self, settings: PatienceSettings) -> None:
        self._settings = settings
        self._since: dict[PeerId, float] = {}
        self._seen: deque[float] = deque(maxlen=REMEMBERED)

    def gone(self, peer: PeerId, now: float) -> None:
        """The peer is out of reach, with what it holds."""
        self._since[peer] = now

    def back(self, peer: PeerId, now: float, *, with_state: bool) -> None:
        """The peer is here again; not ``with_state``: as a new process, so that what it held never came back."""
        since = self._since.pop(peer, None)
        if since is not None:
            self._seen.append(now - since if with_state else math.inf)

    def seconds(self, now: float) -> tuple[float, ...]:
        """How long absences lasted, endless ones included."""
        never = sum(now - since > self._settings.longest_seconds for since in self._since.values())
        return (*self._settings.expected_seconds, *self._seen, *([math.inf] * never))

    def patience_seconds(self, gone_seconds: float, saved_seconds: float, now: float) -> float:
        """For how long from now to wait for somebody who is away for ``gone_seconds`` and saves ``saved_seconds``."""
        return patience_seconds(self.seconds(now), gone_seconds, saved_seconds, self._settings)


def patience_seconds(absences: Sequence[float], gone_seconds: float, saved_seconds: float, settings: PatienceSettings) -> float:
    """The wait that is expected to lose least, 0 where none pays, if whoever is away for ``gone_seconds`` stays away as long as
    one of ``absences`` that are longer, each as likely as the other, and saves ``saved_seconds`` by coming."""
    waits = [settings.margin * seconds - gone_seconds for seconds in absences]
    waits = [seconds for seconds in waits if seconds > 0.0]

    def gained(limit: float) -> float:
        return sum(saved_seconds - seconds if seconds <= limit else -limit for seconds in waits)

    left = settings.longest_seconds - gone_seconds
    best = max((seconds for seconds in sorted(waits) if seconds <= left), key=gained, default=0.0)
    return best if gained(best) > 0.0 else 0.0
