"""What spares fetch ahead: each has the newest complete snapshot on its disk, so that whichever peer is lost, the one that
takes over has the state already. A part of the state machine; pure.

The copies that make a snapshot safe come first; they may leave each of several spares with a part of it. What a spare lacks is
then copied in slices, one at a time: no other copy has to wait for longer than for one of them, and what is there stays there.
Training goes first on every line anyway. A run goes on with one spare's help at a time, so a few that are prepared suffice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from atoll.coordinator.run.context import RunContext
from atoll.coordinator.run.copies import DISK_RESERVE, Copy, Keeper
from atoll.coordinator.run.events import SnapshotCopied
from atoll.coordinator.run.instructions import CopySnapshot
from atoll.coordinator.run.snapshots import THE_STORE, Moment, Part
from atoll.coordinator.run.states import RunState
from atoll.protocol.ids import PeerId

MOST_PREPARED = 3
"""Spares that are prepared."""
SLICE_BYTES = 64 * 2**20
"""About what is copied at a time; a name is never divided."""
MOST_FAILURES = 3
"""In a row, of one peer, which is then asked for no more until it joins anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetch:
    moment: Moment
    copy: Copy


class Prefetching:
    """``keepers`` are the peers that could keep copies of a snapshot, ``add`` hears of what one has on its disk. ``consider``
    is called whenever time has passed."""

    def __init__(
        self, context: RunContext, keepers: Callable[[Moment], Collection[Keeper]], add: Callable[[PeerId, Part], None]
    ) -> None:
        self._context = context
        self._keepers = keepers
        self._add = add
        self._under_way: dict[PeerId, _Fetch] = {}
        self._failures: Counter[PeerId] = Counter()

    def consider(self) -> None:
        """Have the next slices copied, while the run trains and no other copy waits."""
        context = self._context
        newest = context.snapshots.newest_complete()
        if newest is None or context.state is not RunState.TRAINING or context.replaying:
            return
        for keeper in self._chosen(newest):
            if keeper.peer not in self._under_way and (copy := self._next_slice(keeper, newest)) is not None:
                self._under_way[keeper.peer] = _Fetch(moment=newest, copy=copy)
                context.emit(CopySnapshot(step=newest.step, copy=copy))

    def copied(self, event: SnapshotCopied) -> bool:
        """A peer's answer; whether it is about a slice."""
        fetch = self._under_way.get(event.peer)
        if fetch is None or (fetch.moment.step, fetch.copy.source) != (event.step, event.source):
            return False
        del self._under_way[event.peer]
        if event.failure:
            self._failures[event.peer] += 1
        else:
            self._failures[event.peer] = 0
            self._add(event.peer, Part(moment=fetch.moment, names=event.names, num_bytes=event.num_bytes))
        return True

    def went_back(self) -> None:
        """What is being copied is of steps that are done again: it is not counted."""
        self._under_way.clear()

    def gone(self, peer: PeerId) -> None:
        """The peer has left or was lost; whoever fetches from it says itself that it could not."""
        self._under_way.pop(peer, None)
        self._failures.pop(peer, None)

    def _chosen(self, moment: Moment) -> list[Keeper]:
        """The spares to prepare: those that have most already."""
        parts = {peer: part for peer, part in self._context.snapshots.parts() if part.moment == moment}
        spares = [keeper for keeper in self._keepers(moment) if keeper.spare and self._failures[keeper.peer] < MOST_FAILURES]
        spares.sort(key=lambda one: (-len(parts[one.peer].names) if one.peer in parts else 0, one.peer))
        return spares[:MOST_PREPARED]

    def _next_slice(self, keeper: Keeper, moment: Moment) -> Copy | None:
        """What the spare fetches next and from whom: as much as fits into a slice of what one peer has, None where it lacks
        nothing or has no room."""
        names_by_source: dict[PeerId, list[str]] = {}
        for name, holders in sorted(self._context.snapshots.holders(moment).items()):
            sources = [holder for holder in holders if holder != THE_STORE]
            if sources and keeper.peer not in holders:
                names_by_source.setdefault(min(sources), []).append(name)
        if not names_by_source:
            return None
        source = max(sorted(names_by_source), key=lambda one: len(names_by_source[one]))
        part = next(part for peer, part in self._context.snapshots.parts() if peer == source and part.moment == moment)
        usual_bytes = max(1, part.num_bytes // max(1, len(part.names)))
        names = tuple(names_by_source[source][: max(1, SLICE_BYTES // usual_bytes)])
        size = usual_bytes * len(names)
        if keeper.disk_bytes and size > (1.0 - DISK_RESERVE) * keeper.disk_bytes:
            return None
        return Copy(source=source, target=keeper.peer, names=names, num_bytes=size)
