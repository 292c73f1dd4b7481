"""What a search judges layouts by beside their steps: crowded machines, replicas that bring next to nothing or are missing, and
what a change from the present layout costs.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.coordinator.planning.layouts import Layout, layout_excess
from atoll.coordinator.planning.prediction import Predictor

CROWDED = 0.01
"""By how much of its step a stage must make a pipeline faster where all cores of its machine are taken: switching between
threads costs caches and memory bandwidth, which the simulator does not know. How much is a guess."""
WORTH_A_REPLICA = 0.02
"""By how much of its step each further replica must make a pipeline faster, for measurements waver: a guess. It costs links and
memory, and a peer that is left over takes the place of one that is lost."""
MISSING = 1e6
"""Seconds for each replica that was asked for and is not there."""

Penalty = Callable[[Layout], float]
"""Seconds by which each step of a layout counts as longer than it is."""
Judge = Callable[[float, Layout], float]
"""What a layout is judged by whose step takes so many seconds."""


def judge_of(predictor: Predictor, penalty: Penalty | None) -> Judge:
    """How layouts of the predictor's peers are compared."""
    wanted = predictor.constraints.num_replicas

    def judge(seconds: float, layout: Layout) -> float:
        share, missing = CROWDED * layout_excess(predictor.table, layout), 0
        if wanted is None:
            share += WORTH_A_REPLICA * layout.num_helpers
        elif wanted > 1:
            missing = _missing(predictor, layout, wanted)
        return seconds * (1.0 + share) + MISSING * missing + (penalty(layout) if penalty is not None else 0.0)

    return judge


def _missing(predictor: Predictor, layout: Layout, wanted: int) -> int:
    """How many replicas there are fewer than asked for, at stages that may have several."""
    changing, missing = predictor.segments.changing, 0
    for group, first, end in zip(layout.groups, layout.bounds[:-1], layout.bounds[1:], strict=True):
        if not any(first <= segment < end for segment in changing):
            missing += max(0, wanted - len(group))
    return missing


def without_replicas(layout: Layout) -> Layout:
    """The leaders alone."""
    return Layout(layout.peers, layout.bounds, layout.recompute)
