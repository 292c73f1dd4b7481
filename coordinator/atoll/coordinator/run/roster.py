"""Who takes part in the run and as what, as the state machine sees it. Pure; sessions and leases are ``membership``'s."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from atoll.coordinator.events import PeerEvent
from atoll.coordinator.planning.plan import Plan
from atoll.coordinator.planning.segments import PeerOffer, natural_order
from atoll.protocol.ids import PeerId

REMEMBERED_GONE = 32


class PeerState(StrEnum):
    """A peer's part in the run; the words are those of the ``peer`` event."""

    JOINED = "joined"
    LOADING = "loading"
    READY = "ready"
    SPARE = "spare"
    LEFT = "left"
    LOST = "lost"

    @property
    def present(self) -> bool:
        return self not in (PeerState.LEFT, PeerState.LOST)


@dataclass(slots=True)
class RosterEntry:
    """One peer; ``reason`` says why it is in that state, where there is something to say. ``phase`` and ``waiting_for`` are
    what it last said about itself, ``shortages`` is how often it ran out of memory. ``left_out`` says why it is not planned
    with although it is here, ``leaving`` that it is about to go."""

    offer: PeerOffer
    state: PeerState = PeerState.JOINED
    reason: str = ""
    phase: str = ""
    waiting_for: PeerId | None = None
    shortages: int = 0
    left_out: str = ""
    leaving: bool = False


class Roster:
    """The peers by name. Changes return the events to announce."""

    def __init__(self) -> None:
        self._entries: dict[PeerId, RosterEntry] = {}

    def __getitem__(self, peer: PeerId) -> RosterEntry:
        return self._entries[peer]

    def __iter__(self) -> Iterator[tuple[PeerId, RosterEntry]]:
        return iter(self._entries.items())

    def is_present(self, peer: PeerId) -> bool:
        entry = self._entries.get(peer)
        return entry is not None and entry.state.present

    def is_available(self, peer: PeerId) -> bool:
        """Whether it is here and may be planned with, as a stage's peer or a spare."""
        return self.is_present(peer) and not self._entries[peer].left_out

    def is_leaving(self, peer: PeerId) -> bool:
        return self.is_present(peer) and self._entries[peer].leaving

    def leave_out(self, peer: PeerId, reason: str, *, leaving: bool = False) -> list[PeerEvent]:
        """The peer is not planned with from now on, until it joins anew."""
        entry = self._entries[peer]
        entry.left_out, entry.leaving = reason, leaving
        return self.change(peer, entry.state, reason)

    def offers(self) -> tuple[PeerOffer, ...]:
        """What the peers that may be planned with offer, in the order of their names, so that it does not matter who was
        quicker to join."""
        present = [entry.offer for entry in self._entries.values() if entry.state.present and not entry.left_out]
        return tuple(sorted(present, key=lambda offer: natural_order(offer.name)))

    def join(self, offer: PeerOffer, state: PeerState) -> list[PeerEvent]:
        """A peer has joined; one of that name that was here before is gone."""
        assert not self.is_present(offer.name), f"{offer.name} joined twice"
        self._entries.pop(offer.name, None)
        self._entries[offer.name] = RosterEntry(offer=offer)
        events = [PeerEvent(name=offer.name, state=PeerState.JOINED)]
        if state is not PeerState.JOINED:
            events += self.change(offer.name, state, "the run goes on with the peers it has")
        return events

    def change(self, peer: PeerId, state: PeerState, reason: str = "") -> list[PeerEvent]:
        entry = self._entries[peer]
        entry.state, entry.reason = state, reason
        return [PeerEvent(name=peer, state=state, reason=reason)]

    def remove(self, peer: PeerId, reason: str, *, left: bool) -> list[PeerEvent]:
        """The peer is gone; it is remembered for a while, so that status can tell."""
        events = self.change(peer, PeerState.LEFT if left else PeerState.LOST, reason)
        gone = [name for name, entry in self._entries.items() if not entry.state.present]
        for name in gone[:-REMEMBERED_GONE]:
            del self._entries[name]
        return events

    def lower_memory(self, peer: PeerId, num_bytes: int, most: int) -> int:
        """The peer ran out of memory: it is planned with this much at most, and with nothing after ``most`` such times. Returns
        what it is planned with."""
        entry = self._entries[peer]
        entry.shortages += 1
        lowered = min(num_bytes, entry.offer.memory_bytes) if entry.shortages < most else 0
        entry.offer = replace(entry.offer, memory_bytes=lowered)
        return lowered

    def progressed(self, peer: PeerId, phase: str, waiting_for: PeerId | None) -> None:
        if self.is_present(peer):
            self._entries[peer].phase, self._entries[peer].waiting_for = phase, waiting_for

    def phase(self, peer: PeerId) -> str:
        """What the peer last said it does; empty when it said nothing."""
        return self._entries[peer].phase if peer in self._entries else ""

    def waiting_for(self, peer: PeerId) -> PeerId | None:
        return self._entries[peer].waiting_for if peer in self._entries else None

    def assign(self, plan: Plan) -> list[PeerEvent]:
        """The plan's peers load, the others are spares."""
        events, reasons = [], dict(plan.why_spare)
        for name, entry in self._entries.items():
            if entry.state.present:
                state = PeerState.LOADING if name in plan.peers else PeerState.SPARE
                events += self.change(name, state, entry.left_out or reasons.get(name, ""))
        return events

    def release(self) -> None:
        """No plan holds any more: whoever is here may be planned with."""
        for entry in self._entries.values():
            if entry.state.present:
                entry.state, entry.reason = PeerState.JOINED, entry.left_out
