"""What is left of a speed when steps are voided again and again. Pure."""

from __future__ import annotations

import math

SECONDS_AN_HOUR = 3600.0
LARGEST_EXPONENT = 700.0
"""A little beyond it exponentials are larger than any float."""
RECOVERY_SECONDS = 5.0
"""From a failure until the step that it voided begins again, where everybody is still there: links open again. A guess."""


def expected_step_seconds(
    step_seconds: float, *, failures_per_hour: float, recovery_seconds: float = RECOVERY_SECONDS
) -> float:
    """How long a committed step takes on average while failures come at random, at that rate.

    A failure voids the step in progress, which begins again when the recovery is over; one that comes during a recovery
    restarts it. Infinite where hardly any step would ever be committed. The loss of a replica voids the step like any other.
    """
    rate = failures_per_hour / SECONDS_AN_HOUR
    if rate == 0.0:
        return step_seconds
    # The expected wait until no failure has come for t seconds is (exp(rate t) - 1) / rate; of the recoveries there is one for
    # each failed attempt, exp(rate t) - 1 of them.
    if rate * (step_seconds + recovery_seconds) > LARGEST_EXPONENT:
        return math.inf
    return math.expm1(rate * step_seconds) / rate * math.exp(rate * recovery_seconds)
