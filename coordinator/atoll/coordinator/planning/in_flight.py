"""How many microbatches each stage holds: enough to cover the way through the later stages and back, if memory allows it.

More is not always better. A stage computes the gradients of its weights when nothing else is ready, and a stage that may
hold many microbatches puts them all off until the end. So several numbers are simulated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.coordinator.planning.layouts import Layout, layout_loops, layout_pace, layout_slowness, seat_parts
from atoll.coordinator.planning.prediction import Predictor

FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0)
"""Multiples of the number that keeps the way through the later stages and back busy."""
FEW_FACTORS = (1.5,)
WORTH = 1.004
"""A step may be this much longer when fewer microbatches in flight then suffice: memory is worth something too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A layout with the number of microbatches in flight at each seat, and its simulated step."""

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
    loops = layout_loops(predictor.table, layout, pace, layout_slowness(predictor.table, layout))
    needed = [loop * part / pace for loop, part in zip(loops, seat_parts(predictor.table, layout), strict=True)]
    tried = [
        tuple(min(held, max(1, math.ceil(factor * need - 1e-9))) for held, need in zip(most, needed, strict=True))
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


def refine(predictor: Predictor, tuned: Tuned, most_simulations: int) -> Tuned:
    """One more or one fewer at single stages while that helps; then fewer wherever the step is hardly longer for it."""
    if predictor.constraints.in_flight is not None:
        return tuned
    refinement = _Refinement(predictor, tuned, most_simulations // 2)
    refinement.climb()
    refinement.simulations_left += most_simulations // 2
    refinement.save()
    return refinement.tuned


class _Refinement:
    def __init__(self, predictor: Predictor, tuned: Tuned, most_simulations: int) -> None:
        self._predictor = predictor
        self._most = predictor.most_in_flight(tuned.layout)
        self.tuned = tuned
        self.simulations_left = most_simulations

    def climb(self) -> None:
        """Take any single change that makes the step shorter, until there is none."""
        improved = True
        while improved:
            improved = False
            for stage in range(len(self._most)):
                for change in (-1, 1):
                    other = self._with(stage, self.tuned.in_flight[stage] + change)
                    if other is not None and other.step_seconds < self.tuned.step_seconds * (1.0 - 1e-6):
                        self.tuned, improved = other, True
                        break

    def save(self) -> None:
        """The fewest at each stage, the first stage first, that keep the step hardly longer than it is now."""
        limit = self.tuned.step_seconds * WORTH
        for stage in range(len(self._most)):
            low, high = 1, self.tuned.in_flight[stage]
            while low < high:
                middle = (low + high) // 2
                fewer = self._with(stage, middle)
                if fewer is not None and fewer.step_seconds <= limit:
                    self.tuned, high = fewer, middle
                else:
                    low = middle + 1

    def _with(self, stage: int, number: int) -> Tuned | None:
        """The layout with ``number`` in flight at ``stage``; None where that is not possible or the effort is spent."""
        if self.simulations_left <= 0 or not 1 <= number <= self._most[stage]:
            return None
        self.simulations_left -= 1
        layout, held = self.tuned.layout, self.tuned.in_flight
        in_flight = (*held[:stage], number, *held[stage + 1 :])
        return Tuned(layout=layout, in_flight=in_flight, step_seconds=self._predictor.step_seconds(layout, in_flight))
