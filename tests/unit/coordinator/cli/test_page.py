"""What a page is told of a run that it did not see from the beginning, and the numbers for Prometheus."""

from __future__ import annotations

import json
import re

from prometheus_client.parser import text_string_to_metric_families

from atoll.coordinator.cli.page.metrics import RunMetrics
from atoll.coordinator.cli.page.story import MOST_HAPPENINGS, MOST_STEPS, Course
from atoll.coordinator.events import EvaluationEvent, FailedEvent, FinishedEvent, LinkEvent, PeerEvent, StoppedEvent, VoidEvent
from atoll.protocol.v1.operator_pb2 import LinkStatus, PeerStatus, SnapshotStatus, StageTimeline, StatusReply
from atoll.protocol.v1.session_pb2 import Span
from support.events import plan_event, step_event
from support.swarm import ROOT

LINK = LinkEvent(source="a", target="b", direction="forward", codec="raw", bytes=1, seconds_busy=0.0, relative_error=0.0)


def steps_of(course: Course) -> list[int]:
    return [point["step"] for point in course.so_far()["points"]]


def test_a_page_opened_late_is_told_the_course_so_far() -> None:
    course = Course(10)
    for event in (
        plan_event("a"),
        step_event(1, loss=5.5),
        EvaluationEvent(step=1, loss=5.0),
        PeerEvent(name="a", state="lost"),
    ):
        course.event(event, 100.0)
    told = course.so_far()
    assert told["steps"] == 10
    assert [(point["step"], point["loss"], point["time"]) for point in told["points"]] == [(1, 5.5, 100.0)]
    assert [one["loss"] for one in told["evaluations"]] == [5.0]
    assert told["happenings"][-1] == {"event": "peer", "words": "a lost", "time": 100.0}


def test_a_long_course_is_thinned_and_keeps_its_ends() -> None:
    course = Course(10**6)
    for number in range(1, 5 * MOST_STEPS):
        course.event(step_event(number), None)
    steps = steps_of(course)
    assert len(steps) <= MOST_STEPS + 1
    assert (steps[0], steps[-1]) == (1, 5 * MOST_STEPS - 1)
    assert steps == sorted(set(steps))


def test_what_happened_is_bounded_and_the_newest_stays() -> None:
    course = Course(10)
    for number in range(2 * MOST_HAPPENINGS):
        course.event(PeerEvent(name=str(number), state="joined"), None)
    happenings = course.so_far()["happenings"]
    assert len(happenings) == MOST_HAPPENINGS
    assert happenings[-1]["words"] == f"{2 * MOST_HAPPENINGS - 1} joined"


def test_how_a_run_ended_is_told_in_words_and_what_is_no_news_is_not() -> None:
    course = Course(3)
    assert course.event(FinishedEvent(steps=3, loss=1.0, seconds=1.0, tokens_per_second=1.0, weights=""), None) == {
        "kind": "ended",
        "words": "finished after 3 steps",
    }
    assert course.event(StoppedEvent(reason="enough"), None) == {"kind": "ended", "words": "stopped: enough"}
    assert course.event(FailedEvent(reason="no peers"), None) == {"kind": "ended", "words": "failed: no peers"}
    assert course.event(LINK, None) is None


def numbers(metrics: RunMetrics) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            found[sample.name, *sorted(sample.labels.values())] = sample.value
    return found


def test_metrics_say_what_the_status_says_and_count_what_happened() -> None:
    metrics = RunMetrics()
    for event in (
        step_event(1, tokens=100, seconds=2.0),
        step_event(2, tokens=100, seconds=3.0),
        EvaluationEvent(step=2, loss=4.5),
    ):
        metrics.event(event)
    metrics.event(VoidEvent(step=3, reason="", peer="a", stage=0))
    metrics.event(PeerEvent(name="a", state="lost"))
    spans = [
        Span(what="forward", seconds=0.5),
        Span(what="waiting for gradient", seconds=0.25),
        Span(what="forward", seconds=0.5),
    ]
    metrics.refresh(
        StatusReply(
            state="training",
            step=2,
            loss=3.25,
            peers=[PeerStatus(name="a", stage=0, silent_seconds=1.5)],
            links=[LinkStatus(source="a", target="b", direction="forward", codec="int8", relative_error=0.01)],
            safe_snapshot=SnapshotStatus(step=1, age_seconds=7.0),
            timelines=[StageTimeline(peer="a", step=2, spans=spans)],
        )
    )
    found = numbers(metrics)
    assert found["atoll_loss",] == 3.25
    assert found["atoll_validation_loss",] == 4.5
    assert found["atoll_committed_steps_total",] == 2.0
    assert found["atoll_committed_seconds_total",] == 5.0
    assert found["atoll_tokens_total",] == 200.0
    assert found["atoll_void_steps_total",] == found["atoll_peers_lost_total",] == 1.0
    assert found["atoll_state", "training"] == 1.0
    assert found["atoll_state", "failed"] == 0.0
    assert found["atoll_peer_silent_seconds", "a"] == 1.5
    assert found["atoll_link_relative_error", "a", "b", "forward"] == 0.01
    assert found["atoll_link_codec", "a", "b", "forward", "int8"] == 1.0
    assert found["atoll_snapshot_age_seconds",] == 7.0
    assert found["atoll_peer_step_part_seconds", "a", "forward"] == 1.0


def test_grafana_asks_for_nothing_that_the_run_does_not_say() -> None:
    metrics = RunMetrics()
    metrics.event(EvaluationEvent(step=2, loss=4.5))
    metrics.refresh(
        StatusReply(peers=[PeerStatus(name="a")], links=[LinkStatus(source="a")], safe_snapshot=SnapshotStatus(step=1))
    )
    said = set(re.findall(r"^# TYPE (\S+)", metrics.text().decode(), re.MULTILINE))
    board = json.loads((ROOT / "docker" / "grafana" / "dashboards" / "atoll.json").read_text())
    asked = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    names = {name for name in re.findall(r"atoll_\w+", asked) if not name.startswith("atoll_own_")}
    assert names
    assert names - said == set()


def test_labels_are_those_of_the_run_as_it_stands() -> None:
    metrics = RunMetrics()
    metrics.refresh(StatusReply(peers=[PeerStatus(name="gone")]))
    metrics.refresh(StatusReply(peers=[PeerStatus(name="here")]))
    assert not any("gone" in key for key in numbers(metrics))
