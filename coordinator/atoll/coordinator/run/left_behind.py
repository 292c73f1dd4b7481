"""What the run has just gone back from: as long as nobody has been told to drop it, whoever comes back with what was missing
makes going back unnecessary. A part of the state machine; pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.coordinator.run.resuming import Committed, Held, Use, use_of
from atoll.coordinator.run.snapshots import Moment
from atoll.protocol.ids import Generation, PeerId


@dataclass(slots=True, kw_only=True)
class LeftBehind:
    """The ``moment`` at which the run stood, and who still ``held`` what of it in memory. ``line_since`` and ``went_back`` are
    the run's own, as they were."""

    moment: Moment
    line_since: Generation
    went_back: bool
    held: dict[PeerId, frozenset[str]] = field(default_factory=dict)

    def use_of(self, held: Held, last: Committed | None) -> Use:
        """Of what use it is that a peer comes back with this."""
        if held.generation <= self.line_since and self.line_since != 0:
            return Use.NONE
        return use_of(held, self.moment.step, last)

    def add(self, peer: PeerId, names: frozenset[str]) -> None:
        """The peer is here, and has these."""
        self.held[peer] = self.held.get(peer, frozenset()) | names

    def forget(self, peer: PeerId) -> None:
        """The peer is gone."""
        self.held.pop(peer, None)

    def covers(self, essential: frozenset[str]) -> bool:
        """Whether all that training changes is here again."""
        return bool(essential) and essential <= frozenset().union(*self.held.values())
