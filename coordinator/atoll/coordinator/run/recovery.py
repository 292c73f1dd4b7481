"""The way back after a loss: which state the run goes on from, whom it waits for meanwhile, and how long each part of it took.
A part of the state machine; pure. What a loss leads to is decided by ``rollback``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.coordinator.events import PausedEvent, RecoveredEvent, RestoredEvent, ResumedEvent
from atoll.coordinator.run.absences import Absences
from atoll.coordinator.run.context import RunContext
from atoll.coordinator.run.instructions import ReleaseState, SendCommit
from atoll.coordinator.run.resuming import Held, Use, use_of
from atoll.coordinator.run.rollback import GoOn, Situation, Wait, decide
from atoll.coordinator.run.snapshots import Moment
from atoll.protocol.ids import PeerId
from atoll.protocol.wording import listed


@dataclass(slots=True)
class _Times:
    """When the parts of a recovery were done, on the machine's clock."""

    silent_seconds: float
    lost: float
    reason: str = ""
    planned: float = 0.0
    moved: float = 0.0
    replayed: float | None = None
    num_replayed: int = 0


class Recovery:
    """``order`` are the trained parameters in the order of the graph, ``step_seconds`` what a step takes (0: unknown)."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self.order: Sequence[str] = ()
        self.step_seconds = 0.0
        self._absences = Absences(context.settings.patience)
        self._away: dict[PeerId, frozenset[str]] = {}
        self._away_since = context.now
        self._paused = False
        self._left: Moment | None = None
        self._why = ""
        self._times: _Times | None = None

    def lost(self, peer: PeerId, may_return: frozenset[str], silent_seconds: float) -> None:
        """A peer that the run counts on is gone; ``may_return`` is what it had in memory, if it may be there still."""
        if may_return:
            self._away[peer], self._away_since = may_return, self._context.now
            self._absences.gone(peer, self._context.now)
        self._context.recovering = True
        if self._times is None:
            self._times = _Times(silent_seconds, self._context.now)

    def joined(self, peer: PeerId, held: Held | None) -> None:
        """A peer is here, or here again. What it has in memory is of use, becomes so with a commit that it missed, or is
        dropped."""
        self._absences.back(peer, self._context.now, with_state=held is not None)
        if held is not None:
            self._take_back(peer, held)

    def _take_back(self, peer: PeerId, held: Held) -> None:
        context = self._context
        use = use_of(held, context.committed, context.last) if context.is_of_this_line(held.generation) else Use.NONE
        left = context.left_behind
        before = left.use_of(held, context.last) if left is not None else Use.NONE
        if use is Use.NONE and before is Use.NONE:
            context.emit(ReleaseState(generation=held.generation, peers=(peer,)))
            return
        last = context.last
        if Use.COMMIT in (use, before):
            assert last is not None
            context.emit(
                SendCommit(
                    peers=(peer,),
                    generation=last.generation,
                    step=last.step,
                    clip_factor=last.clip_factor,
                    learning_rate=last.learning_rate,
                )
            )
        if use is not Use.NONE:
            context.holdings.add(peer, held.names)
        elif left is not None:
            left.add(peer, held.names)
            context.stale.add(peer)

    def returned(self) -> None:
        """The run stands where it did before it went back, for what was missing is here again."""
        self._context.return_to_left()
        self._left = None

    def interrupted(self, reason: str) -> None:
        """The plan is left because of ``reason``."""
        self._why = reason
        if self._times is not None:
            self._times.reason = self._times.reason or reason

    def settle(self) -> bool:
        """Before a plan is made: choose the state that it is made for. False: the run waits for somebody to come back."""
        context = self._context
        decision = decide(self._situation(), context.snapshots, context.now)
        if isinstance(decision, Wait):
            self._pause(decision)
            return False
        self._away.clear()
        if not isinstance(decision, GoOn):
            self._go_to(decision.moment)
            if context.state.final:
                return False
        if self._paused:
            self._paused = False
            context.announce(ResumedEvent(reason=f"the run goes on from step {context.committed}"))
        return True

    def better_is_here(self) -> bool:
        """While steps are done again: whether a later snapshot is complete by now."""
        newest = self._context.snapshots.newest_complete()
        return self._context.replaying and newest is not None and newest.step > self._context.committed

    @property
    def went_back(self) -> bool:
        """Whether the plan that is being loaded loads another moment than the last one trained from."""
        return self._left is not None

    def planned(self) -> None:
        """The peers of a new plan are told to load."""
        if self._times is not None:
            self._times.planned = self._context.now

    def arrived(self, fetched_bytes: int, stopped_seconds: float) -> None:
        """All stages are loaded; training stood still for so long."""
        context, left, self._left = self._context, self._left, None
        if self._times is not None:
            self._times.moved, self._times.replayed = context.now, None
        if left is not None:
            context.announce(
                RestoredEvent(
                    step=context.committed,
                    from_step=left.step,
                    reason=self._why,
                    bytes=fetched_bytes,
                    seconds=stopped_seconds,
                )
            )

    def committed(self, *, again: bool) -> None:
        """A step is committed; ``again``: it was done anew."""
        times = self._times
        if times is None:
            return
        if again:
            times.replayed = self._context.now
            times.num_replayed += 1
        else:
            self._times = None
            self._context.recovering = False
            self._context.announce(self._recovered(times))

    def _recovered(self, times: _Times) -> RecoveredEvent:
        now = self._context.now
        replayed = times.moved if times.replayed is None else times.replayed
        return RecoveredEvent(
            step=self._context.committed,
            reason=times.reason,
            replayed_steps=times.num_replayed,
            noticed_seconds=times.silent_seconds,
            planned_seconds=times.planned - times.lost,
            moved_seconds=times.moved - times.planned,
            replayed_seconds=replayed - times.moved,
            step_seconds=now - replayed,
            seconds=times.silent_seconds + now - times.lost,
        )

    def _situation(self) -> Situation:
        context = self._context
        missing = context.uncovered()
        return Situation(
            stands=context.moment,
            covered=not missing,
            began=context.began,
            step_seconds=self.step_seconds,
            patience_seconds=lambda saved_seconds: self._patience_seconds(missing, saved_seconds),
        )

    def _patience_seconds(self, missing: Iterable[str], saved_seconds: float) -> float:
        """What a peer had in memory may come back with it, if it is only out of reach."""
        if not frozenset[str]().union(*self._away.values()).issuperset(missing):
            return 0.0
        now = self._context.now
        return self._absences.patience_seconds(now - self._away_since, saved_seconds, now)

    def _go_to(self, moment: Moment) -> None:
        """The state of ``moment`` is what the next plan loads."""
        if moment.step < self._context.began:
            where = f"step {self._context.began}, at which the run began"
            self._context.fail(f"the snapshot of {where}, is gone from its store, and no other is complete; {self._why}")
            return
        if self._left is None:
            self._left = self._context.moment
        self._context.go_to(moment)

    def _pause(self, wait: Wait) -> None:
        context = self._context
        missing = f"nobody here has the state of {self._layers(context.uncovered())} after step {context.committed}"
        if wait.otherwise is None:
            what = "nor a snapshot to go back to: waits for whoever has one on its disk"
        else:
            seconds = wait.until - context.now
            gone = listed(sorted(self._away))
            what = f"waits up to {seconds:.0f} s for {gone} to come back, then goes back to step {wait.otherwise.step}"
        context.reason = f"{missing}{', ' if wait.otherwise is None else ': '}{what}; {self._why}"
        if not self._paused:
            self._paused = True
            context.announce(PausedEvent(reason=context.reason))

    def _layers(self, names: Iterable[str]) -> str:
        """The first and the last module that ``names`` belong to."""
        wanted = frozenset(names)
        ordered = [name for name in self.order if name in wanted] or sorted(wanted)
        modules = [name.rpartition(".")[0] or name for name in ordered]
        return modules[0] if modules[0] == modules[-1] else f"{modules[0]} - {modules[-1]}"
