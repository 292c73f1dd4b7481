"""Microbatches are dealt by weight, evenly, and always alike."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.planning.dealing import deal, deal_to_all

WEIGHTS = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=6)


def test_equal_replicas_take_turns() -> None:
    assert deal([1.0, 1.0, 1.0], 7) == (0, 1, 2, 0, 1, 2, 0)


def test_a_replica_of_thrice_the_speed_gets_three_of_four() -> None:
    dealt = deal([3.0, 1.0], 8)
    assert dealt == (0, 0, 1, 0, 0, 0, 1, 0)


def test_one_fast_replica_beside_three_slow_ones() -> None:
    dealt = deal([3.0, 1.0, 1.0, 1.0], 12)
    assert [dealt.count(index) for index in range(4)] == [6, 2, 2, 2]


@given(WEIGHTS, st.integers(0, 40))
def test_everybody_has_its_share_up_to_any_microbatch(weights: list[float], num_microbatches: int) -> None:
    dealt = deal(weights, num_microbatches)
    assert len(dealt) == num_microbatches
    for index, weight in enumerate(weights):
        share = weight / sum(weights)
        had = accumulate(int(chosen == index) for chosen in dealt)
        # Nobody is ever ahead by a whole microbatch, nor behind by as many as there are others.
        assert all(-len(weights) < taken - share * count < 1 + 1e-9 for count, taken in enumerate(had, 1))


@given(WEIGHTS, st.integers(0, 40), st.integers(0, 40))
def test_fewer_microbatches_are_dealt_as_the_first_of_more(weights: list[float], few: int, more: int) -> None:
    assert deal(weights, few + more)[:few] == deal(weights, few)


@given(WEIGHTS, st.integers(0, 30))
def test_everybody_gets_one_who_must(weights: list[float], more: int) -> None:
    num_microbatches = len(weights) + more
    dealt = deal_to_all(weights, num_microbatches)
    assert set(dealt) == set(range(len(weights)))
    before = deal(weights, num_microbatches)
    assert sum(one != other for one, other in zip(dealt, before, strict=True)) == len(weights) - len(set(before))


def test_more_replicas_than_microbatches_are_refused() -> None:
    with pytest.raises(ValueError, match="2 microbatches are too few for 3 replicas"):
        deal_to_all([1.0] * 3, 2)


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [1.0, -1.0], [float("nan")], [float("inf")]])
def test_weights_must_be_positive_numbers(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights above 0"):
        deal(weights, 4)
