"""What a peer has done adds up to the time that has passed."""

from __future__ import annotations

from atoll.peer.faults import Fault, FaultKind
from atoll.peer.stage.events import Faulted, Reported, SnapshotWritten, StepVoided
from atoll.peer.stage.timeline import Span
from atoll.peer.watching.doings import IDLE, Doings
from atoll.protocol.ids import Generation, MicrobatchIndex, StepNumber

ONE = Generation(1)


def report(*spans: Span, evaluation: bool = False) -> Reported:
    return Reported(
        generation=ONE,
        step=StepNumber(1),
        evaluation=evaluation,
        losses=(),
        squared_norms={},
        compute_seconds=0.0,
        spans=spans,
    )


def span(what: str, begin_seconds: float, seconds: float) -> Span:
    return Span(what=what, microbatch=MicrobatchIndex(0), begin_seconds=begin_seconds, seconds=seconds)


def test_what_no_step_took_was_idle_and_all_adds_up() -> None:
    doings = Doings(100.0)
    doings.noticed(report(span("forward", 0.0, 1.0), span("waiting for gradient", 1.0, 2.0), span("backward", 3.0, 1.0)), 110.0)
    assert doings.seconds == {IDLE: 6.0, "forward": 1.0, "waiting for gradient": 2.0, "backward": 1.0}
    doings.noticed(report(span("forward", 0.5, 1.5), evaluation=True), 112.0)
    assert doings.seconds["forward"] == 2.5
    doings.noticed(report(), 115.0)
    assert doings.seconds[IDLE] == 9.0


def test_a_step_that_was_told_late_takes_nothing_from_idleness() -> None:
    doings = Doings(0.0)
    doings.noticed(report(span("forward", 0.0, 4.0)), 3.0)
    assert doings.seconds[IDLE] == 0.0


def test_everything_is_counted_once() -> None:
    doings = Doings(0.0)
    doings.noticed(report(), 1.0)
    doings.noticed(report(evaluation=True), 2.0)
    doings.noticed(StepVoided(next_generation=ONE, step=StepNumber(1)), 3.0)
    doings.noticed(Faulted(generation=ONE, step=StepNumber(1), fault=Fault(kind=FaultKind.LINK, reason="cut")), 4.0)
    assert doings.counts == {"steps": 1, "evaluations": 1, "void_steps": 1, "faults": 1, "snapshots": 0}


def test_the_newest_snapshot_is_one_that_was_written() -> None:
    doings = Doings(0.0)
    doings.noticed(SnapshotWritten(step=StepNumber(4)), 7.0)
    doings.noticed(SnapshotWritten(step=StepNumber(5), failure="the disk is full"), 8.0)
    assert (doings.counts["snapshots"], doings.snapshot) == (1, (StepNumber(4), 7.0))
