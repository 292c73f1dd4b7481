"""The learning-rate schedule and the clipping factor."""

from __future__ import annotations

import pytest
import torch

from atoll.coordinator.run.schedule import LearningRateSchedule, clip_factor


def test_warm_up_is_linear_and_ends_at_the_highest_rate() -> None:
    schedule = LearningRateSchedule(highest=1.0, steps=10, warmup=4, decay="cosine", final=0.1)
    assert [schedule.rate(step) for step in range(1, 5)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_decay_falls_to_the_final_share_at_the_last_step(decay: str) -> None:
    schedule = LearningRateSchedule(highest=2.0, steps=50, warmup=10, decay=decay, final=0.1)  # type: ignore[arg-type]
    rates = [schedule.rate(step) for step in range(10, 51)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 2.0
    assert rates[20] == pytest.approx(2.0 * 0.55)
    assert rates[-1] == pytest.approx(0.2)


def test_constant_stays() -> None:
    assert {LearningRateSchedule(highest=0.5, steps=5).rate(step) for step in range(1, 6)} == {0.5}


def test_a_warm_up_as_long_as_the_run() -> None:
    assert LearningRateSchedule(highest=1.0, steps=4, warmup=4, decay="linear").rate(4) == 1.0


@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_clipping_is_that_of_torch(size: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    parameter.grad = torch.full((3,), size, dtype=torch.float64)
    norm = float(torch.nn.utils.clip_grad_norm_([parameter], 1.0))
    assert parameter.grad[0].item() == pytest.approx(size * clip_factor(norm, 1.0), rel=1e-12)
    assert clip_factor(norm, None) == 1.0
