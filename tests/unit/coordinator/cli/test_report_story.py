"""The report of a run: what its events amount to, and the page."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from atoll.coordinator.cli.report_page import write_report
from atoll.coordinator.cli.report_story import Story, comparisons, tell
from atoll.coordinator.events import (
    Event,
    FailedEvent,
    FinishedEvent,
    LinkEvent,
    PeerEvent,
    PlanEvent,
    PredictionEvent,
    RecoveredEvent,
    StageSummary,
    StoppedEvent,
)
from atoll.coordinator.reading import Told
from support.events import step_event

STAGE = StageSummary(stage=0, peers=("<b>peer</b>",), first="a", last="b", parameters=10, predicted_memory_bytes=100)
PLAN = PlanEvent(generation=3, stages=(STAGE,), predicted_step_seconds=1.0, bottleneck="computing at peer-1")
LINK = LinkEvent(
    source="one", target="two", direction="forward", codec="raw", bytes=10, seconds_busy=1.0, relative_error=0.0, raw_bytes=10
)


def prediction(what: str, predicted: float, measured: float, peer: str = "", target: str = "") -> PredictionEvent:
    return PredictionEvent(what=what, peer=peer, predicted=predicted, measured=measured, target=target)


def recovered(seconds: float) -> RecoveredEvent:
    parts = {"noticed_seconds": 1.0, "planned_seconds": 1.0, "moved_seconds": 1.0, "replayed_seconds": 0.0, "step_seconds": 1.0}
    return RecoveredEvent(step=2, reason="peer-1 was lost", replayed_steps=0, seconds=seconds, **parts)


def story(*events: Event, times: tuple[float, ...] = ()) -> Story:
    clock = times or tuple(float(index) for index in range(len(events)))
    return tell([Told(event=event, time=time) for event, time in zip(events, clock, strict=True)])


def test_a_run_that_went_as_planned_needs_no_advice() -> None:
    told = story(
        step_event(1),
        prediction("step_seconds", 1.0, 1.1),
        FinishedEvent(steps=1, loss=1, seconds=2, tokens_per_second=3, weights=""),
    )
    assert told.advice == ()
    assert told.outcome == "finished after 1 steps"


def test_what_holds_the_pipeline_back_is_said_first() -> None:
    assert (
        story(PLAN, step_event(1)).advice[0].startswith("What holds the pipeline back, by the last plan: computing at peer-1")
    )


def test_a_peer_slower_than_planned_is_named() -> None:
    told = story(
        prediction("step_seconds", 1.0, 1.5),
        prediction("compute_seconds", 1.0, 1.4, "fast"),
        prediction("compute_seconds", 0.5, 1.5, "slow"),
    )
    (sentence,) = told.advice
    assert "slow computed 3.0 times as long" in sentence
    assert "atoll replan" in sentence


def test_a_link_that_is_busy_for_most_of_a_step_is_named_with_what_may_help() -> None:
    told = story(LINK, prediction("step_seconds", 1.0, 1.0), prediction("transfer_seconds", 0.9, 0.9, "one", "two"))
    (sentence,) = told.advice
    assert "one > two (raw) is busy for 90%" in sentence
    assert "compression: auto" in sentence


def test_losses_that_cost_much_of_the_time_are_worth_a_word() -> None:
    assert any("spare peer" in sentence for sentence in story(step_event(1, seconds=10.0), recovered(4.0)).advice)
    assert not story(step_event(1, seconds=1000.0), recovered(4.0)).advice


def test_the_latest_prediction_of_a_kind_counts() -> None:
    told = story(prediction("memory_bytes", 100.0, 50.0, "one"), prediction("memory_bytes", 100.0, 80.0, "one"))
    assert comparisons(told) == [("one needs", "100 B", "80 B", "+25.0%")]


def test_what_happened_has_its_step_and_time() -> None:
    told = story(
        PeerEvent(name="one", state="joined"),
        step_event(1),
        PeerEvent(name="one", state="lost", reason="silent"),
        times=(100.0, 107.0, 109.0),
    )
    assert [(one.step, one.seconds, one.words) for one in told.happenings] == [
        (0, 0.0, "one joined"),
        (1, 9.0, "one lost: silent"),
    ]
    assert ("joining, measuring and loading, until the first step was committed", 7.0) in [
        (one.what, one.seconds) for one in told.shares
    ]


def test_a_run_that_failed_says_why() -> None:
    assert story(step_event(1), FailedEvent(reason="no peers")).outcome == "failed: no peers"
    assert story(step_event(1), StoppedEvent(reason="enough")).outcome == "stopped: enough"
    assert story(FailedEvent(reason="no peers"), step_event(2)).outcome.startswith("not finished; its last committed step is 2")


class Elements(HTMLParser):
    """Names of all elements, and whatever would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href") and value and not value.startswith("#")]


def test_the_page_needs_nothing_else_and_takes_what_peers_say_as_text(tmp_path: Path) -> None:
    write_report(story(PLAN, LINK, step_event(1), step_event(2)), tmp_path / "report.html", "demo")
    text = (tmp_path / "report.html").read_text()
    page = Elements()
    page.feed(text)
    assert page.names.count("svg") == 2
    assert page.loaded == []
    assert not {"script", "link", "b"} & set(page.names)
    assert "&lt;b&gt;peer&lt;/b&gt;" in text


def test_a_page_of_a_run_without_steps_has_no_plots(tmp_path: Path) -> None:
    write_report(story(FailedEvent(reason="no peers")), tmp_path / "report.html", "demo")
    assert "<svg" not in (tmp_path / "report.html").read_text()
