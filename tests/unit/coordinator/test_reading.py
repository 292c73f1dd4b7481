"""Events are read back from the metrics as they were written."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.coordinator.events import EvaluationEvent, Event, PlanEvent, StageSummary, VoidEvent
from atoll.coordinator.reading import read_told
from atoll.coordinator.run_files import METRICS, TIME
from support.events import step_event

STAGE = StageSummary(stage=0, peers=("one", "two"), first="a", last="b", parameters=10, predicted_memory_bytes=100)
EVENTS: list[Event] = [
    step_event(1, loss=5.123456789012345),
    VoidEvent(step=2, reason="a peer left", peer="one", stage=None),
    EvaluationEvent(step=2, loss=4.75, metrics={"accuracy": 0.5}),
    PlanEvent(generation=1, stages=(STAGE,), predicted_step_seconds=0.1),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_an_event_comes_back_as_it_was(event: Event, tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text(event.to_json(**{TIME: 12.5}) + "\n")
    (told,) = read_told(tmp_path)
    assert (told.event, told.time) == (event, 12.5)


def test_metrics_of_an_older_version_have_no_times(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text(EVENTS[0].to_json() + "\n")
    assert [told.time for told in read_told(tmp_path)] == [None]


def test_what_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    lines = ['{"event": "of another version"}', step_event(1, loss=float("nan")).to_json(), step_event(2).to_json()]
    (tmp_path / METRICS).write_text("\n".join(lines) + '\n{"event": "st')
    assert [told.event for told in read_told(tmp_path)] == [step_event(2)]
