"""Snapshots of a run: when one is taken, who copies what, which are kept. A part of the state machine; pure.

At a commit that is due for one the peers of the plan are told to write the state after it to their disks, while training goes
on. When all of it is there, each part is copied to other peers' disks; when all copies are there, it is safe. One snapshot is
under way at a time: the next begins when this one is safe, or cannot become so. After each of these changes everybody is told
which snapshots to keep."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from atoll.coordinator.events import SnapshotEvent
from atoll.coordinator.run.cadence import Cadence
from atoll.coordinator.run.context import RunContext
from atoll.coordinator.run.copies import Copy, Keeper, Owned, choose_copies
from atoll.coordinator.run.events import PeerJoined, SnapshotCopied, SnapshotTaken, StoreHolds
from atoll.coordinator.run.instructions import CopySnapshot, FillStore, KeepSnapshots, NotePart, NoteSnapshot
from atoll.coordinator.run.prefetching import Prefetching
from atoll.coordinator.run.rescue import Rescue
from atoll.coordinator.run.snapshots import THE_STORE, Moment, Part
from atoll.protocol.ids import PeerId, StepNumber
from atoll.protocol.wording import listed

MOST_FAILED_COPIES = 3
"""Of one snapshot; a peer whose copy failed is not asked again for it."""
MOST_DOUBLINGS = 10
"""Of the steps between two snapshots, once for each that failed since the last whole one."""


@dataclass(slots=True)
class _UnderWay:
    """One snapshot: ``taking`` are the peers that have yet to say that their part is on their disk, ``copying`` what is being
    copied to whom."""

    moment: Moment
    begun: float
    heard: float
    taking: set[PeerId]
    copying: dict[PeerId, Copy] = field(default_factory=dict)
    failed: set[PeerId] = field(default_factory=set)
    num_bytes: int = 0
    stalled_seconds: float = 0.0


class Snapshotting:
    """``begin_if_due`` is asked at each commit; what peers answer is told to ``taken`` and ``copied``."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._cadence = Cadence(context.settings.snapshot_every)
        self.rescue = Rescue(context, self._keepers)
        self._last = StepNumber(0)
        self._num_failed = 0
        self._under_way: _UnderWay | None = None
        self._answers: dict[tuple[PeerId, StepNumber], deque[Moment]] = {}
        self._disks: dict[PeerId, tuple[int, float | None]] = {}
        self._since: dict[Moment, float] = {}
        self._tried: Moment | None = None
        self._prefetching = Prefetching(context, lambda moment: self._keepers(moment, set()), self._add)

    # What happens

    def joined(self, event: PeerJoined) -> None:
        self._disks[event.offer.name] = event.disk_bytes, event.download_bytes_per_second

    def gone(self, peer: PeerId, *, lost_stage: bool) -> None:
        """The peer will not answer any more; ``lost_stage``: it had one, and did not say that it would leave."""
        if lost_stage:
            self._cadence.lost()
        self._disks.pop(peer, None)
        self.rescue.gone(peer)
        self._prefetching.gone(peer)
        self._answers = {key: moments for key, moments in self._answers.items() if key[0] != peer}
        under_way = self._under_way
        if under_way is None:
            return
        if peer in under_way.taking:
            under_way.taking.discard(peer)
            self._continue(under_way)
        elif under_way.copying:
            lost = [target for target, copy in under_way.copying.items() if peer in (target, copy.source)]
            for target in lost:
                del under_way.copying[target]
            self._continue(under_way)

    def begin_if_due(self, took_seconds: float, usual_seconds: float) -> bool:
        """A step was committed. Whether the peers are to take a snapshot of it; it is noted down as ordered then."""
        context = self._context
        self._cadence.trained(took_seconds)
        if context.committed <= self._last:  # the run went back; a snapshot that was under way is of steps that are gone
            self._last, self._under_way = StepNumber(context.committed - 1), None
            self._prefetching.went_back()
        if not self._is_due(usual_seconds):
            return False
        assert context.plan is not None
        moment = context.moment
        self._last = moment.step
        context.snapshots.ordered(moment)
        self._under_way = _UnderWay(moment=moment, begun=context.now, heard=context.now, taking=set(context.plan.peers))
        for peer in context.plan.peers:
            context.snapshots.damaged(peer, moment.step)  # what it has of another line of this step is overwritten
            self._answers.setdefault((peer, moment.step), deque()).append(moment)
        context.emit(NoteSnapshot(moment=moment))
        return True

    def taken(self, event: SnapshotTaken) -> None:
        """A peer has its part on its disk, or says why not."""
        asked = self._answers.get((event.peer, event.step))
        if not asked:
            if event.failure:  # it found what it had damaged
                self._context.snapshots.damaged(event.peer, event.step)
                why = f"what {self._context.described(event.peer)} had of it on its disk is of no use: {event.failure}"
                self._tell_failure(Moment(step=event.step), why)
            return
        moment = asked.popleft()
        if not asked:
            del self._answers[event.peer, event.step]
        under_way = self._under_way
        mine = under_way is not None and under_way.moment == moment and event.peer in under_way.taking
        if not event.failure:
            self._add(event.peer, Part(moment=moment, names=event.names, num_bytes=event.num_bytes))
        if not mine or under_way is None:
            return
        under_way.taking.discard(event.peer)
        under_way.heard = self._context.now
        under_way.num_bytes += event.num_bytes
        under_way.stalled_seconds = max(under_way.stalled_seconds, event.stalled_seconds)
        if event.failure:
            self._tell_failure(moment, f"{self._context.described(event.peer)} could not take its part: {event.failure}")
        self._continue(under_way)

    def copied(self, event: SnapshotCopied) -> None:
        """A peer has a copy on its disk, or says why not."""
        rescued = self.rescue.copied(event)
        if rescued is not None:
            self._add(event.peer, rescued)
            return
        if self._prefetching.copied(event):
            return
        under_way = self._under_way
        if under_way is None or event.step != under_way.moment.step:
            return
        copy = under_way.copying.get(event.peer)
        if copy is None or copy.source != event.source:
            return
        del under_way.copying[event.peer]
        under_way.heard = self._context.now
        if event.failure:
            under_way.failed.add(event.peer)
            why = f"{event.peer} could not copy the part of {event.source}: {event.failure}"
            self._tell_failure(under_way.moment, why)
        else:
            self._add(event.peer, Part(moment=under_way.moment, names=event.names, num_bytes=event.num_bytes))
        self._continue(under_way)

    def time_passed(self) -> None:
        """Who has not answered for long will not. While no snapshot is under way, spares fetch ahead."""
        under_way, now = self._under_way, self._context.now
        if under_way is None:
            self._prefetching.consider()
            return
        if now - under_way.heard < self._context.settings.deadlines.snapshot_seconds:
            return
        silent = listed(sorted(under_way.taking) or sorted(under_way.copying))
        self._tell_failure(under_way.moment, f"nothing was heard from {silent} for {now - under_way.heard:.0f} s")
        self._under_way = None

    def progressed(self, peer: PeerId) -> None:
        """State moves to or from the peer: a copy may take long."""
        if self._under_way is not None and peer in self._under_way.copying:
            self._under_way.heard = self._context.now

    def hand_over(self) -> None:
        """After every event: what only those that leave have of a snapshot goes to others."""
        under_way, roster = self._under_way, self._context.roster
        on_their_way = () if under_way is None else tuple(under_way.copying.values())
        self.rescue.settle(filter(roster.is_leaving, self._disks), on_their_way)

    def is_asked(self, peer: PeerId) -> bool:
        """Whether copies of what it has on its disk are on their way to others."""
        under_way = self._under_way
        return self.rescue.copies_from(peer) or (
            under_way is not None and any(copy.source == peer for copy in under_way.copying.values())
        )

    def filled(self, event: StoreHolds) -> None:
        """What the store has changed, or could not be changed."""
        snapshots = self._context.snapshots
        snapshots.joined(THE_STORE, event.parts)
        snapshots.stored = None
        self._fill_store()

    @property
    def is_for_store(self) -> bool:
        """Whether something is still on its way into the store, or about to be."""
        context, under_way = self._context, self._under_way
        if not context.settings.has_store:
            return False
        taken = under_way is not None and under_way.moment == context.moment and bool(under_way.taking)
        return taken or context.snapshots.stored is not None

    def _fill_store(self) -> None:
        """Have the newest complete snapshot put into the store, if there is one and it is idle."""
        snapshots = self._context.snapshots
        newest = snapshots.newest_complete()
        busy = snapshots.stored is not None
        if not self._context.settings.has_store or newest is None or busy or newest == self._tried:
            return
        self._tried = newest
        if not snapshots.has(THE_STORE, newest):
            snapshots.stored = newest
            self._context.emit(FillStore(step=newest.step, holders=snapshots.holders(newest)))

    # What there is

    def age_seconds(self, moment: Moment) -> float | None:
        """Since the state was committed; None for a snapshot of an earlier life of the coordinator."""
        since = self._since.get(moment)
        return None if since is None else self._context.now - since

    def _is_due(self, step_seconds: float) -> bool:
        context = self._context
        step, every = context.committed, context.settings.snapshot_every
        if step >= context.settings.steps:  # nobody goes back to the last step, but others may go on from it
            return context.settings.has_store
        if self._under_way is not None:
            return False
        if every is not None:
            return step % every == 0
        # Where disks are full, or peers have none, trying again and again would only fill logs.
        patience = 1 << min(self._num_failed, MOST_DOUBLINGS)
        return step - self._last >= patience * self._cadence.steps(step_seconds)

    def _add(self, peer: PeerId, part: Part) -> None:
        self._context.snapshots.taken(peer, part)
        self._context.emit(NotePart(peer=peer, part=part))

    def _continue(self, under_way: _UnderWay) -> None:
        """Something has come to its end: what is next for this snapshot."""
        if under_way.taking or under_way.copying:
            return
        snapshots, moment = self._context.snapshots, under_way.moment
        if not snapshots.is_complete(moment):
            self._num_failed += 1
            self._end(under_way)
            return
        self._num_failed = 0
        if moment not in self._since:
            self._completed(under_way)
        if not self._copy(under_way):
            self._end(under_way)

    def _completed(self, under_way: _UnderWay) -> None:
        context, moment = self._context, under_way.moment
        self._since[moment] = under_way.begun
        self._cadence.cost(under_way.stalled_seconds)
        seconds = context.now - under_way.begun
        context.emit(NoteSnapshot(moment=moment, complete=True, num_bytes=under_way.num_bytes, seconds=seconds))
        context.announce(
            SnapshotEvent(
                step=moment.step,
                bytes=under_way.num_bytes,
                seconds=seconds,
                stalled_seconds=under_way.stalled_seconds,
            )
        )
        self._fill_store()
        self._rotate()

    def _copy(self, under_way: _UnderWay) -> bool:
        """Have what is missing copied; False: nothing is, or nobody can."""
        context, snapshots = self._context, self._context.snapshots
        if snapshots.is_safe(under_way.moment) or len(under_way.failed) >= MOST_FAILED_COPIES:
            return False
        owned = [
            Owned(peer=peer, names=part.names & snapshots.essential, num_bytes=part.num_bytes)
            for peer, part in snapshots.parts()
            if part.moment == under_way.moment and self._counts(peer)
        ]
        copies = choose_copies(owned, self._keepers(under_way.moment, under_way.failed), snapshots.copies)
        for copy in copies:
            if copy.target not in under_way.copying:  # one at a time: the next when this one is there
                under_way.copying[copy.target] = copy
                context.emit(CopySnapshot(step=under_way.moment.step, copy=copy))
        under_way.heard = context.now
        return bool(copies)

    def _counts(self, peer: PeerId) -> bool:
        """Whether what it has on its disk is to have copies: a copy with somebody who leaves is none."""
        roster = self._context.roster
        return roster.is_present(peer) and not roster.is_leaving(peer)

    def _is_clean(self, peer: PeerId, moment: Moment) -> bool:
        """Whether the peer has nothing of another line of that step on its disk: it has taken this one, or no other is."""
        snapshots = self._context.snapshots
        return not snapshots.was_redone(moment.step) or snapshots.has(peer, moment)

    def _keepers(self, moment: Moment, failed: set[PeerId]) -> list[Keeper]:
        context = self._context
        keepers = []
        for offer in context.roster.offers():
            disk_bytes, rate = self._disks.get(offer.name, (0, None))
            if offer.name not in failed and self._is_clean(offer.name, moment):
                keepers.append(
                    Keeper(
                        peer=offer.name,
                        spare=context.stage_of(offer.name) is None,
                        machine=offer.machine,
                        disk_bytes=disk_bytes,
                        bytes_per_second=rate,
                    )
                )
        return keepers

    def _end(self, under_way: _UnderWay) -> None:
        """Nothing more will become of this snapshot."""
        self._under_way = None
        if self._context.snapshots.is_safe(under_way.moment):
            self._context.emit(NoteSnapshot(moment=under_way.moment, complete=True, safe=True))
        self._rotate()

    def _rotate(self) -> None:
        """Have what is of no use any more deleted; never the newest complete snapshot, and never the newest safe one."""
        snapshots = self._context.snapshots
        # What the run stands at may just be loaded from disks.
        keep = snapshots.worth_keeping() | (snapshots.steps & {self._context.committed, *self._prefetching.needed})
        if keep != snapshots.steps:
            snapshots.dropped(keep)
            self._since = {moment: since for moment, since in self._since.items() if moment.step in keep}
            self._context.emit(KeepSnapshots(steps=tuple(sorted(keep))))

    def _tell_failure(self, moment: Moment, why: str) -> None:
        self._context.announce(SnapshotEvent(step=moment.step, bytes=0, seconds=0.0, failure=why))
