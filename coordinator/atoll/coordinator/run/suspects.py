"""Peers that keep a run from going on although they are here: what they send arrives damaged or cannot be true, or they never
come to an end. A part of the state machine; pure."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from atoll.protocol.ids import PeerId

MOST = 2
"""Once may be chance. Before a peer is accused of a damaged message it has sent that one several times already."""


class Offence(StrEnum):
    """What a peer did, for a sentence that begins with "it"."""

    DAMAGED = "sends messages that arrive damaged, again and again"
    OUTLIER = "sends values that are far from all before, again and again"
    STUCK = "does not come to the end of its steps"


class Suspects:
    """Counts offences by peer; being stuck counts only when it is in a row, damaged messages do for good."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[PeerId, Offence]] = Counter()

    def offended(self, peer: PeerId, offence: Offence) -> bool:
        """True when the peer is not to be planned with any more."""
        self._counts[peer, offence] += 1
        return self._counts[peer, offence] >= MOST

    def committed(self) -> None:
        """A step was committed: nobody is stuck."""
        for peer, offence in list(self._counts):
            if offence is Offence.STUCK:
                del self._counts[peer, offence]

    def forget(self, peer: PeerId) -> None:
        """The peer is gone."""
        for offence in Offence:
            self._counts.pop((peer, offence), None)
