"""What a running `atoll run` shows: JSON lines, plain lines, or a live table.

A view is told every event of the run and, twice a second, its status; it decides what of it to write where. It knows nothing of
the coordinator behind them. The live table is in ``live``.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from atoll.coordinator.cli import formatting
from atoll.coordinator.events import (
    EvaluationEvent,
    Event,
    MeasurementEvent,
    MovedEvent,
    PausedEvent,
    PeerEvent,
    PlanEvent,
    RecoveredEvent,
    ReplayedEvent,
    RestoredEvent,
    ResumedEvent,
    SnapshotEvent,
    StageSummary,
    StepEvent,
    VoidEvent,
)
from atoll.protocol.v1.operator_pb2 import StatusReply

Write = Callable[[str], None]

QUIET_SECONDS = 5.0
"""After how long without news a plain view says what the run waits for."""


class View(Protocol):
    """Shows a run to one reader."""

    def event(self, event: Event) -> None:
        """Takes note of what happened."""

    def refresh(self, status: StatusReply) -> None:
        """Takes note of how things stand; called regularly, also when nothing happens."""

    def close(self) -> None:
        """The run is over: leaves the screen in order."""


class Pace:
    """How long the run still takes, from its latest steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._seconds: deque[float] = deque(maxlen=8)
        self._step = 0

    def step(self, event: StepEvent) -> None:
        """Takes note of a committed step."""
        self._seconds.append(event.seconds)
        self._step = event.step

    @property
    def remaining_seconds(self) -> float | None:
        """None before the first step."""
        if not self._seconds:
            return None
        return (self._steps - self._step) * sum(self._seconds) / len(self._seconds)

    @property
    def remaining(self) -> str:
        """``0:45 left``, or nothing before the first step."""
        seconds = self.remaining_seconds
        return "" if seconds is None else f"{formatting.duration(seconds)} left"


class JsonView:
    """Each event as one line of JSON, and nothing else."""

    def __init__(self, write: Write) -> None:
        self._write = write

    def event(self, event: Event) -> None:
        self._write(event.to_json())

    def refresh(self, status: StatusReply) -> None:
        """Status is no event."""

    def close(self) -> None:
        """Nothing to put in order."""


class PlainView:
    """A line for each thing worth reading, for logs and pipes."""

    def __init__(self, steps: int, write: Write, now: Callable[[], float] = time.monotonic) -> None:
        self._steps = steps
        self._write = write
        self._now = now
        self._pace = Pace(steps)
        self._said = ""
        self._wrote_at = now()

    def event(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self._pace.step(event)
        line = describe(event, self._steps, self._pace)
        if line:
            self._say(line)

    def refresh(self, status: StatusReply) -> None:
        quiet = self._now() - self._wrote_at >= QUIET_SECONDS
        if quiet and status.reason and status.reason != self._said:
            self._said = status.reason
            self._say(f"the run {status.reason}")

    def _say(self, line: str) -> None:
        self._wrote_at = self._now()
        self._write(line)

    def close(self) -> None:
        """Nothing to put in order."""


def describe(event: Event, steps: int, pace: Pace) -> str:
    """A few words about ``event``; empty where there is no news for a person, or where the command's last line tells it."""
    match event:
        case StepEvent():
            return (
                f"step {event.step}/{steps}  loss {event.loss:.4f}  {event.tokens_per_second:,.0f} tokens/s  "
                f"{event.seconds:.2f} s  {pace.remaining}"
            ).rstrip()
        case PeerEvent():
            return f"{event.name} {event.state}" + (f": {event.reason}" if event.reason else "")
        case PlanEvent():
            samples = "1 sample" if event.microbatch == 1 else f"{event.microbatch} samples"
            step = formatting.seconds(event.predicted_step_seconds)
            heading = f"plan {event.generation}: {step} a step predicted, in microbatches of {samples}"
            return "\n".join([heading, *(f"  {describe_stage(stage)}" for stage in event.stages)])
        case MovedEvent():
            moved = f"{formatting.size(event.bytes)} of state moved in {event.fetch_seconds:.1f} s"
            return f"plan {event.generation} is in force after {event.seconds:.1f} s, {moved}: {event.reason}"
        case MeasurementEvent() if event.reason and event.what == "segments":
            return f"{event.peer} is planned with by its FLOP/s: {event.reason}"
        case MeasurementEvent() if event.reason and event.bytes_per_second is not None and event.peer < event.target:
            return f"the link {event.peer} - {event.target} is planned with by an estimate: {event.reason}"
        case VoidEvent():
            where = f" (stage {event.stage}, {event.peer})" if event.stage is not None else ""
            return f"step {event.step} is void and runs again: {event.reason}{where}"
        case SnapshotEvent() if event.failure:
            return f"the snapshot of step {event.step} is not whole: {event.failure}"
        case SnapshotEvent():
            stalled = f", and held computing up for {event.stalled_seconds:.1f} s" if event.stalled_seconds >= 0.1 else ""
            size = formatting.size(event.bytes)
            return f"snapshot of step {event.step}: {size} on the peers' disks after {event.seconds:.1f} s{stalled}"
        case RestoredEvent():
            whence = f"the snapshot of step {event.step}" if event.step else "the first values"
            return f"back from step {event.from_step} to {whence} after {event.seconds:.1f} s: {event.reason}"
        case ReplayedEvent():
            unlike = "" if event.equal else "; it came out a little different from the first time"
            return f"step {event.step}/{steps}  done again  loss {event.loss:.4f}  {event.seconds:.2f} s{unlike}"
        case RecoveredEvent():
            return _describe_recovery(event)
        case PausedEvent():
            return f"paused: {event.reason}"
        case ResumedEvent():
            return f"goes on: {event.reason}"
        case EvaluationEvent():
            return f"step {event.step}/{steps}  validation loss {event.loss:.4f}"
        case _:
            return ""


def _describe_recovery(event: RecoveredEvent) -> str:
    """``recovered in 4.2 s: 0.1 s until it was noticed, ...``."""
    parts = [
        f"{event.noticed_seconds:.1f} s until it was noticed",
        f"{event.planned_seconds:.1f} s until the plan",
        f"{event.moved_seconds:.1f} s for state",
    ]
    if event.replayed_steps:
        steps = "1 step" if event.replayed_steps == 1 else f"{event.replayed_steps} steps"
        parts.append(f"{event.replayed_seconds:.1f} s for {steps} done again")
    parts.append(f"{event.step_seconds:.1f} s for the next step")
    return f"recovered in {event.seconds:.1f} s: {', '.join(parts)}"


def describe_stage(stage: StageSummary) -> str:
    """``stage 0 on peer-1: embedding to blocks.2, 0.9 M parameters, 41.0 MiB``."""
    layers = stage.first if stage.first == stage.last else f"{stage.first} to {stage.last}"
    return (
        f"stage {stage.stage} on {', '.join(stage.peers)}: {layers}, {formatting.count(stage.parameters)} parameters, "
        f"{formatting.size(stage.predicted_memory_bytes)} predicted"
    )


def write_line(line: str) -> None:
    """Writes to standard output at once. A reader that went away ends the output, not the run: metrics.jsonl has it all."""
    try:
        # In one piece: the processes of a swarm share the output, and a line must not end in the middle of another's.
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_view(*, run: str, steps: int, json: bool) -> View:
    """The view that fits the flag and what standard output is."""
    if json:
        return JsonView(write_line)
    if not sys.stdout.isatty():
        return PlainView(steps, write_line)
    from atoll.coordinator.cli.live import LiveView  # rich is slow to import, and pipes do without

    return LiveView(run=run, steps=steps)
