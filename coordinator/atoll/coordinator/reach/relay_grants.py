"""Who may meet whom at the relay: those whom the plan has exchange something that way, and others for a while. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from atoll.protocol.ids import PeerId

Pair: TypeAlias = frozenset[PeerId]
"""Both ends, in no order."""


class RelayGrants:
    """The clock is handed in."""

    def __init__(self) -> None:
        self._planned: frozenset[Pair] = frozenset()
        self._until: dict[Pair, float] = {}

    def planned(self, pairs: Iterable[Pair]) -> None:
        """The plan has these exchange something, and no others."""
        self._planned = frozenset(pairs)

    def allow(self, one: PeerId, other: PeerId, until: float) -> None:
        """These two may meet beside the plan, until then."""
        pair = frozenset((one, other))
        self._until[pair] = max(until, self._until.get(pair, until))

    def refusal(self, source: PeerId, target: PeerId, now: float) -> str | None:
        """Why these two may not meet; None when they may."""
        self._until = {pair: until for pair, until in self._until.items() if until > now}
        pair = frozenset((source, target))
        if pair in self._planned or pair in self._until:
            return None
        return f"the plan has nothing go from {source[:80]!r} to {target[:80]!r} through this relay"
