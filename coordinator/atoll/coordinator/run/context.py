"""What the parts of the state machine share: the run's state, its deadline, and the instructions of the event at hand."""

from __future__ import annotations

from collections import deque

from atoll.coordinator.events import Event, FailedEvent, StoppedEvent
from atoll.coordinator.planning.plan import Plan
from atoll.coordinator.run.broken_links import BrokenLinks
from atoll.coordinator.run.holdings import Holdings
from atoll.coordinator.run.instructions import Announce, EndRun, Instruction, ReleaseState
from atoll.coordinator.run.left_behind import LeftBehind
from atoll.coordinator.run.resuming import Committed, Returning
from atoll.coordinator.run.roster import Roster
from atoll.coordinator.run.snapshots import FIRST_VALUES, Moment, Snapshots
from atoll.coordinator.run.states import TRANSITIONS, Phase, RunSettings, RunState
from atoll.protocol.ids import Generation, PeerId, StageIndex, StepNumber


class RunContext:
    """Changed by the machine and its parts alone; ``pending`` are the peers whose answer ends the present wait, ``doing`` says
    what is done for a plan. ``moment`` is the step at which the state stands, ``journal_step`` the last one in the journal:
    they differ while the run does steps again. It ``began`` at a
    snapshot in a store, if that is not 0. ``stale`` are peers that hold state of a moment which the run has left.
    ``last`` is how the last step was committed, ``returning`` whose return a restarted run waits for. ``recovering``: a peer
    that the run counted on was lost, and no new step has been committed since; ``resuming``: nothing is loaded yet of a run
    that an earlier coordinator began; ``gathered``: there were as many peers as it was to begin with."""

    def __init__(self, settings: RunSettings, now: float) -> None:
        self.settings = settings
        self.now = now
        self.state = RunState.WAITING
        self.phase = Phase.IDLE
        self.reason = ""
        self.doing = ""
        self.entered = now
        self.deadline = now + settings.deadlines.waiting_seconds
        self.generation = Generation(0)
        self.moment = FIRST_VALUES
        self.journal_step = self.began = StepNumber(0)
        self.snapshots = Snapshots(settings.copies)
        self.stale: set[PeerId] = set()
        self.last: Committed | None = None
        self.returning = Returning()
        self.recovering = self.resuming = self.gathered = False
        self._last_line = 0
        self._line_since = Generation(0)
        self._went_back = False
        self.left_behind: LeftBehind | None = None
        self.plan: Plan | None = None
        self.last_plan: Plan | None = None
        self.names: tuple[frozenset[str], ...] = ()
        self.holdings = Holdings()
        self.roster = Roster()
        self.links = BrokenLinks(settings.links)
        self.pending: set[PeerId] = set()
        self._out: list[Instruction] = []
        self._story: deque[str] = deque(maxlen=32)

    def enter(self, state: RunState, limit_seconds: float, reason: str = "") -> None:
        """Change the state; ``limit_seconds`` is how long it may last if nothing happens."""
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(self.tell(f"{self.state} cannot become {state}"))
        self.state, self.reason, self.doing = state, reason, ""
        self.entered = self.now
        self.leave_phase()
        self.wait_at_most(limit_seconds)

    def enter_phase(self, phase: Phase, limit_seconds: float, pending: tuple[PeerId, ...] = ()) -> None:
        self.phase, self.pending = phase, set(pending)
        self.wait_at_most(limit_seconds)

    def leave_phase(self) -> None:
        self.phase, self.pending = Phase.IDLE, set()

    def wait_at_most(self, seconds: float) -> None:
        self.deadline = self.now + seconds

    def grow_generation(self) -> None:
        self.generation = Generation(self.generation + 1)

    @property
    def committed(self) -> StepNumber:
        """The committed step at which the state stands."""
        return self.moment.step

    @property
    def needed_peers(self) -> int:
        """How many must be here for a plan. Once they were, the run goes on with whoever is here."""
        return 1 if self.journal_step or self.gathered else max(1, self.settings.min_peers)

    @property
    def in_haste(self) -> bool:
        """Whether everybody stands still who trained a moment ago: a plan is wanted now, a better one can be found later."""
        return self.recovering or self.resuming

    @property
    def replaying(self) -> bool:
        """Whether the next step is one that is committed already and is done again."""
        return self.committed < self.journal_step

    def take_up(self, moment: Moment) -> None:
        """The run was begun by an earlier coordinator, which committed steps; who holds what of them is still to be told."""
        self.moment, self.journal_step, self._last_line = moment, moment.step, moment.line
        self.holdings.clear(learned=moment.step > 0)

    def begin_at(self, step: StepNumber) -> None:
        """The run goes on from a snapshot in a store, and began there; what it has done since is ahead of that."""
        self.began = step
        self.snapshots.ordered(Moment(step=step))
        if self.journal_step <= step:
            self.take_up(Moment(step=step))

    def go_to(self, moment: Moment) -> None:
        """The run stands at another moment from now on, of which state is on disks at most."""
        if self.left_behind is None:
            held = {peer: self.holdings.names_of(peer) for peer in self.holdings.peers}
            self.left_behind = LeftBehind(moment=self.moment, line_since=self._line_since, went_back=self._went_back, held=held)
        self.snapshots.redone_until = max(self.snapshots.redone_until, self.journal_step)
        self.stale.update(self.holdings.peers)
        self.holdings.clear(learned=moment.step > 0)
        self.moment = moment
        self._went_back = True
        self._line_since = self.generation

    def return_to_left(self) -> None:
        """The run stands again where it had gone back from: what was missing is here."""
        left, self.left_behind = self.left_behind, None
        assert left is not None
        self.moment, self._line_since, self._went_back = left.moment, left.line_since, left.went_back
        self.holdings.clear(learned=True)
        for peer, names in left.held.items():
            self.holdings.add(peer, names)
        self.stale.difference_update(left.held)

    def is_of_this_line(self, generation: Generation) -> bool:
        """Whether what a peer has in memory, which last heard of ``generation``, was made since the run last went back."""
        return generation > self._line_since or self._line_since == 0

    def uncovered(self) -> tuple[str, ...]:
        """The essential names that nobody here holds as of where the run stands, in memory or on a disk."""
        missing = self.holdings.uncovered()
        on_disks = self.snapshots.holders(self.moment) if missing else {}
        return tuple(name for name in missing if name not in on_disks)

    def on_disks(self) -> dict[str, tuple[PeerId, ...]]:
        """For each name who has its state on a disk, as of where the run stands."""
        return self.snapshots.holders(self.moment) if self.committed else {}

    def stand_at(self, step: StepNumber) -> tuple[ReleaseState, ...]:
        """A step was committed: every stage's state is of it. Returns what to tell those whose state is of no use any more."""
        assert self.plan is not None
        if self._went_back:
            self._went_back = False
            self._last_line = int(self.generation)  # unique, over restarts of the coordinator too
        self.moment = Moment(step=step, line=self._last_line)
        self.journal_step = max(self.journal_step, step)
        self.stale.clear()
        keepers = tuple(peer for peer in self.holdings.peers if peer not in self.plan.peers)
        self.last_plan = self.plan
        self.holdings.replace(dict(zip(self.plan.peers, self.plan.spread(self.names), strict=True)))
        return (ReleaseState(generation=self.generation, peers=keepers),) if keepers else ()

    def emit(self, *instructions: Instruction) -> None:
        self._out.extend(instructions)

    def announce(self, *events: Event) -> None:
        self._out.extend(Announce(event=event) for event in events)

    def take_instructions(self) -> tuple[Instruction, ...]:
        out, self._out = tuple(self._out), []
        return out

    def fail(self, reason: str) -> None:
        """End the run; ``reason`` is its last line."""
        self.enter(RunState.FAILED, float("inf"), reason)
        self.announce(FailedEvent(reason=reason))
        self.emit(EndRun(finished=False, reason=reason))

    def stop(self, reason: str) -> None:
        """End the run because its operator wants it: that is no failure, and it may be taken up again."""
        self.enter(RunState.STOPPED, float("inf"), reason)
        self.announce(StoppedEvent(reason=reason))
        self.emit(EndRun(finished=False, stopped=True, reason=reason))

    def stage_of(self, peer: PeerId | None) -> StageIndex | None:
        return self.plan.stage_of(peer) if self.plan is not None and peer is not None else None

    def described(self, peer: PeerId) -> str:
        """A peer as sentences name it: with its stage, where it holds one."""
        stage = self.stage_of(peer)
        return f"{peer} (stage {stage})" if stage is not None else str(peer)

    def note(self, what: str) -> None:
        """Remember ``what`` for the story that a broken assertion tells."""
        self._story.append(f"{what} in {self.state}/{self.phase}")

    def tell(self, what: str) -> str:
        return f"{what}; the story: {' > '.join(self._story)}"
