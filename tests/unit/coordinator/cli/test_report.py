"""The loss curve and the summary, from a run's metrics."""

from __future__ import annotations

from pathlib import Path

from atoll.coordinator.cli.report import read_history, summary_lines, write_curve
from atoll.coordinator.events import EvaluationEvent, Event, FinishedEvent, VoidEvent
from atoll.coordinator.run_files import CURVE, METRICS, WEIGHTS
from support.events import step_event


def write_metrics(state: Path, events: list[Event], rest: str = "") -> None:
    (state / METRICS).write_text("".join(event.to_json() + "\n" for event in events) + rest)


def test_history_holds_committed_steps_and_evaluations(tmp_path: Path) -> None:
    events = [
        step_event(1, loss=5.5, tokens=100, seconds=2.0),
        VoidEvent(step=2, reason="a peer left", peer="peer-1", stage=0),
        step_event(2, loss=4.5, tokens=100, seconds=3.0),
        EvaluationEvent(step=2, loss=4.75),
    ]
    write_metrics(tmp_path, events)
    history = read_history(tmp_path)
    assert history.losses == ((1, 5.5), (2, 4.5))
    assert history.validation == ((2, 4.75),)
    assert history.tokens_per_second == 40.0


def test_a_finished_run_says_itself_how_long_it_took(tmp_path: Path) -> None:
    finished = FinishedEvent(steps=1, loss=5.0, seconds=8.0, tokens_per_second=12.5, weights="w")
    write_metrics(tmp_path, [step_event(1, tokens=100, seconds=2.0), finished])
    history = read_history(tmp_path)
    assert (history.seconds, history.tokens_per_second) == (8.0, 12.5)


def test_a_line_cut_short_by_a_kill_is_passed_over(tmp_path: Path) -> None:
    write_metrics(tmp_path, [step_event(1)], rest='{"event": "st')
    assert [step for step, _ in read_history(tmp_path).losses] == [1]


def test_no_metrics_is_an_empty_history(tmp_path: Path) -> None:
    assert read_history(tmp_path).losses == ()


def test_curve_is_a_picture_with_both_losses(tmp_path: Path) -> None:
    write_metrics(tmp_path, [step_event(1, loss=5.5), step_event(2, loss=4.5), EvaluationEvent(step=2, loss=4.75)])
    write_curve(read_history(tmp_path), tmp_path / CURVE, "demo")
    picture = (tmp_path / CURVE).read_text()
    assert "<svg" in picture
    assert "line2d" in picture


def test_summary_names_the_files_that_are_there(tmp_path: Path) -> None:
    write_metrics(
        tmp_path, [step_event(1, loss=5.5, tokens=100, seconds=2.0), step_event(2, loss=4.5, tokens=100, seconds=2.0)]
    )
    (tmp_path / WEIGHTS).touch()
    lines = summary_lines(read_history(tmp_path), tmp_path)
    assert lines == [
        "2 steps in 0:04, 50 tokens/s",
        "loss 5.5000 -> 4.5000",
        f"weights    {tmp_path / WEIGHTS}",
        f"metrics    {tmp_path / METRICS}",
    ]
