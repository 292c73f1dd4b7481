"""What others may ask this peer for beside what its plan says: the coordinator names who, what for and how long.

A permit and the request that it is for travel on different ways, so whoever asks is kept waiting for a moment.
"""

from __future__ import annotations

import asyncio
import time

from atoll.protocol.ids import PeerId
from atoll.protocol.v1 import session_pb2

WAIT_SECONDS = 5.0
"""By how much a request may be earlier than its permit."""
LONGEST_SECONDS = 3600.0
_MOST = 1024


class Permits:
    """On the event loop. ``required`` False: nobody shows who they are, and everybody may."""

    def __init__(self, *, required: bool = True) -> None:
        self.required = required
        self._until: dict[tuple[str, int, int], float] = {}
        self._changed = asyncio.Event()

    def grant(self, permit: session_pb2.Permit) -> None:
        """From now on, for as long as it says."""
        now = time.monotonic()
        self._until = {key: until for key, until in self._until.items() if until > now}
        if len(self._until) < _MOST:
            seconds = min(max(0.0, permit.seconds), LONGEST_SECONDS)
            key = (permit.peer, int(permit.purpose), permit.step)
            self._until[key] = max(self._until.get(key, 0.0), now + seconds)
        self._changed.set()
        self._changed = asyncio.Event()

    async def refusal(self, peer: str, purpose: int, step: int = 0) -> str | None:
        """Why ``peer`` may not, after a while in which a permit may come; None when it may."""
        if not self.required:
            return None
        key, deadline = (peer, purpose, step), time.monotonic() + WAIT_SECONDS
        while self._until.get(key, 0.0) <= time.monotonic():
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
            except TimeoutError:
                what = "a copy of a snapshot" if purpose == session_pb2.Permit.PERMIT_COPY else "a probe"
                return f"the coordinator has not asked {PeerId(peer)} for {what} from here"
        return None
