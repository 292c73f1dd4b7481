"""PowerSGD between replicas: exact where it can be, errors made up for, void steps undone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.compression.lowrank import PowerSGD


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def averaged(replicas: list[PowerSGD], gradients: list[Tensor], name: str = "weight") -> Tensor:
    """The mean gradient, as an all-reduce over all replicas makes it."""
    first = torch.stack([replica.first(name, one) for replica, one in zip(replicas, gradients, strict=True)]).mean(0)
    second = [replica.second(name, first) for replica in replicas]
    made = [one for one in second if one is not None]
    mean = torch.stack(made).mean(0) if made else None
    results = [replica.mean(name, mean) for replica in replicas]
    assert all(torch.equal(result.nan_to_num(), results[0].nan_to_num()) for result in results)
    return results[0]


def replicas(number: int = 3, rank: int = 2) -> list[PowerSGD]:
    return [PowerSGD(rank=rank, run_seed=5) for _ in range(number)]


@pytest.mark.parametrize("shape", [(40, 60), (16, 8, 3, 3)])
def test_a_mean_of_low_rank_is_exact(shape: tuple[int, ...]) -> None:
    rows, columns = shape[0], torch.Size(shape).numel() // shape[0]
    left = randn(rows, 2)
    gradients = [(left @ randn(2, columns, seed=seed)).reshape(shape) for seed in (1, 2, 3)]
    mean = averaged(replicas(), gradients)
    assert mean.shape == shape
    assert torch.allclose(mean, torch.stack(gradients).mean(0), atol=1e-4)


@pytest.mark.parametrize("shape", [(), (7,), (3, 2), (0, 5), (1, 50)])
def test_what_factors_would_not_shorten_is_averaged_as_it_is(shape: tuple[int, ...]) -> None:
    group = replicas()
    gradients = [randn(*shape, seed=seed) for seed in (1, 2, 3)]
    assert torch.equal(averaged(group, gradients), torch.stack(gradients).mean(0))
    assert group[0].num_bytes(shape, torch.float32) == 4 * torch.Size(shape).numel()


def test_factors_take_the_bytes_that_are_estimated() -> None:
    replica = replicas(1)[0]
    first = replica.first("weight", randn(40, 60))
    second = replica.second("weight", first)
    assert second is not None
    assert first.nbytes + second.nbytes == replica.num_bytes((40, 60), torch.float32) == 4 * 2 * 100


def test_what_a_step_loses_comes_with_later_ones() -> None:
    """The same full-rank gradients again and again: the sum of what was applied stays near the sum of the means."""
    group, gradients = replicas(), [randn(40, 60, seed=seed) for seed in (1, 2, 3)]
    mean = torch.stack(gradients).mean(0)
    total, lost = torch.zeros(40, 60), []
    for step in range(1, 201):
        total += averaged(group, gradients)
        for replica in group:
            replica.commit()
        lost.append(float((total / step - mean).norm() / mean.norm()))
    assert lost[0] > 0.9
    assert lost[-1] < 0.15
    assert lost[-1] < 0.6 * lost[99]


@pytest.mark.parametrize("keeps_errors", [True, False])
def test_training_converges_with_error_feedback_and_not_without(keeps_errors: bool) -> None:
    """Least squares in 400 weights on two replicas, rank 1."""
    weights, wanted = torch.zeros(20, 20), randn(20, 20)
    inputs = [randn(64, 20, seed=seed) for seed in (1, 2)]
    group = replicas(2, rank=1)
    for _ in range(400):
        gradients = [part.t() @ (part @ (weights - wanted)) / 64 for part in inputs]
        weights = weights - 0.05 * averaged(group, gradients)
        for replica in group:
            replica.commit()
            if not keeps_errors:
                replica.reset()
    error = float((weights - wanted).norm() / wanted.norm())
    assert error < 0.05 if keeps_errors else error > 0.1


def test_a_void_step_changes_nothing() -> None:
    plain, disturbed = replicas(2), replicas(2)
    gradients = [[randn(40, 60, seed=10 * step + seed) for seed in (1, 2)] for step in range(4)]
    for step in range(4):
        for replica in disturbed:
            replica.first("other", randn(9, 9))
        averaged(disturbed, [randn(40, 60, seed=99)] * 2)
        disturbed[0].first("weight", randn(40, 60, seed=98))
        for replica in disturbed:
            replica.void()
        assert torch.equal(averaged(disturbed, gradients[step]), averaged(plain, gradients[step]))
        for replica in plain + disturbed:
            replica.commit()


def test_a_reset_makes_it_as_new() -> None:
    used, gradients = replicas(2), [randn(40, 60, seed=seed) for seed in (1, 2)]
    averaged(used, [randn(40, 60, seed=7)] * 2)
    for replica in used:
        replica.commit()
        replica.reset()
    assert torch.equal(averaged(used, gradients), averaged(replicas(2), gradients))


def test_zeros_stay_zeros_and_what_is_not_finite_shows() -> None:
    assert torch.equal(averaged(replicas(), [torch.zeros(40, 60)] * 3), torch.zeros(40, 60))
    broken = randn(40, 60)
    broken[3, 4] = float("nan")
    assert not bool(averaged(replicas(), [broken, randn(40, 60), randn(40, 60)]).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_mean_has_the_type_of_the_gradient(dtype: torch.dtype) -> None:
    assert averaged(replicas(), [randn(40, 60).to(dtype)] * 3).dtype == dtype
