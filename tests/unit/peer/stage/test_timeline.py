"""A step's timeline: work as it was done, and gaps with what was waited for."""

from __future__ import annotations

from atoll.peer.stage.timeline import MOST_SPANS, Timeline
from atoll.protocol.ids import MicrobatchIndex, PeerId

FIRST = MicrobatchIndex(0)
OTHER = PeerId("other")


def told(timeline: Timeline) -> list[tuple[str, float, float]]:
    return [(span.what, span.begin_seconds, span.seconds) for span in timeline.spans]


def test_work_is_told_from_the_beginning_of_the_step() -> None:
    timeline = Timeline(100.0)
    timeline.worked("forward", FIRST, 101.0, 103.0)
    (span,) = timeline.spans
    assert (span.what, span.microbatch, span.begin_seconds, span.seconds, span.peer) == ("forward", FIRST, 1.0, 2.0, None)


def test_a_gap_says_what_was_waited_for_first_and_from_whom() -> None:
    timeline = Timeline(0.0)
    timeline.worked("forward", FIRST, 0.0, 1.0)
    timeline.waits("gradient", OTHER)
    timeline.waits("activation", None)
    timeline.worked("backward", FIRST, 3.0, 4.0)
    assert told(timeline) == [("forward", 0.0, 1.0), ("waiting for gradient", 1.0, 2.0), ("backward", 3.0, 1.0)]
    assert [span.peer for span in timeline.spans] == [None, OTHER, None]


def test_a_gap_in_which_nothing_was_waited_for_is_the_threads_own() -> None:
    timeline = Timeline(0.0)
    timeline.worked("forward", FIRST, 0.0, 1.0)
    timeline.worked("backward", FIRST, 2.0, 3.0)
    assert told(timeline) == [("forward", 0.0, 1.0), ("backward", 2.0, 1.0)]


def test_what_was_waited_for_before_one_piece_of_work_is_not_waited_for_before_the_next() -> None:
    timeline = Timeline(0.0)
    timeline.waits("activation", OTHER)
    timeline.worked("forward", FIRST, 0.00001, 1.0)
    timeline.worked("forward", FIRST, 2.0, 3.0)
    assert [span.what for span in timeline.spans] == ["forward", "forward"]


def test_a_report_stays_small() -> None:
    timeline = Timeline(0.0)
    for number in range(2 * MOST_SPANS):
        timeline.worked("forward", FIRST, float(number), number + 0.5)
    assert len(timeline.spans) == MOST_SPANS
