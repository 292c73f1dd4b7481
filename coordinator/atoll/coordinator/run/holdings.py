"""Who holds the state of which parameters and buffers in memory, as of the committed step at which the run stands. A
part of the state machine; pure.

After a commit each stage's peer holds what its stage names, and nobody anything else. When a plan ends, its peers keep what
they hold, and a peer that is ready under the next plan holds that stage's names as well; so for a while a name may have
several holders. Before the first commit nobody holds anything that could not be made anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from atoll.protocol.ids import PeerId


class Holdings:
    """By peer. ``essential`` are the names that training changes: where one of them is lost, what was learned is."""

    def __init__(self) -> None:
        self.essential: frozenset[str] = frozenset()
        self._names: dict[PeerId, frozenset[str]] = {}
        self._learned = False

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Who holds anything."""
        return tuple(self._names)

    def names_of(self, peer: PeerId) -> frozenset[str]:
        return self._names.get(peer, frozenset())

    def replace(self, holders: Mapping[PeerId, frozenset[str]]) -> None:
        """A step is committed: these peers hold these names as of it, and what is of the step before counts no more."""
        self._names = dict(holders)
        self._learned = True

    def add(self, peer: PeerId, names: Iterable[str]) -> None:
        """The peer has these as well."""
        self._names[peer] = self.names_of(peer) | frozenset(names)

    def keep_only(self, peer: PeerId, names: frozenset[str]) -> None:
        """The peer has dropped everything else."""
        if peer in self._names:
            self._names[peer] &= names

    def forget(self, peer: PeerId) -> None:
        """The peer is gone, and what it held with it."""
        self._names.pop(peer, None)

    def clear(self, *, learned: bool) -> None:
        """The run goes on from state that is on disks at most; unless ``learned`` from first values, which need no holder."""
        self._names = {}
        self._learned = learned

    def uncovered(self, without: PeerId | None = None) -> tuple[str, ...]:
        """The essential names that nobody holds, not counting one peer; none before the first commit."""
        if not self._learned:
            return ()
        return tuple(sorted(self.essential.difference(*(names for peer, names in self._names.items() if peer != without))))

    def holders(self) -> dict[str, tuple[PeerId, ...]]:
        """For each name, who holds it."""
        found: dict[str, list[PeerId]] = {}
        for peer, names in self._names.items():
            for name in names:
                found.setdefault(name, []).append(peer)
        return {name: tuple(peers) for name, peers in found.items()}
