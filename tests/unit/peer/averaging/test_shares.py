"""How large a part of the sum each replica makes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.averaging.shares import shares

BANDWIDTHS = st.lists(st.floats(0.1, 1000.0), min_size=3, max_size=8)


def seconds(bandwidths: list[float], parts: tuple[float, ...]) -> float:
    """What a butterfly all-reduce of one value takes."""
    others = len(bandwidths) - 2
    return max((1.0 + others * part) / bandwidth for part, bandwidth in zip(parts, bandwidths, strict=True))


def test_equal_bandwidths_have_equal_shares() -> None:
    assert shares([7.0] * 4) == (0.25,) * 4
    assert shares([3.0, 90.0]) == (0.5, 0.5)
    assert shares([5.0]) == (1.0,)


def test_unknown_bandwidth_is_the_mean_of_the_known_ones() -> None:
    assert shares([10.0, None, 20.0]) == shares([10.0, 15.0, 20.0])
    assert shares([None, None, None]) == shares([1.0, 1.0, 1.0])


def test_slow_replica_owns_nothing_where_its_own_values_take_longest() -> None:
    assert shares([1.0, 100.0, 100.0]) == (0.0, 0.5, 0.5)


@given(BANDWIDTHS)
def test_shares_add_up_and_none_is_negative(bandwidths: list[float]) -> None:
    found = shares(bandwidths)
    assert sum(found) == pytest.approx(1.0)
    assert min(found) >= 0.0


@given(BANDWIDTHS)
def test_no_transfer_of_share_makes_it_faster(bandwidths: list[float]) -> None:
    found = shares(bandwidths)
    best = seconds(bandwidths, found)
    for giver in range(len(bandwidths)):
        for taker in range(len(bandwidths)):
            amount = min(0.01, found[giver])
            moved = tuple(part - amount * (index == giver) + amount * (index == taker) for index, part in enumerate(found))
            assert seconds(bandwidths, moved) >= best * (1 - 1e-9)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*interior-point.*:DeprecationWarning")
def test_as_fast_as_what_hivemind_finds() -> None:
    balancing = pytest.importorskip("hivemind.averaging.load_balancing")
    for bandwidths in ([10.0, 20.0, 40.0], [3.0, 3.0, 3.0, 30.0], [100.0, 20.0, 50.0, 80.0, 10.0]):
        theirs = balancing.load_balance_peers(10**6, bandwidths)
        took = seconds(bandwidths, tuple(count / 10**6 for count in theirs))
        assert seconds(bandwidths, shares(bandwidths)) <= took * 1.001
