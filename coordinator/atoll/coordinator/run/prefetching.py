"""What spares fetch ahead: each has the newest complete snapshot on its disk, so that whichever peer is lost, the one that
takes over has the state already. A part of the state machine; pure.

A spare behind a slow line may never have a snapshot as a whole before there is a newer one. Where the newer one is on one disk
each, the loss of a peer takes it away, so such a spare goes on with the one that it has begun, which is kept until then. Where
the newer one is on two disks, the run would go on from that, so that is what is fetched.

The copies that make a snapshot safe come first; they may leave each of several spares with a part of it. What a spare lacks is
then copied in slices, one at a time: no other copy has to wait for longer than for one of them, and what is there stays there.
Training goes first on every line anyway. A run goes on with one spare's help at a time, so a few that are prepared suffice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from atoll.coordinator.events import SnapshotEvent
from atoll.coordinator.run.context import RunContext
from atoll.coordinator.run.copies import DISK_RESERVE, Copy, Keeper
from atoll.coordinator.run.events import SnapshotCopied
from atoll.coordinator.run.instructions import CopySnapshot
from atoll.coordinator.run.snapshots import THE_STORE, Moment, Part
from atoll.coordinator.run.states import RunState
from atoll.protocol.ids import PeerId, StepNumber

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
        self._begun: dict[PeerId, Moment] = {}
        self._failures: Counter[PeerId] = Counter()

    def consider(self) -> None:
        """Have the next slices copied, while the run trains and no other copy waits."""
        context = self._context
        newest = context.snapshots.newest_complete()
        if newest is None or context.state is not RunState.TRAINING or context.replaying:
            return
        chosen = self._chosen(newest)
        self._begun = {keeper.peer: self._begun[keeper.peer] for keeper in chosen if keeper.peer in self._begun}
        for keeper in chosen:
            if keeper.peer not in self._under_way:
                self._go_on(keeper, self._goal(keeper.peer, newest), newest)

    @property
    def needed(self) -> frozenset[StepNumber]:
        """The steps whose snapshots must stay until a spare has them."""
        newest = self._context.snapshots.newest_complete()
        return frozenset() if newest is None else frozenset(self._goal(peer, newest).step for peer in self._begun)

    def _goal(self, peer: PeerId, newest: Moment) -> Moment:
        """Which snapshot the spare is to have next."""
        snapshots, begun = self._context.snapshots, self._begun.get(peer, newest)
        return begun if snapshots.is_complete(begun) and not snapshots.outlives_a_loss(newest) else newest

    def _go_on(self, keeper: Keeper, *moments: Moment) -> None:
        """With the first of these snapshots of which the spare lacks something."""
        self._begun.pop(keeper.peer, None)
        for moment in moments:
            if (copy := self._next_slice(keeper, moment)) is not None:
                self._begun[keeper.peer] = moment
                self._under_way[keeper.peer] = _Fetch(moment=moment, copy=copy)
                self._context.emit(CopySnapshot(step=moment.step, copy=copy))
                return

    def copied(self, event: SnapshotCopied) -> bool:
        """A peer's answer; whether it is about a slice."""
        fetch = self._under_way.get(event.peer)
        if fetch is None or (fetch.moment.step, fetch.copy.source) != (event.step, event.source):
            return False
        del self._under_way[event.peer]
        if event.failure:
            self._failed(event, fetch.moment)
        else:
            self._failures[event.peer] = 0
            self._add(event.peer, Part(moment=fetch.moment, names=event.names, num_bytes=event.num_bytes))
        return True

    def _failed(self, event: SnapshotCopied, moment: Moment) -> None:
        """A slice did not come. It is nobody's fault where the snapshot was dropped meanwhile."""
        if self._context.snapshots.is_complete(moment):
            self._failures[event.peer] += 1
            why = f"{event.peer}, a spare, could not fetch what {event.source} has: {event.failure}"
            self._context.announce(SnapshotEvent(step=moment.step, bytes=0, seconds=0.0, failure=why))

    def went_back(self) -> None:
        """What is being copied is of steps that are done again: it is not counted."""
        self._under_way.clear()
        self._begun.clear()

    def gone(self, peer: PeerId) -> None:
        """The peer has left or was lost; whoever fetches from it says itself that it could not."""
        self._under_way.pop(peer, None)
        self._begun.pop(peer, None)
        self._failures.pop(peer, None)

    def _chosen(self, moment: Moment) -> list[Keeper]:
        """The spares to prepare: those that have most already."""
        there = {(peer, part.moment): len(part.names) for peer, part in self._context.snapshots.parts()}
        spares = [keeper for keeper in self._keepers(moment) if keeper.spare and self._failures[keeper.peer] < MOST_FAILURES]
        spares.sort(key=lambda one: (-there.get((one.peer, self._begun.get(one.peer, moment)), 0), one.peer))
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
