"""The views: what JSON readers, logs and terminals are shown."""

from __future__ import annotations

import io
import json
import sys

import pytest
from rich.console import Console

from atoll.coordinator.cli.live import LiveView, Traffic
from atoll.coordinator.cli.view import QUIET_SECONDS, JsonView, Pace, PlainView, write_line
from atoll.coordinator.events import (
    EvaluationEvent,
    Event,
    FailedEvent,
    MovedEvent,
    PeerEvent,
    RecoveredEvent,
    ReplayedEvent,
    RestoredEvent,
    SnapshotEvent,
    VoidEvent,
)
from atoll.protocol.v1.operator_pb2 import PeerStatus, StatusReply
from support.events import plan_event, step_event


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def status(**fields: object) -> StatusReply:
    peers = [
        PeerStatus(name="peer-0", stage=-1, state="spare"),
        PeerStatus(
            name="peer-1", stage=0, layers="blocks.0 .. blocks.3", resident_bytes=300 << 20, phase="forward", bytes_sent=5 << 20
        ),
        PeerStatus(name="peer-2", stage=1, state="ready", phase="waiting for gradient", waiting_for="peer-1"),
    ]
    return StatusReply(run="demo", state="training", generation=1, peers=peers, **fields)  # type: ignore[arg-type]


def test_json_view_writes_each_event_as_one_object_a_line() -> None:
    lines: list[str] = []
    view = JsonView(lines.append)
    view.event(step_event(1, loss=5.5))
    view.refresh(status())
    view.event(FailedEvent(reason="no\nmemory"))
    view.close()
    entries = [json.loads(line) for line in lines]
    assert [entry["event"] for entry in entries] == ["step", "failed"]
    assert entries[0]["loss"] == 5.5
    assert all("\n" not in line for line in lines)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            SnapshotEvent(step=4, bytes=3 << 20, seconds=1.25, stalled_seconds=0.5),
            "snapshot of step 4: 3.0 MiB on the peers' disks after 1.2 s, and held computing up for 0.5 s",
        ),
        (
            SnapshotEvent(step=4, bytes=0, seconds=0.0, failure="b could not take its part: its disk is full"),
            "the snapshot of step 4 is not whole: b could not take its part: its disk is full",
        ),
        (
            RestoredEvent(step=4, from_step=7, reason="b was lost", bytes=10, seconds=1.5),
            "back from step 7 to the snapshot of step 4 after 1.5 s: b was lost",
        ),
        (
            RestoredEvent(step=0, from_step=7, reason="b was lost", bytes=10, seconds=1.5),
            "back from step 7 to the first values after 1.5 s: b was lost",
        ),
        (
            ReplayedEvent(step=5, loss=2.5, seconds=0.5, equal=False),
            "step 5/10  done again  loss 2.5000  0.50 s; it came out a little different from the first time",
        ),
        (
            RecoveredEvent(
                step=8,
                reason="b was lost",
                replayed_steps=3,
                noticed_seconds=0.5,
                planned_seconds=1.0,
                moved_seconds=2.0,
                replayed_seconds=3.0,
                step_seconds=1.0,
                seconds=7.5,
            ),
            "recovered in 7.5 s: 0.5 s until it was noticed, 1.0 s until the plan, 2.0 s for state, "
            "3.0 s for 3 steps done again, 1.0 s for the next step",
        ),
    ],
)
def test_plain_view_tells_of_snapshots_and_recoveries(event: Event, line: str) -> None:
    lines: list[str] = []
    PlainView(10, lines.append).event(event)
    assert lines == [line]


def test_plain_view_tells_what_a_change_of_plan_took() -> None:
    lines: list[str] = []
    PlainView(10, lines.append).event(
        MovedEvent(generation=2, step=4, bytes=3 << 20, seconds=2.5, fetch_seconds=1.25, reason="peer-1 ran out of memory")
    )
    (line,) = lines
    assert line.startswith("plan 2 is in force after 2.5 s, ")
    assert "of state moved in 1.2 s: peer-1 ran out of memory" in line


def test_plain_view_tells_what_happens_in_words() -> None:
    lines: list[str] = []
    view = PlainView(10, lines.append)
    view.event(PeerEvent(name="peer-1", state="joined"))
    view.event(plan_event("peer-1", "peer-2"))
    view.event(step_event(1, loss=5.5, tokens=1024, seconds=2.0))
    view.event(VoidEvent(step=2, reason="loss is not finite", peer="peer-2", stage=1))
    view.event(EvaluationEvent(step=1, loss=5.25))
    assert lines[0] == "peer-1 joined"
    assert "stage 1 on peer-2: blocks.1 to blocks.1.mlp, 1.5 M parameters, 64.0 MiB predicted" in lines[1]
    assert lines[2] == "step 1/10  loss 5.5000  512 tokens/s  2.00 s  0:18 left"
    assert lines[3] == "step 2 is void and runs again: loss is not finite (stage 1, peer-2)"
    assert lines[4] == "step 1/10  validation loss 5.2500"


def test_plain_view_says_once_whom_a_quiet_run_waits_for() -> None:
    lines: list[str] = []
    clock = Clock()
    view = PlainView(10, lines.append, now=clock)
    reply = status(reason="waits for peer-2 in step 3")
    view.refresh(reply)
    assert lines == []
    clock.now = QUIET_SECONDS
    view.refresh(reply)
    clock.now = 3 * QUIET_SECONDS
    view.refresh(reply)
    assert lines == ["the run waits for peer-2 in step 3"]


def test_pace_is_that_of_the_latest_steps() -> None:
    pace = Pace(100)
    assert pace.remaining == ""
    pace.step(step_event(1, seconds=50.0))
    for step in range(2, 12):
        pace.step(step_event(step, seconds=2.0))
    assert pace.remaining_seconds == pytest.approx(89 * 2.0)


def test_traffic_is_bytes_over_the_latest_window() -> None:
    traffic = Traffic()
    assert traffic.observe("peer-1", 0, 0.0) == 0.0
    assert traffic.observe("peer-1", 500, 1.0) == 0.0
    assert traffic.observe("peer-1", 4000, 4.0) == 1000.0
    assert traffic.observe("peer-1", 4000, 8.0) == 0.0


def test_live_view_shows_progress_and_a_row_for_each_peer() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160, height=40, color_system=None)
    view = LiveView(run="demo", steps=60, console=console, now=Clock())
    view.event(plan_event("peer-1", "peer-2"))
    view.event(step_event(23, loss=3.25, tokens=4096, seconds=2.0))
    view.event(EvaluationEvent(step=20, loss=3.5))
    view.refresh(status(reason="waits for peer-2", state_seconds=65.0))
    view.close()
    text = screen.getvalue().split("demo")[-1]
    for words in ("training", "step 23/60", "loss 3.2500", "2,048 tokens/s", "validation 3.5000", "1:14 left"):
        assert words in text
    assert "the run waits for peer-2\n" in text.replace("\r", "")
    rows = [line for line in text.splitlines() if "peer-" in line]
    assert "blocks.0 .. blocks.3" in rows[-3]
    assert "300.0 MiB" in rows[-3]
    assert "64.0 MiB" in rows[-3]
    assert "5.0 MiB" in rows[-3]
    assert "waiting for gradient from peer-1" in rows[-2]
    assert "peer-0" in rows[-1]


def test_a_line_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a swarm share the output: with two writes, another's line came between a line and its end."""
    pieces: list[str] = []

    class Output(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Output())
    write_line('{"event": "step"}')
    assert pieces == ['{"event": "step"}\n']
