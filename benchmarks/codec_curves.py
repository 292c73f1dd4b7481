"""Curves of what codec_quality.py measured, as SVG: the loss against steps, and against time on slow links.

The time is worked out, not measured: the planner's simulator (``slow_links``) is told what was measured of computing, encoding
and decoding on one processor, and what crossed; each stage has such a processor, and neighbours a link of a given rate. Runs
with ``auto`` have a clock of their own, made in the same way step by step.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from cut_training import AUTO, Outcome, Training
from slow_links import Crossed, step_seconds

LINK_MBPS = 8.0
Curve = list[tuple[float, float]]


def seconds_of_step(training: Training, run: Outcome, crossing_values: int) -> float:
    """What a late step takes on such links; ``crossing_values`` are those of a microbatch at a boundary."""
    crossings = training.steps * training.microbatches
    coding = run.coding_seconds / (2 * (training.stages - 1) * crossings)
    there, back = (
        Crossed(num_bytes=run.bits[f"{way} late"] * crossing_values / 8.0, coding_seconds=coding)
        for way in ("forward", "backward")
    )
    return step_seconds(
        stage_seconds=(run.seconds - run.coding_seconds) / crossings / training.stages,
        microbatches=training.microbatches,
        links=[(there, back)] * (training.stages - 1),
        bits_per_second=1e6 * LINK_MBPS,
    )


def by_steps(runs: list[Outcome]) -> dict[str, Curve]:
    """By pair, the mean curve over the seeds."""
    return {
        pair: [
            (float(points[0][0]), mean(loss for _, loss in points))
            for points in zip(*(run.curve for run in group), strict=True)
        ]
        for pair, group in _groups(runs).items()
    }


def by_minutes(training: Training, runs: list[Outcome], crossing_values: int) -> dict[str, Curve]:
    """The same against time; without those whose policy chose for links of another rate."""
    found = {}
    for pair, group in _groups(runs).items():
        losses = [loss for _, loss in by_steps(group)[pair]]
        if not pair.startswith(AUTO):
            taken = mean(seconds_of_step(training, run, crossing_values) for run in group)
            found[pair] = [(step * taken / 60, loss) for (step, _), loss in zip(group[0].curve, losses, strict=True)]
        elif float(pair.removeprefix(AUTO)) == LINK_MBPS:
            clocks = zip(*(run.elapsed for run in group), strict=True)
            found[pair] = [(mean(clock) / 60, loss) for clock, loss in zip(clocks, losses, strict=True)]
    return found


def draw(training: Training, runs: list[Outcome], folder: Path) -> None:
    """Writes codecs_steps.svg, and of a GPT codecs_8_mbps.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "codecs" if training.model == "gpt" else f"codecs_{training.model}"
    _plot(by_steps(runs), "steps", folder / f"{name}_steps.svg")
    if training.model == "gpt":
        values = training.sequences * training.context * training.width
        _plot(by_minutes(training, runs, values), "minutes, 8 Mbps between stages", folder / f"{name}_8_mbps.svg")


def _groups(runs: list[Outcome]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = defaultdict(list)
    for run in runs:
        found[run.pair].append(run)
    return found


def _plot(curves: dict[str, Curve], axis: str, path: Path) -> None:
    figure = Figure(figsize=(8, 5), layout="tight")
    axes = figure.add_subplot()
    for pair, curve in curves.items():
        forward, _, backward = pair.partition(":")
        label = forward if forward == backward or not backward else f"{forward} / {backward}"
        axes.plot(*zip(*curve, strict=True), label=label, linewidth=1.2)
    axes.set_xlabel(axis)
    axes.set_ylabel("validation loss without codecs")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="svg", metadata={"Date": None})
