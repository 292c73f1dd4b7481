"""What stages did in their last step, as peers report it: bounded, and nothing that makes no sense."""

from __future__ import annotations

from atoll.coordinator.timelines import MOST_SPANS, Timelines
from atoll.protocol.ids import PeerId
from atoll.protocol.v1 import session_pb2

A, B = PeerId("a"), PeerId("b")


def report(step: int, *spans: tuple[str, float, float], evaluation: bool = False) -> session_pb2.StageReport:
    made = [session_pb2.Span(what=what, begin_seconds=begin, seconds=seconds) for what, begin, seconds in spans]
    return session_pb2.StageReport(step=step, evaluation=evaluation, spans=made)


def test_the_last_step_of_training_is_kept() -> None:
    timelines = Timelines()
    timelines.reported(A, report(1, ("forward", 0.0, 1.0)))
    timelines.reported(A, report(2, ("forward", 0.0, 2.0), ("waiting for gradient", 2.0, 0.5), ("forward", 3.0, 1.0)))
    timelines.reported(A, report(2, evaluation=True))
    step, spans = timelines.last[A]
    assert (step, len(spans)) == (2, 3)
    assert [span.what for span in spans] == ["forward", "waiting for gradient", "forward"]


def test_peers_without_a_stage_are_no_part_of_the_picture() -> None:
    timelines = Timelines()
    timelines.reported(A, report(1, ("forward", 0.0, 1.0)))
    timelines.reported(B, report(1, ("forward", 0.0, 1.0)))
    timelines.keep([B])
    assert set(timelines.last) == {B}


def test_nonsense_of_a_peer_is_left_out() -> None:
    timelines = Timelines()
    timelines.reported(
        A, report(1, ("forward", float("nan"), 1.0), ("forward", 0.0, -1.0), ("x" * 1000, 0.0, 1.0), ("forward", 0.0, 1.0))
    )
    assert len(timelines.last[A][1]) == 1
    timelines.reported(A, report(2, *[("forward", 0.0, 1.0)] * (3 * MOST_SPANS)))
    assert len(timelines.last[A][1]) == MOST_SPANS
