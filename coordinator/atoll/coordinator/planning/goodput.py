"""What is left of a speed when steps are voided again and again. Pure."""

from __future__ import annotations

import math

SECONDS_AN_HOUR = 3600.0
RECOVERY_SECONDS = 5.0
"""From a failure until the step that it voided begins again, where everybody is still there: links open again."""


def expected_step_seconds(
    step_seconds: float, *, failures_per_hour: float, recovery_seconds: float = RECOVERY_SECONDS
) -> float:
    """How long a committed step takes on average while failures come at random, at that rate.

    A failure voids the step in progress, which begins again when the recovery is over; one that comes during a recovery
    restarts it.
    """
    rate = failures_per_hour / SECONDS_AN_HOUR
    if rate == 0.0:
        return step_seconds
    # The expected wait until no failure has come for t seconds is (exp(rate t) - 1) / rate; of the recoveries there is one for
    # each failed attempt, exp(rate t) - 1 of them.
    attempts = math.expm1(rate * step_seconds)
    return attempts / rate * (1.0 + math.expm1(rate * recovery_seconds))
