"""Copies of what only peers that leave have of the newest complete snapshot. A part of the state machine; pure.

Who leaves has its time to hand over. While others take its layers, they also fetch from its disk those parts of the snapshot
that the run could go back to of which nobody who stays has a copy; it is let go when they have them, or cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from atoll.coordinator.run.context import RunContext
from atoll.coordinator.run.copies import Copy, Keeper, Owned, choose_copies
from atoll.coordinator.run.events import SnapshotCopied
from atoll.coordinator.run.instructions import CopySnapshot
from atoll.coordinator.run.snapshots import THE_STORE, Moment, Part
from atoll.protocol.ids import PeerId


class Rescue:
    """``keepers`` gives who could keep copies of a snapshot, but for those that it is given."""

    def __init__(self, context: RunContext, keepers: Callable[[Moment, set[PeerId]], list[Keeper]]) -> None:
        self._context = context
        self._keepers = keepers
        self._moment: Moment | None = None
        self._copying: dict[PeerId, Copy] = {}
        self._failed: set[PeerId] = set()

    def copies_from(self, peer: PeerId) -> bool:
        """Whether something is being fetched from its disk because it leaves."""
        return any(copy.source == peer for copy in self._copying.values())

    def settle(self, leavers: Iterable[PeerId], on_their_way: Iterable[Copy]) -> None:
        """After every event: have copied what is missing with those who stay, and is not ``on_their_way`` to them."""
        moment = self._context.snapshots.newest_complete()
        if moment != self._moment:
            self._moment, self._copying, self._failed = moment, {}, set()
        leaving = list(leavers)
        if moment is None or not leaving:
            return
        coming = {name for copy in (*on_their_way, *self._copying.values()) for name in copy.names}
        owned = self._only_with(leaving, moment, coming)
        for copy in choose_copies(owned, self._keepers(moment, self._failed), copies=1):
            if copy.target not in self._copying:  # one at a time: the next when this one is there
                self._copying[copy.target] = copy
                self._context.emit(CopySnapshot(step=moment.step, copy=copy))

    def copied(self, event: SnapshotCopied) -> Part | None:
        """What a peer has now of what it was asked for here; None where this was not asked for here, or came to nothing."""
        copy, moment = self._copying.get(event.peer), self._moment
        if copy is None or moment is None or (copy.source, moment.step) != (event.source, event.step):
            return None
        del self._copying[event.peer]
        if event.failure:
            self._failed.add(event.peer)
            return None
        return Part(moment=moment, names=event.names, num_bytes=event.num_bytes)

    def gone(self, peer: PeerId) -> None:
        """The peer will neither give nor fetch any more."""
        self._copying = {target: copy for target, copy in self._copying.items() if peer not in (target, copy.source)}
        self._failed.discard(peer)

    def _only_with(self, leaving: list[PeerId], moment: Moment, coming: set[str]) -> list[Owned]:
        """Each essential name that is with nobody who stays, with one of those that leave."""
        snapshots = self._context.snapshots
        holders = snapshots.holders(moment)
        found: dict[PeerId, set[str]] = {}
        for name in sorted(snapshots.essential - coming):
            have = holders.get(name, ())
            if have and THE_STORE not in have and all(peer in leaving for peer in have):
                found.setdefault(have[0], set()).add(name)
        parts = {peer: part for peer, part in snapshots.parts() if part.moment == moment}
        return [
            Owned(
                peer=peer,
                names=frozenset(names),
                num_bytes=parts[peer].num_bytes * len(names) // max(1, len(parts[peer].names)),
            )
            for peer, names in found.items()
        ]
