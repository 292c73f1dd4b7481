"""How often somebody may call, and how much at once: pure, the clock is handed in.

Who belongs has few calls open and begins few: a session, transfers of state, one link to each neighbour, probes. The limits are
far above that, and below what would keep a process from its work.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

CALLS_AT_ONCE = 64
"""Of one caller. A borrower of state calls once a donor, a neighbour once."""
CALLS_PER_SECOND = 50.0
BURST = 200.0
_MOST_CALLERS = 4096


@dataclass(slots=True)
class _Account:
    allowance: float
    seen: float
    open: int = 0


class CallLimits:
    """Accounts of callers, by whatever names them."""

    def __init__(self, at_once: int = CALLS_AT_ONCE, per_second: float = CALLS_PER_SECOND, burst: float = BURST) -> None:
        self._at_once = at_once
        self._per_second = per_second
        self._burst = burst
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def begin(self, caller: str, now: float) -> str | None:
        """Counts a call in, to be counted out by :meth:`end`; or says why it is refused, and counts nothing."""
        account = self._account(caller, now)
        if account.open >= self._at_once:
            return f"{caller} has {account.open} calls open, more than that are not served"
        if account.allowance < 1.0:
            return f"{caller} calls more than {self._per_second:g} times a second; slow down"
        account.allowance -= 1.0
        account.open += 1
        return None

    def end(self, caller: str) -> None:
        """A call that was counted in is over."""
        if caller in self._accounts:
            self._accounts[caller].open -= 1

    def _account(self, caller: str, now: float) -> _Account:
        account = self._accounts.get(caller)
        if account is None:
            self._make_room()
            account = self._accounts[caller] = _Account(allowance=self._burst, seen=now)
        self._accounts.move_to_end(caller)
        account.allowance = min(self._burst, account.allowance + (now - account.seen) * self._per_second)
        account.seen = now
        return account

    def _make_room(self) -> None:
        """Forgets whoever has called least lately and has nothing open."""
        if len(self._accounts) >= _MOST_CALLERS:
            idle = next((name for name, account in self._accounts.items() if not account.open), None)
            if idle is not None:
                del self._accounts[idle]
