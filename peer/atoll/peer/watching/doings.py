"""What a peer has done since it started, added up from what computing says. Pure; the clock is handed in."""

from __future__ import annotations

from collections import Counter, defaultdict

from atoll.peer.stage.events import Accepted, Faulted, Notice, Reported, SnapshotWritten, StepVoided
from atoll.protocol.ids import StepNumber

IDLE = "idle"
"""Between the end of a step's work and the next step: waiting for its commit, loading, measuring, or nothing to do."""
COUNTS = ("steps", "evaluations", "void_steps", "faults", "snapshots")


class Doings:
    """Is told each notice in the order of its coming; ``now`` is when the peer started.

    ``seconds`` are of the thread that computes, by what it did or waited for, up to the last step that was reported. They add
    up to the time that has passed, as far as the steps' timelines are whole. ``counts`` are of ``COUNTS``. ``snapshot`` is the
    newest that lies on the disk, with the time when that was known.
    """

    def __init__(self, now: float) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float, {IDLE: 0.0})
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self.snapshot: tuple[StepNumber, float] | None = None
        self.predicted_memory_bytes = 0
        self._until = now

    def noticed(self, notice: Notice, now: float) -> None:
        """Takes in what computing says."""
        match notice:
            case Accepted():
                self.predicted_memory_bytes = notice.assignment.predicted_memory_bytes
            case Reported():
                self.counts["evaluations" if notice.evaluation else "steps"] += 1
                self._spent(notice, now)
            case StepVoided():
                self.counts["void_steps"] += 1
            case Faulted():
                self.counts["faults"] += 1
            case SnapshotWritten() if not notice.failure:
                self.counts["snapshots"] += 1
                self.snapshot = notice.step, now

    def _spent(self, report: Reported, now: float) -> None:
        for span in report.spans:
            self.seconds[span.what] += span.seconds
        last = report.spans[-1] if report.spans else None
        stepped = last.begin_seconds + last.seconds if last is not None else 0.0
        self.seconds[IDLE] += max(0.0, now - self._until - stepped)
        self._until = now
