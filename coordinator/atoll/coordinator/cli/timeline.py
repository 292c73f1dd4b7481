"""A simulated step as a picture: a lane for each stage, what it computes above, what it sends below. SVG, written by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from atoll.coordinator.planning.pipeline import Activity, Simulation, WorkKind

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1200, 170, 20, 60, 40
LANE, COMPUTE, SEND = 44, 22, 7
COLOURS = {
    WorkKind.FORWARD: "#4c78a8",
    WorkKind.BACKWARD: "#f58518",
    WorkKind.ACCUMULATE: "#eeca3b",
    WorkKind.UPDATE: "#72b7b2",
    WorkKind.SEND_FORWARD: "#9ecae9",
    WorkKind.SEND_BACKWARD: "#ffbf79",
    WorkKind.EXCHANGE: "#b279a2",
}
_COMPUTING = (WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.ACCUMULATE, WorkKind.UPDATE)
_TICKS = 10
_READABLE = 14
"""Pixels that a bar needs for the number of its microbatch."""


def timeline(lanes: Sequence[str], simulation: Simulation, title: str) -> str:
    """The picture of a step that was simulated with its activities recorded; ``lanes`` names each stage."""
    height = TOP + LANE * len(lanes) + BOTTOM
    scale = (WIDTH - LEFT - RIGHT) / max(simulation.step_seconds, 1e-9)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
        *_legend(),
        *_axis(simulation.step_seconds, scale, len(lanes)),
    ]
    for stage, name in enumerate(lanes):
        top = TOP + LANE * stage
        parts.append(f'<text x="{LEFT - 10}" y="{top + COMPUTE - 6}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{COMPUTE}" fill="#f4f4f4"/>')
    parts.extend(bar for activity in simulation.activities for bar in _bar(activity, scale))
    return "\n".join([*parts, "</svg>", ""])


def _bar(activity: Activity, scale: float) -> Iterator[str]:
    left = LEFT + scale * activity.start_seconds
    width = max(scale * (activity.end_seconds - activity.start_seconds), 0.3)
    computes = activity.kind in _COMPUTING
    top = TOP + LANE * activity.stage + _offset(activity.kind)
    label = f"{activity.kind} {activity.microbatch}, {activity.start_seconds:.4g}-{activity.end_seconds:.4g} s"
    yield (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{COMPUTE if computes else SEND}" '
        f'fill="{COLOURS[activity.kind]}"><title>{label}</title></rect>'
    )
    if computes and width >= _READABLE and activity.kind is not WorkKind.UPDATE:
        middle = left + width / 2.0
        yield f'<text x="{middle:.2f}" y="{top + COMPUTE - 7}" text-anchor="middle" font-size="10">{activity.microbatch}</text>'


def _offset(kind: WorkKind) -> int:
    """Below the lane's top: computing first, then what goes onward, then what goes back."""
    if kind in _COMPUTING:
        return 0
    return COMPUTE + 1 if kind is WorkKind.SEND_FORWARD else COMPUTE + 1 + SEND


def _legend() -> Iterator[str]:
    left = LEFT
    for kind, colour in COLOURS.items():
        yield f'<rect x="{left}" y="30" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{left + 16}" y="41">{kind}</text>'
        left += 32 + 7 * len(kind)


def _axis(seconds: float, scale: float, num_lanes: int) -> Iterator[str]:
    bottom = TOP + LANE * num_lanes
    step = _round(seconds / _TICKS)
    for number in range(int(seconds / step) + 1):
        x = LEFT + scale * number * step
        yield f'<line x1="{x:.2f}" y1="{TOP - 4}" x2="{x:.2f}" y2="{bottom}" stroke="#dddddd"/>'
        yield f'<text x="{x:.2f}" y="{bottom + 16}" text-anchor="middle">{number * step:.4g}</text>'
    yield f'<text x="{WIDTH - RIGHT}" y="{bottom + 32}" text-anchor="end">seconds</text>'


def _round(value: float) -> float:
    """The next larger 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(value, 1e-12)))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= value * (1.0 - 1e-9))
