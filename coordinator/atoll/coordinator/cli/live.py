"""The live table of `atoll run` on a terminal: progress, whom the run waits for, and a row for each peer."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atoll.coordinator.cli import formatting
from atoll.coordinator.cli.status import describe_activity, in_order
from atoll.coordinator.cli.view import Pace, describe
from atoll.coordinator.events import (
    EvaluationEvent,
    Event,
    MeasurementEvent,
    MovedEvent,
    PausedEvent,
    PlanEvent,
    RecoveredEvent,
    RestoredEvent,
    ResumedEvent,
    SnapshotEvent,
    StepEvent,
    VoidEvent,
)
from atoll.protocol.v1.operator_pb2 import PeerStatus, StatusReply

BAR_WIDTH = 30
RATE_WINDOW_SECONDS = 2.0


class Traffic:
    """Bytes a second that each peer sends, from its totals."""

    def __init__(self) -> None:
        self._marks: dict[str, tuple[float, int]] = {}
        self._rates: dict[str, float] = {}

    def observe(self, peer: str, bytes_sent: int, now: float) -> float:
        """The rate over the latest window of ``peer``, whose total is ``bytes_sent`` at ``now``."""
        since, before = self._marks.setdefault(peer, (now, bytes_sent))
        if now - since >= RATE_WINDOW_SECONDS:
            self._rates[peer] = max(0, bytes_sent - before) / (now - since)
            self._marks[peer] = (now, bytes_sent)
        return self._rates.get(peer, 0.0)


class LiveView:
    """Redraws one table in place; notable events scroll by above it."""

    def __init__(
        self, *, run: str, steps: int, console: Console | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._run = run
        self._steps = steps
        self._now = now
        self._pace = Pace(steps)
        self._traffic = Traffic()
        self._status = StatusReply(run=run, state="waiting", steps=steps)
        self._step: StepEvent | None = None
        self._validation: EvaluationEvent | None = None
        self._snapshot: SnapshotEvent | None = None
        self._predicted: dict[str, int] = {}
        self._live = Live(console=console or Console(), auto_refresh=False, transient=False)
        self._live.start()

    def event(self, event: Event) -> None:
        match event:
            case StepEvent():
                self._pace.step(event)
                self._step = event
            case EvaluationEvent():
                self._validation = event
            case PlanEvent():
                self._predicted = {peer: stage.predicted_memory_bytes for stage in event.stages for peer in stage.peers}
            case SnapshotEvent() if not event.failure:
                self._snapshot = event
            case (
                VoidEvent()
                | MovedEvent()
                | PausedEvent()
                | ResumedEvent()
                | MeasurementEvent()
                | SnapshotEvent()
                | RestoredEvent()
                | RecoveredEvent()
            ):
                words = describe(event, self._steps, self._pace)
                if words:
                    self._live.console.print(words, style="yellow")
            case _:
                pass
        self._draw()

    def refresh(self, status: StatusReply) -> None:
        self._status = status
        self._draw()

    def close(self) -> None:
        self._draw()
        self._live.stop()

    def _draw(self) -> None:
        self._live.update(Group(self._headline(), self._progress(), self._waiting(), self._peers()), refresh=True)

    def _headline(self) -> RenderableType:
        line = Text(f"{self._run}  ", style="bold")
        line.append(self._status.state, style="cyan")
        if self._status.generation:
            line.append(f"  plan {self._status.generation}", style="dim")
        predicted, measured = self._status.predicted_step_seconds, self._status.measured_step_seconds
        if predicted:
            beside = f", takes {formatting.seconds(measured)}" if measured else ""
            line.append(f"  a step is predicted to take {formatting.seconds(predicted)}{beside}", style="dim")
        return line

    def _progress(self) -> RenderableType:
        step = self._step.step if self._step else 0
        parts: list[RenderableType] = [
            Text(f"step {step}/{self._steps}"),
            ProgressBar(total=self._steps, completed=step, width=BAR_WIDTH),
        ]
        if self._step:
            parts.append(Text(f"loss {self._step.loss:.4f}", style="green"))
            parts.append(Text(f"{self._step.tokens_per_second:,.0f} tokens/s"))
        if self._validation:
            parts.append(Text(f"validation {self._validation.loss:.4f}"))
        if self._status.step < self._status.journal_step:
            parts.append(Text(f"again at step {self._status.step}", style="yellow"))
        if self._snapshot:
            parts.append(Text(f"snapshot {self._snapshot.step}", style="dim"))
        parts.append(Text(self._pace.remaining))
        row = Table.grid(padding=(0, 2))
        row.add_row(*parts)
        return row

    def _waiting(self) -> RenderableType:
        if not self._status.reason:
            return Text("")
        lasting = "" if self._status.state == "training" else f" ({formatting.duration(self._status.state_seconds)})"
        return Text(f"the run {self._status.reason}{lasting}", style="dim")

    def _peers(self) -> RenderableType:
        table = Table("peer", "layers", "memory", "stage needs", "sent", "now", box=None, padding=(0, 2), header_style="bold")
        for peer in in_order(self._status):
            table.add_row(*self._peer_row(peer))
        return table

    def _peer_row(self, peer: PeerStatus) -> tuple[str, ...]:
        rate = self._traffic.observe(peer.name, peer.bytes_sent, self._now())
        predicted = self._predicted.get(peer.name)
        return (
            peer.name,
            peer.layers or peer.state,
            formatting.size(peer.resident_bytes),
            formatting.size(predicted) if predicted else "",
            f"{formatting.size(peer.bytes_sent)}  {formatting.rate(rate)}",
            describe_activity(peer),
        )
