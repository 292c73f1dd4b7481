"""How a peer that lost its coordinator looks for it: how often, how loudly, and how long. Pure; the clock is handed in.

The pauses double up to a bound, and each is drawn at random from the upper half of what it could be, so that the peers of a
coordinator that begins again do not all come in the same moment. A coordinator that takes a peer in and loses it again at once
does not begin anew: the pauses go on where they were.
"""

from __future__ import annotations

from atoll.peer.settings import Patience

SETTLED_SECONDS = 30.0
"""A session that lasted that long was a good one."""


class Returning:
    """Told when the connection is ``lost`` and when the coordinator has ``welcomed`` the peer."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._num_pauses = 0
        self._lost: float | None = None
        self._welcomed = float("-inf")
        self._logged = float("-inf")
        self._kept = False

    def lost(self, now: float) -> None:
        """The connection is gone; a second time before a welcome changes nothing."""
        if self._lost is None:
            self._lost = now
            self._logged = float("-inf")
            if now - self._welcomed >= SETTLED_SECONDS:
                self._num_pauses = 0

    def welcomed(self, now: float) -> None:
        """The peer is back."""
        self._kept = False
        self._lost, self._welcomed = None, now

    def pause_seconds(self, draw: float) -> float:
        """How long to wait before the next attempt; ``draw`` is random, from 0 to 1."""
        patience = self._patience
        longest = min(patience.longest_pause, patience.first_pause * 2.0**self._num_pauses)
        if longest < patience.longest_pause:
            self._num_pauses += 1
        return longest * (0.5 + 0.5 * draw)

    def away_seconds(self, now: float) -> float:
        """For how long the peer has been alone."""
        return 0.0 if self._lost is None else now - self._lost

    def is_to_log(self, now: float) -> bool:
        """Whether people should hear again that the peer is alone."""
        due = now - self._logged >= self._patience.between_logs
        if due:
            self._logged = now
        return due

    def is_to_keep(self, now: float) -> bool:
        """Whether the state should be written to the disk now; once each time that the peer is alone."""
        due = not self._kept and self.away_seconds(now) >= self._patience.keep
        self._kept = self._kept or due
        return due

    def is_over(self, now: float) -> bool:
        """Whether the peer has been alone for too long."""
        return self.away_seconds(now) >= self._patience.end
