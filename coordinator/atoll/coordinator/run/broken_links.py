"""Links between two peers that both stay in the run: which of them faulted, and which are not counted on for a while. A part of
the state machine; pure.

The first faults of a pair only void the step, which begins again, for most come from a moment's trouble. After ``faults`` of
them within ``window_seconds`` the pair counts as broken: plans keep these two from being neighbours until some time has passed,
longer each time, or a probe shows the link. Where no plan does without it, the run pauses and tries again, later each time.
A commit says that things go well again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from atoll.protocol.ids import PeerId

Pair: TypeAlias = frozenset[PeerId]
"""Both ends of a link, in no order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenLinkSettings:
    """``forget_seconds`` is for how long a pair is avoided the first time, twice that the next time, and so on; so are
    ``pause_seconds``, between two looks whether the run can go on."""

    faults: int = 2
    window_seconds: float = 600.0
    forget_seconds: float = 120.0
    longest_forget_seconds: float = 3600.0
    pause_seconds: float = 2.0
    longest_pause_seconds: float = 60.0


@dataclass(slots=True)
class _Record:
    faults: list[float] = field(default_factory=list)
    broken_until: float = float("-inf")
    times_broken: int = 0


class BrokenLinks:
    """By pair; the clock is handed in. ``trouble_since`` is when the first link failed since the last commit."""

    def __init__(self, settings: BrokenLinkSettings) -> None:
        self._settings = settings
        self._records: dict[Pair, _Record] = {}
        self._pauses = 0
        self.trouble_since: float | None = None

    def faulted(self, one: PeerId, other: PeerId, now: float) -> bool:
        """The link between two peers failed; True when it counts as broken from now on."""
        settings = self._settings
        if self.trouble_since is None:
            self.trouble_since = now
        record = self._records.setdefault(frozenset((one, other)), _Record())
        record.faults = [when for when in record.faults if now - when <= settings.window_seconds] + [now]
        if len(record.faults) < settings.faults:
            return False
        seconds = min(settings.forget_seconds * 2.0**record.times_broken, settings.longest_forget_seconds)
        record.broken_until = now + seconds
        record.times_broken += 1
        return True

    def broken(self, now: float) -> frozenset[Pair]:
        """The pairs that must not be neighbours."""
        return frozenset(pair for pair, record in self._records.items() if record.broken_until > now)

    def next_pause_seconds(self) -> float:
        """How long to wait before looking again whether the run can go on; grows until the next commit."""
        self._pauses += 1
        settings = self._settings
        return float(min(settings.pause_seconds * 2.0 ** (self._pauses - 1), settings.longest_pause_seconds))

    def shown(self, pairs: Iterable[Pair]) -> None:
        """Probes have found these links in order. One more fault breaks such a pair again."""
        for pair in pairs:
            if (record := self._records.get(pair)) is not None:
                record.broken_until = float("-inf")
                del record.faults[: -(self._settings.faults - 1) or None]

    def committed(self) -> None:
        """A step was committed."""
        self.trouble_since = None
        self._pauses = 0

    def forget(self, peer: PeerId) -> None:
        """The peer is gone: whoever comes under its name has links of its own."""
        self._records = {pair: record for pair, record in self._records.items() if peer not in pair}
