"""Steps that are voided at random take as long as theory says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from atoll.coordinator.planning.goodput import expected_step_seconds


def average_seconds(step: float, per_hour: float, recovery: float, num_steps: int) -> float:
    """The same, tried out."""
    generator = np.random.default_rng(0)
    mean = 3600.0 / per_hour
    now, done, failure = 0.0, 0, generator.exponential(mean)
    while done < num_steps:
        if failure >= now + step:
            now += step
            done += 1
        else:
            now = failure + recovery
            failure += generator.exponential(mean)
            while failure < now:
                now = failure + recovery
                failure += generator.exponential(mean)
    return now / num_steps


@pytest.mark.parametrize(("step", "per_hour", "recovery"), [(10.0, 60.0, 5.0), (2.0, 3600.0, 1.0), (30.0, 100.0, 0.0)])
def test_it_is_the_average_of_many_steps(step: float, per_hour: float, recovery: float) -> None:
    expected = expected_step_seconds(step, failures_per_hour=per_hour, recovery_seconds=recovery)
    assert expected == pytest.approx(average_seconds(step, per_hour, recovery, 40_000), rel=0.03)


def test_without_failures_nothing_is_lost() -> None:
    assert expected_step_seconds(10.0, failures_per_hour=0.0) == 10.0
    assert expected_step_seconds(10.0, failures_per_hour=1e-6) == pytest.approx(10.0)


def test_rare_failures_cost_half_a_step_and_a_recovery_each() -> None:
    lost = expected_step_seconds(36.0, failures_per_hour=1.0, recovery_seconds=4.0) - 36.0
    assert lost == pytest.approx(0.01 * (18.0 + 4.0), rel=0.02)


@pytest.mark.parametrize(("step", "recovery"), [(10.0, 5.0), (1.0, 5.0), (5.0, 0.0)])
def test_where_failures_leave_no_time_for_a_step_it_takes_for_ever(step: float, recovery: float) -> None:
    assert expected_step_seconds(step, failures_per_hour=1e6, recovery_seconds=recovery) == math.inf
    assert expected_step_seconds(step, failures_per_hour=1e4, recovery_seconds=recovery) < math.inf
