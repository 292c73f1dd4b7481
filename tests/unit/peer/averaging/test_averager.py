"""What all members of a round get."""

from __future__ import annotations

import torch

from atoll.peer.averaging.averager import flat, unflat, weighted_sum


def test_weighted_sum_is_in_the_groups_order() -> None:
    large, small = torch.tensor([1e8]), torch.tensor([1.0])
    assert weighted_sum([large, -large, small], [1.0] * 3).item() == 1.0
    assert weighted_sum([large, small, -large], [1.0] * 3).item() == 0.0


def test_weights_and_divisor_make_a_mean() -> None:
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([4.0, 8.0])]
    assert weighted_sum(parts, [3.0, 1.0], 4.0).tolist() == [1.75, 3.5]


def test_bits_do_not_depend_on_the_place_in_a_tensor() -> None:
    parts = [torch.randn(1003, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    weights = [0.3, 0.7, 1.1]
    whole = weighted_sum(parts, weights, 2.1)
    for cut in (1, 2, 3, 5, 8, 500):
        pieces = [weighted_sum([part[first : first + cut] for part in parts], weights, 2.1) for first in range(0, 1003, cut)]
        assert torch.equal(torch.cat(pieces), whole)


def test_what_is_brought_is_not_changed() -> None:
    parts = [torch.ones(4), torch.ones(4)]
    weighted_sum(parts, [1.0, 1.0])
    assert all(torch.equal(part, torch.ones(4)) for part in parts)
    flat(parts).zero_()
    assert torch.equal(parts[0], torch.ones(4))


def test_flat_and_back() -> None:
    tensors = [torch.arange(6.0).reshape(2, 3), torch.tensor(7.0), torch.empty(0, 3), torch.ones(2, dtype=torch.bfloat16)]
    back = unflat(flat(tensors), tensors)
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(back, tensors, strict=True))
    assert flat([]).shape == (0,)
