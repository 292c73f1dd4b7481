"""Measuring a link: what to send, when enough has arrived, and what that says. Pure; clocks are handed in.

Theory. Rate is measured by whoever receives, from when how much arrived, so nothing that waits in the sender's buffers counts.
Arrivals are divided into slices; the first is never used, for it shows how TCP starts and what a shaper lets through at once.
Three slices in a row that agree are enough; else the later half of what arrived within the limits must do. The sender keeps
little more under way than the link holds, so that a probe leaves no queue behind and ends when it is told to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

NUM_ECHOES = 5
MAX_BYTES = 256 * 2**20
"""The most that one direction may carry, whoever asks."""
MAX_SECONDS = 30.0
"""The longest that a server attends to one probe, whoever asks."""
DIRECTION_SECONDS = 4.0
"""The longest that one direction takes: TCP needs more than a second to fill a gigabit over 100 ms."""
LARGEST_LOAD_BYTES = 256 * 1024
"""The most that is handed over at once."""

_SLICE_SECONDS = 0.1
_SLICE_ARRIVALS = 4
_SLICES = 3
_AGREE = 0.15
_SMALLEST_LOAD_BYTES = 8 * 1024
_LOAD_SECONDS = 0.01
_FIRST_WINDOW_BYTES = 64 * 1024
_LEAST_WINDOW_LOADS = 2
"""One that arrives and one behind it: so the link is never idle."""
_WINDOW_TRIPS = 2.5
"""Round trips' worth of what arrives that may be under way: enough for the window to grow as fast as TCP's own."""
_SHORTEST_TRIP_SECONDS = 0.02
"""Below this, delays within the two processes count for more than the link's."""


@dataclass(frozen=True, slots=True)
class _Slice:
    num_bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.num_bytes / self.seconds


class RateEstimator:
    """For the receiver of one direction. ``now`` is when it began to wait."""

    def __init__(self, now: float, *, max_seconds: float, max_bytes: int, round_trip_seconds: float) -> None:
        self._deadline = now + max_seconds
        self._max_bytes = max_bytes
        self._slice_seconds = max(_SLICE_SECONDS, round_trip_seconds)
        self._slices: list[_Slice] = []
        self._began: float | None = None
        self._open_bytes = self._open_arrivals = 0
        self._latest = now
        self.num_bytes = 0

    def arrived(self, num_bytes: int, now: float) -> None:
        """Something arrived."""
        if num_bytes == 0:
            return
        self.num_bytes += num_bytes
        self._latest = now
        if self._began is None:  # when its first byte arrived is unknown, so it does not count
            self._began = now
            return
        self._open_bytes += num_bytes
        self._open_arrivals += 1
        if now - self._began >= self._slice_seconds and self._open_arrivals >= _SLICE_ARRIVALS:
            self._slices.append(_Slice(self._open_bytes, now - self._began))
            self._began, self._open_bytes, self._open_arrivals = now, 0, 0

    def enough(self, now: float) -> bool:
        """Whether the estimate is stable, or a limit is reached."""
        return self._stable() or now >= self._deadline or self.num_bytes >= self._max_bytes

    def bytes_per_second(self) -> float | None:
        """The estimate; None when too little arrived for one."""
        if self._stable():
            return _rate(self._slices[-_SLICES:])
        whole = list(self._slices)
        if self._began is not None and self._open_bytes and self._latest > self._began:
            whole.append(_Slice(self._open_bytes, self._latest - self._began))
        return _rate(whole[len(whole) // 2 :]) if whole else None

    def _stable(self) -> bool:
        if len(self._slices) <= _SLICES:
            return False
        rates = [one.rate for one in self._slices[-_SLICES:]]
        return max(rates) - min(rates) <= _AGREE * _rate(self._slices[-_SLICES:])


def _rate(slices: Sequence[_Slice]) -> float:
    return sum(one.num_bytes for one in slices) / sum(one.seconds for one in slices)


class LoadSender:
    """For the sender of one direction: how much to send now."""

    def __init__(self, now: float, *, max_seconds: float, max_bytes: int, round_trip_seconds: float) -> None:
        self._deadline = now + max_seconds
        self._max_bytes = max_bytes
        self._trip_seconds = max(round_trip_seconds, _SHORTEST_TRIP_SECONDS)
        self._reports: deque[tuple[float, int]] = deque([(now, 0)])
        self._sent = self._arrived = 0
        self._rate = 0.0
        self._told = False

    def finished(self, now: float) -> bool:
        """Whether nothing more is to be sent."""
        return self._told or now >= self._deadline or self._sent >= self._max_bytes

    def seconds_left(self, now: float) -> float:
        """Until the limit."""
        return self._deadline - now

    def next_bytes(self) -> int:
        """The size of what to send next; 0 while the other end has to take more first."""
        size = int(min(max(self._rate * _LOAD_SECONDS, _SMALLEST_LOAD_BYTES), LARGEST_LOAD_BYTES))
        # On a slow link the first window takes long to arrive, and the end of the load would wait behind each further one.
        least = _FIRST_WINDOW_BYTES if self._arrived < _FIRST_WINDOW_BYTES / 2 else _LEAST_WINDOW_LOADS * size
        window = max(least, _WINDOW_TRIPS * self._rate * self._trip_seconds)
        size = min(size, self._max_bytes - self._sent)
        return size if self._sent + size - self._arrived <= window else 0

    def sent(self, num_bytes: int) -> None:
        """So much was sent."""
        self._sent += num_bytes

    def progressed(self, num_bytes: int, enough: bool, now: float) -> None:
        """The other end says how much has arrived."""
        self._told = self._told or enough
        self._arrived = max(self._arrived, min(num_bytes, self._sent))
        self._reports.append((now, self._arrived))
        while len(self._reports) > 2 and now - self._reports[1][0] >= self._trip_seconds:
            self._reports.popleft()
        began, before = self._reports[0]
        if now > began:
            self._rate = (self._arrived - before) / (now - began)
