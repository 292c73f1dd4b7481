"""Curves of what codec_quality.py measured, as SVG: the loss against steps, and against time on slow links.

The time is worked out, not measured: the stages of the model on a processor each, like the one that was measured, with a link
of a given rate between neighbours; computing, encoding, sending and decoding go on at once, as the policy of links counts them.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from atoll.compression.policy import Demand, Pace, Rung
from cut_model import Outcome, Training

LINK_BITS_PER_SECOND = 8e6
FP32_BITS = 32


def step_seconds(training: Training, run: Outcome, bits_per_second: float) -> float:
    """What a step takes on such links."""
    crossings = training.steps * training.microbatches
    computing = (run.seconds - run.coding_seconds) / crossings
    ends = 4 * (training.stages - 1)  # of each boundary two ways, and two ends each
    raw_bytes = training.sequences * training.context * training.width * FP32_BITS / 8
    coding = raw_bytes * ends * crossings / max(run.coding_seconds, 1e-9)
    pace = Pace(
        microbatch_seconds=computing / training.stages,
        num_microbatches=training.microbatches,
        fill_seconds=computing * (training.stages - 1) / training.stages,
    )
    demand = Demand(raw_bytes=raw_bytes, bytes_per_second=bits_per_second / 8)
    rungs = [
        Rung(
            name=way, ratio=run.bits[f"{way} late"] / FP32_BITS, encode_bytes_per_second=coding, decode_bytes_per_second=coding
        )
        for way in ("forward", "backward")
    ]
    slowest = max(max(demand.carried(rung)) for rung in rungs)
    late = max(0.0, slowest - pace.microbatch_seconds) * (training.microbatches - 1)
    passing = sum(sum(demand.carried(rung)) for rung in rungs) * (training.stages - 1)  # once a step nothing hides them
    return pace.ideal_seconds + late + passing


def means(runs: list[Outcome]) -> dict[str, list[tuple[int, float]]]:
    """By pair, the mean curve over the seeds."""
    found: dict[str, list[Outcome]] = defaultdict(list)
    for run in runs:
        found[run.pair].append(run)
    return {
        pair: [(points[0][0], mean(loss for _, loss in points)) for points in zip(*(run.curve for run in group), strict=True)]
        for pair, group in found.items()
    }


def draw(training: Training, runs: list[Outcome], folder: Path) -> None:
    """Writes codecs_steps.svg and codecs_8_mbps.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    curves = means(runs)
    seconds = {
        pair: mean(step_seconds(training, run, LINK_BITS_PER_SECOND) for run in runs if run.pair == pair) for pair in curves
    }
    _plot(
        {pair: [(float(step), loss) for step, loss in curve] for pair, curve in curves.items()},
        "steps",
        folder / "codecs_steps.svg",
    )
    timed = {pair: [(step * seconds[pair] / 60, loss) for step, loss in curve] for pair, curve in curves.items()}
    _plot(timed, "minutes, 8 Mbps between stages", folder / "codecs_8_mbps.svg")


def _plot(curves: dict[str, list[tuple[float, float]]], axis: str, path: Path) -> None:
    figure = Figure(figsize=(8, 5), layout="tight")
    axes = figure.add_subplot()
    for pair, curve in curves.items():
        forward, _, backward = pair.partition(":")
        axes.plot(*zip(*curve, strict=True), label=forward if forward == backward else f"{forward} / {backward}", linewidth=1.2)
    axes.set_xlabel(axis)
    axes.set_ylabel("validation loss without codecs, nats a byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="svg", metadata={"Date": None})
