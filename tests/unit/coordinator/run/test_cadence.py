"""How often a snapshot is taken: near the best that trying all intervals finds, and by what is seen."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.run.cadence import EXPECTED_SECONDS, FIRST_STEP, Cadence, Costs, best_interval_seconds, best_steps


def wasted(interval: float, cost: float, between_losses: float) -> float:
    """The part of the time that does not train, with losses at random moments: Daly's exact model without a restart."""
    return between_losses * (math.exp((interval + cost) / between_losses) - 1.0) / interval - 1.0


@given(cost=st.floats(0.001, 100.0), between=st.floats(60.0, 1e6))
def test_no_other_interval_wastes_noticeably_less(cost: float, between: float) -> None:
    if cost > between / 4:
        return
    chosen = wasted(best_interval_seconds(cost, between), cost, between)
    best = min(wasted(between * 10 ** (power / 50.0), cost, between) for power in range(-300, 50))
    assert chosen <= 1.02 * best + 1e-9


def test_it_is_young_s_where_snapshots_are_cheap() -> None:
    assert best_interval_seconds(0.01, 3600.0) == pytest.approx(math.sqrt(2 * 0.01 * 3600.0), rel=0.01)


def test_a_snapshot_that_costs_more_than_losses_is_taken_once_between_two() -> None:
    assert best_interval_seconds(100.0, 40.0) == 40.0


@given(cost=st.floats(0.0, 1e4), step=st.floats(1e-4, 1e4), between=st.floats(1.0, 1e7))
def test_there_is_always_a_number_of_steps(cost: float, step: float, between: float) -> None:
    assert best_steps(Costs(snapshot_seconds=cost, step_seconds=step), between) >= 1


def test_a_fixed_number_is_kept_whatever_is_seen() -> None:
    cadence = Cadence(7)
    cadence.cost(100.0)
    cadence.lost()
    assert cadence.steps(1.0) == 7


def test_the_first_snapshot_comes_early_and_later_ones_follow_its_cost_and_the_losses() -> None:
    cadence = Cadence(None)
    assert cadence.steps(0.5) == FIRST_STEP
    cadence.cost(0.5)
    before = cadence.steps(0.5)
    assert before == round(best_interval_seconds(0.5, EXPECTED_SECONDS) / 0.5)
    cadence.lost()
    assert cadence.steps(0.5) < before
    for _ in range(5):
        cadence.cost(8.0)
    assert cadence.steps(0.5) > before


def test_time_without_losses_makes_snapshots_rarer() -> None:
    cadence = Cadence(None)
    cadence.cost(0.5)
    before = cadence.steps(1.0)
    cadence.trained(10 * EXPECTED_SECONDS)
    assert cadence.steps(1.0) > 2 * before
