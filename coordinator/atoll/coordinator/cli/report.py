"""What is left of a run for people: the loss curve as a picture, and a summary that names the files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from atoll.coordinator.cli import formatting
from atoll.coordinator.events import EvaluationEvent, FinishedEvent, StepEvent
from atoll.coordinator.reading import Told, read_told
from atoll.coordinator.run_files import CURVE, METRICS, REPORT, WEIGHTS


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The course of a run, read from its metrics: (step, loss) pairs, and its length and speed.

    Those of a finished run are what it said itself, evaluations included; else they are over the committed steps.
    """

    losses: tuple[tuple[int, float], ...]
    validation: tuple[tuple[int, float], ...]
    seconds: float
    tokens_per_second: float


def read_history(state: Path) -> History:
    """The history in ``state``; empty when the run committed no step."""
    return history_of(read_told(state))


def history_of(told: Iterable[Told]) -> History:
    """The history that these events tell."""
    losses: dict[int, float] = {}
    validation: dict[int, float] = {}
    tokens, seconds, speed = 0, 0.0, None
    for one in told:
        match one.event:
            case StepEvent() as event:
                losses[event.step] = event.loss
                tokens += event.tokens
                seconds += event.seconds
            case EvaluationEvent() as event:
                validation[event.step] = event.loss
            case FinishedEvent() as event:
                seconds, speed = event.seconds, event.tokens_per_second
    if speed is None:
        speed = tokens / seconds if seconds else 0.0
    return History(losses=tuple(losses.items()), validation=tuple(validation.items()), seconds=seconds, tokens_per_second=speed)


def write_curve(history: History, path: Path, title: str) -> None:
    """Draws training and validation loss over the steps as an SVG."""
    from matplotlib.figure import Figure  # takes a second, and most commands draw nothing

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*history.losses, strict=True), label="training", linewidth=1.2)
    if history.validation:
        axes.plot(*zip(*history.validation, strict=True), label="validation", marker="o", linestyle="--", linewidth=1.0)
        axes.legend()
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    figure.savefig(path, format="svg")


def summary_lines(history: History, state: Path) -> list[str]:
    """What the run did, in a few lines."""
    steps = f"{len(history.losses)} steps in {formatting.duration(history.seconds)}, {history.tokens_per_second:,.0f} tokens/s"
    lines = [steps, f"loss {history.losses[0][1]:.4f} -> {history.losses[-1][1]:.4f}"]
    if history.validation:
        lines[-1] += f", validation {history.validation[-1][1]:.4f}"
    files = [(WEIGHTS, "weights"), (CURVE, "loss curve"), (REPORT, "report"), (METRICS, "metrics")]
    lines += [f"{title:<11}{state / name}" for name, title in files if (state / name).exists()]
    return lines
