"""How fast a link is, by the traffic that it carries anyway. Pure; clocks are handed in.

Theory. A *period* lasts from the first chunk of a message, on a link with nothing under way, until all that was sent is
acknowledged; a long one is cut every second. Its bytes over its seconds, less one round trip (what is sent takes half of one to
arrive, and its acknowledgement the other half), is a sample of what the link can do. While the link is saturated that is its
rate. Else it still is the rate at which the bytes of a transfer came through, from the first to the last, waiting for nothing
else, slow start and the receiver's delays included: a lower bound of the rate, and what a transfer of this size will see again.
Samples fade as more follow, weighted by their seconds. Very small periods tell nothing and are left out.
"""

from __future__ import annotations

from atoll.protocol.messages import MessageKey

_CUT_SECONDS = 1.0
_FEWEST_BYTES = 64 * 1024
_SHORTEST_SECONDS = 0.0005
"""Within one event loop's turn an acknowledgement can come at any moment."""
_SHARE_OF_TRIP = 0.1
"""Round trips differ by this much, so nothing is seen to be shorter."""
_KEPT = 0.8
"""What of the earlier samples remains when another one comes."""


class LinkTraffic:
    """For all that is sent to one neighbour."""

    def __init__(self) -> None:
        self._under_way: dict[MessageKey, int] = {}
        self._began = 0.0
        self._trips = 0
        self._acknowledged = 0
        self._bytes = self._seconds = 0.0
        self.round_trip_seconds: float | None = None

    @property
    def bytes_per_second(self) -> float | None:
        """What the link has lately shown; None before it has shown anything."""
        return self._bytes / self._seconds if self._seconds else None

    def echoed(self, seconds: float) -> None:
        """A sign of life took so long to be answered."""
        if self.round_trip_seconds is None or seconds < self.round_trip_seconds:
            self.round_trip_seconds = seconds

    def began(self, key: MessageKey, num_bytes: int, now: float) -> None:
        """The first frame of a message is being sent; ignored for one that is under way."""
        if not self._under_way:
            self._open(now, trips=1)
        self._under_way.setdefault(key, num_bytes)

    def acknowledged(self, key: MessageKey, now: float) -> None:
        """The neighbour has a message."""
        self._acknowledged += self._under_way.pop(key, 0)
        if not self._under_way or now - self._began >= _CUT_SECONDS:
            self._sample(now - self._began)
            self._open(now, trips=0)

    def dropped(self, key: MessageKey, now: float) -> None:
        """A message will not be acknowledged; what it did to the period is unknown, so another one begins."""
        if self._under_way.pop(key, None) is not None:
            self._open(now, trips=0)

    def _open(self, now: float, trips: int) -> None:
        self._began, self._trips, self._acknowledged = now, trips, 0

    def _sample(self, seconds: float) -> None:
        if self._acknowledged < _FEWEST_BYTES:
            return
        trip = self.round_trip_seconds or 0.0
        seconds = max(seconds - self._trips * trip, _SHARE_OF_TRIP * trip, _SHORTEST_SECONDS)
        self._bytes = _KEPT * self._bytes + self._acknowledged
        self._seconds = _KEPT * self._seconds + seconds
