"""What is left of a run for people: the loss curve as a picture, and a summary that names the files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.coordinator.cli import formatting
from atoll.coordinator.run_files import CURVE, METRICS, WEIGHTS


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
    losses: dict[int, float] = {}
    validation: dict[int, float] = {}
    tokens, seconds, speed = 0, 0.0, None
    for entry in _entries(state / METRICS):
        if entry.get("event") == "step" and entry["loss"] is not None:
            losses[entry["step"]] = entry["loss"]
            tokens += entry["tokens"]
            seconds += entry["seconds"]
        elif entry.get("event") == "evaluation" and entry["loss"] is not None:
            validation[entry["step"]] = entry["loss"]
        elif entry.get("event") == "finished":
            seconds, speed = entry["seconds"], entry["tokens_per_second"]
    if speed is None:
        speed = tokens / seconds if seconds else 0.0
    return History(losses=tuple(losses.items()), validation=tuple(validation.items()), seconds=seconds, tokens_per_second=speed)


def _entries(metrics: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of the file: the last one may be cut short where the coordinator was killed."""
    if not metrics.exists():
        return
    with metrics.open() as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


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
    files = [(WEIGHTS, "weights"), (CURVE, "loss curve"), (METRICS, "metrics")]
    lines += [f"{title:<11}{state / name}" for name, title in files if (state / name).exists()]
    return lines
