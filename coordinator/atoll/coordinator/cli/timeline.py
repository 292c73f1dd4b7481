"""A simulated step as a picture: a lane for each peer, what it computes above, what it sends below. SVG, written by hand.

The picture is light, and dark where the reader's own setting is; bars keep their colours on both. Colours stand as attributes
as well as in the style sheet, for programs that know no style sheets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from atoll.coordinator.planning.pipeline import Activity, Simulation, WorkKind

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1200, 190, 20, 74, 48
LANE, COMPUTE, SEND = 44, 22, 7
COLOURS = {
    WorkKind.FORWARD: "#6c9bd2",
    WorkKind.BACKWARD: "#f58518",
    WorkKind.ACCUMULATE: "#d9b61c",
    WorkKind.UPDATE: "#54a24b",
    WorkKind.FINISH: "#88c57f",
    WorkKind.SEND_FORWARD: "#4c78a8",
    WorkKind.SEND_BACKWARD: "#c0560b",
    WorkKind.EXCHANGE: "#b279a2",
    WorkKind.AVERAGE: "#9d755d",
}
_ONCE = (WorkKind.UPDATE, WorkKind.FINISH)
_COMPUTING = (WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.ACCUMULATE, *_ONCE)
_MEANING = {
    WorkKind.FORWARD: "forward",
    WorkKind.BACKWARD: "backward",
    WorkKind.ACCUMULATE: "gradients of weights",
    WorkKind.UPDATE: "update",
    WorkKind.FINISH: "norms of gradients",
    WorkKind.SEND_FORWARD: "sends activations",
    WorkKind.SEND_BACKWARD: "sends gradients",
    WorkKind.EXCHANGE: "sends shared parameters' gradients",
    WorkKind.AVERAGE: "sums gradients with replicas",
}
_TICKS = 10
_READABLE = 14
"""Pixels that a bar needs for the number of its microbatch."""
_LONGEST_NAME = 26
_STYLE = """<style>
.paper{fill:#ffffff}.ink{fill:#1b1b1b}.faint{fill:#5c5c5c}.idle{fill:#f1f1f1}.grid{stroke:#d4d4d4}.number{fill:#111111}
@media (prefers-color-scheme: dark){
.paper{fill:#16181d}.ink{fill:#eceff4}.faint{fill:#aab1bd}.idle{fill:#262a31}.grid{stroke:#454b55}}
</style>"""


def timeline(lanes: Sequence[str], simulation: Simulation, title: str, notes: Sequence[str] = ()) -> str:
    """The picture of a step that was simulated with its activities recorded; ``lanes`` names each stage, ``notes`` go below."""
    height = TOP + LANE * len(lanes) + BOTTOM + 16 * len(notes)
    scale = (WIDTH - LEFT - RIGHT) / max(simulation.step_seconds, 1e-9)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        _STYLE,
        f'<rect class="paper" width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(LEFT, 22, title, size=15, weight="bold"),
        *_legend(kind for kind in COLOURS if any(activity.kind is kind for activity in simulation.activities)),
        *(part for stage, name in enumerate(lanes) for part in _lane(stage, name)),
        *_axis(simulation.step_seconds, scale, len(lanes)),
        *(bar for activity in simulation.activities for bar in _bar(activity, scale)),
    ]
    for number, note in enumerate(notes):
        parts.append(_text(LEFT, TOP + LANE * len(lanes) + BOTTOM + 16 * number, note, tone="faint"))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, *, tone: str = "ink", anchor: str = "start", size: int = 12, weight: str = "") -> str:
    colour = {"ink": "#1b1b1b", "faint": "#5c5c5c", "number": "#111111"}[tone]
    bold = f' font-weight="{weight}"' if weight else ""
    place = f'x="{x:.2f}" y="{y}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text class="{tone}" fill="{colour}" {place}{bold}>{escape(text)}</text>'


def _lane(stage: int, name: str) -> Iterator[str]:
    top = TOP + LANE * stage
    shown = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
    yield f"<g><title>{escape(name)}</title>{_text(LEFT - 10, top + COMPUTE - 6, shown, anchor='end')}</g>"
    yield f'<rect class="idle" x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{COMPUTE}" fill="#f1f1f1"/>'


def _bar(activity: Activity, scale: float) -> Iterator[str]:
    left = LEFT + scale * activity.start_seconds
    width = max(scale * (activity.end_seconds - activity.start_seconds), 0.3)
    computes = activity.kind in _COMPUTING
    top = TOP + LANE * activity.stage + _offset(activity.kind)
    label = f"{_MEANING[activity.kind]} {activity.microbatch}, {activity.start_seconds:.4g}-{activity.end_seconds:.4g} s"
    yield (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{COMPUTE if computes else SEND}" '
        f'fill="{COLOURS[activity.kind]}"><title>{escape(label)}</title></rect>'
    )
    if computes and width >= _READABLE and activity.kind not in _ONCE:
        yield _text(left + width / 2.0, top + COMPUTE - 7, str(activity.microbatch), tone="number", anchor="middle", size=10)


def _offset(kind: WorkKind) -> int:
    """Below the lane's top: computing first, then what goes onward, then what goes back."""
    if kind in _COMPUTING:
        return 0
    return COMPUTE + 1 if kind is WorkKind.SEND_FORWARD else COMPUTE + 1 + SEND


def _legend(kinds: Iterator[WorkKind]) -> Iterator[str]:
    """What the colours mean, in a second row where the first is full, and what the numbers do."""
    left, top = LEFT, 32
    for kind in kinds:
        width = 34 + 7 * len(_MEANING[kind])
        if left + width > WIDTH - RIGHT:
            left, top = LEFT, top + 17
        yield f'<rect x="{left}" y="{top}" width="12" height="12" fill="{COLOURS[kind]}"/>'
        yield _text(left + 16, top + 11, _MEANING[kind])
        left += width
    yield _text(WIDTH - RIGHT, 22, "numbers: microbatches", tone="faint", anchor="end")


def _axis(seconds: float, scale: float, num_lanes: int) -> Iterator[str]:
    bottom = TOP + LANE * num_lanes
    step = _round(seconds / _TICKS)
    for number in range(int(seconds / step * (1.0 + 1e-9)) + 1):
        x = LEFT + scale * number * step
        yield f'<line class="grid" x1="{x:.2f}" y1="{TOP - 6}" x2="{x:.2f}" y2="{bottom}" stroke="#d4d4d4"/>'
        yield _text(x, bottom + 16, f"{number * step:.4g}", tone="faint", anchor="middle")
    yield _text(LEFT - 10, bottom + 16, "seconds", tone="faint", anchor="end")


def _round(value: float) -> float:
    """The next larger 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(value, 1e-12)))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= value * (1.0 - 1e-9))
