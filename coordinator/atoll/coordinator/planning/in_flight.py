"""How many microbatches each stage holds: enough to cover the way through the later stages and back, if memory allows it.

More is not always better. A stage computes the gradients of its weights when nothing else is ready, and a stage that may
hold many microbatches puts them all off until the end. So several numbers are simulated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.coordinator.planning.cuts import Layout, layout_loops, layout_pace
from atoll.coordinator.planning.prediction import Predictor

FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0)
"""Multiples of the number that keeps the way through the later stages and back busy."""
FEW_FACTORS = (1.5,)
WORTH = 1.004
"""A step may be this much longer when fewer microbatches in flight then suffice: memory is worth something too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A layout with the number of microbatches in flight at each stage, and its simulated step."""

    layout: Layout
    in_flight: tuple[int, ...]
    step_seconds: float


def choices(predictor: Predictor, layout: Layout, factors: tuple[float, ...] = FACTORS) -> list[tuple[int, ...]]:
    """Numbers worth simulating, the smaller first; all that memory holds is the last."""
    most = predictor.most_in_flight(layout)
    if predictor.constraints.in_flight is not None:
        return [most]
    pace = layout_pace(predictor.table, layout)
    if pace <= 0.0:
        return [most]
    loops = layout_loops(predictor.table, layout, pace)
    tried = [
        tuple(min(held, max(1, math.ceil(factor * loop / pace - 1e-9))) for held, loop in zip(most, loops, strict=True))
        for factor in factors
    ]
    return list(dict.fromkeys([*tried, most]))


def quickest(predictor: Predictor, layout: Layout, factors: tuple[float, ...] = FACTORS) -> Tuned:
    """The layout with the best of ``choices``."""
    tuned = [
        Tuned(layout=layout, in_flight=choice, step_seconds=predictor.step_seconds(layout, choice))
        for choice in choices(predictor, layout, factors)
    ]
    return min(tuned, key=lambda one: one.step_seconds)


def refine(predictor: Predictor, tuned: Tuned) -> Tuned:
    """One more or one fewer at single stages while that helps; then fewer wherever the step is hardly longer for it."""
    if predictor.constraints.in_flight is not None:
        return tuned
    most = predictor.most_in_flight(tuned.layout)
    improved = True
    while improved:
        improved = False
        for stage, held in enumerate(tuned.in_flight):
            for number in (held - 1, held + 1):
                if 1 <= number <= most[stage]:
                    other = _with(predictor, tuned, stage, number)
                    if other.step_seconds < tuned.step_seconds * (1.0 - 1e-6):
                        tuned, improved = other, True
                        break
    return _frugal(predictor, tuned)


def _frugal(predictor: Predictor, tuned: Tuned) -> Tuned:
    limit = tuned.step_seconds * WORTH
    for stage, held in enumerate(tuned.in_flight):
        low, high = 1, held
        while low < high:
            middle = (low + high) // 2
            if _with(predictor, tuned, stage, middle).step_seconds <= limit:
                high = middle
            else:
                low = middle + 1
        fewer = _with(predictor, tuned, stage, high)
        if high < held and fewer.step_seconds <= limit:
            tuned = fewer
    return tuned


def _with(predictor: Predictor, tuned: Tuned, stage: int, number: int) -> Tuned:
    in_flight = (*tuned.in_flight[:stage], number, *tuned.in_flight[stage + 1 :])
    return Tuned(layout=tuned.layout, in_flight=in_flight, step_seconds=predictor.step_seconds(tuned.layout, in_flight))
