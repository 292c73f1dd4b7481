"""Orders are permutations, seeded, and cost nothing to hold."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.data.order import Permutation


@given(size=st.integers(1, 700), key=st.text(max_size=5))
def test_every_number_is_at_exactly_one_position(size: int, key: str) -> None:
    permutation = Permutation(size, key)

    assert sorted(permutation[position] for position in range(size)) == list(range(size))


def test_the_key_decides_the_order() -> None:
    first, same, other = (
        [permutation[position] for position in range(200)]
        for permutation in (Permutation(200, "a"), Permutation(200, "a"), Permutation(200, "b"))
    )

    assert first == same
    assert first != other
    assert first != sorted(first)


def test_positions_are_spread_evenly() -> None:
    """The mean of where the first tenth goes is near the middle, for many keys."""
    size = 10_000
    mean = sum(Permutation(size, str(key))[position] for key in range(20) for position in range(100)) / 2000

    assert abs(mean / size - 0.5) < 0.03


def test_a_huge_order_is_not_held() -> None:
    permutation = Permutation(10**12, "large")

    assert 0 <= permutation[10**12 - 1] < 10**12
    assert sum(sys.getsizeof(value) for value in vars(permutation).values()) < 1000


def test_a_position_outside_is_refused() -> None:
    with pytest.raises(IndexError):
        Permutation(3, "")[3]
