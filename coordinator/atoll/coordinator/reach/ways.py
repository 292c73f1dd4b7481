"""How two peers come to have a connection: which of them dials, or that neither can. Pure.

What a probe between the two has found counts most; else whether the coordinator could dial a peer. Where neither of two can be
dialled by the other, whoever would dial does so through the coordinator."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from atoll.protocol.ids import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """``dialler`` dials the other one at ``address``; ``relayed``: through the coordinator, and there is no address."""

    dialler: PeerId
    address: str = ""
    relayed: bool = False


class Ways:
    """``addresses`` are those that peers advertise, empty for one that accepts no connection; ``outbound_only`` those whom the
    coordinator could not dial. ``dialled`` says of (dialler, dialled) how a probe's attempt ended."""

    def __init__(
        self,
        addresses: Mapping[PeerId, str],
        outbound_only: Container[PeerId] = frozenset(),
        dialled: Mapping[tuple[PeerId, PeerId], bool] | None = None,
    ) -> None:
        self._addresses = addresses
        self._outbound_only = outbound_only
        self._dialled = dialled or {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._addresses

    def can_dial(self, dialler: PeerId, other: PeerId) -> bool:
        """Whether one peer can open a connection to another, as far as is known."""
        if not self._addresses[other]:
            return False
        return self._dialled.get((dialler, other), other not in self._outbound_only)

    def to(self, dialler: PeerId, other: PeerId) -> Way:
        """How ``dialler`` reaches the other one, where it must be the one that dials."""
        if self.can_dial(dialler, other):
            return Way(dialler=dialler, address=self._addresses[other])
        return Way(dialler=dialler, relayed=True)

    def between(self, first: PeerId, second: PeerId) -> Way:
        """The way between two that may both dial: the first one does if it can, directly or not."""
        if not self.can_dial(first, second) and self.can_dial(second, first):
            return self.to(second, first)
        return self.to(first, second)
