"""Who is measured while nothing depends on it: a peer that joins while the run trains, so that it can take over a stage at once
when it is needed. A part of the state machine; pure."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.coordinator.run.context import RunContext
from atoll.coordinator.run.instructions import SurveyPeers
from atoll.protocol.ids import PeerId


class Surveying:
    """Told of everything that has peers measured: plans and looks do, too."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._asked: frozenset[PeerId] = frozenset()

    def asked(self, peers: Iterable[PeerId]) -> None:
        """All of these are measured, or about to be."""
        self._asked |= frozenset(peers)

    def forget(self, peer: PeerId) -> None:
        """The peer is gone; whoever comes under its name is measured anew."""
        self._asked -= {peer}

    def consider(self) -> None:
        """Have newcomers measured, unless the run is about to make up for a loss, which comes first."""
        offers = self._context.roster.offers()
        present = frozenset(offer.name for offer in offers)
        if not present <= self._asked and not self._context.recovering:
            self._asked |= present
            self._context.emit(SurveyPeers(peers=offers))
