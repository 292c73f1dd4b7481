"""Counts connections whose other end did not come through the TLS handshake, so that they are told of. Pure but for a lock.

gRPC says nothing of them. It asks for the server's certificate when a handshake begins, and the guard sees each first call; who
has not called long after its handshake began was turned away, or says nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque

WAIT_SECONDS = 20.0
"""From the beginning of a handshake to the first call of whoever belongs; twice what a handshake may take."""
REPORT_SECONDS = 60.0
_MOST_KNOWN = 4096


class HandshakeWatch:
    """``began`` is called on gRPC's threads, the rest on the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: deque[float] = deque()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._reported = -REPORT_SECONDS

    def began(self, now: float) -> None:
        """Somebody has connected."""
        with self._lock:
            self._begun.append(now)

    def spoke(self, address: str, now: float) -> None:
        """A call came from there; the first one shows that the handshake was completed."""
        if address in self._known:
            return
        self._known[address] = None
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        with self._lock:
            if self._begun:
                self._begun.popleft()

    def report(self, now: float) -> str | None:
        """What there is to be told, at most once a minute."""
        if now - self._reported < REPORT_SECONDS:
            return None
        count = 0
        with self._lock:
            while self._begun and now - self._begun[0] > WAIT_SECONDS:
                self._begun.popleft()
                count += 1
        if not count:
            return None
        self._reported = now
        what = "1 connection was" if count == 1 else f"{count} connections were"
        return (
            f"{what} turned away: without a certificate that this run has issued and that is valid now, or without a word; "
            "`atoll invite` prints what a peer needs"
        )
