"""How a peer looks for a coordinator that is gone: soon at first, then with patience, and not for ever."""

from __future__ import annotations

import pytest

from atoll.peer.session.returning import SETTLED_SECONDS, Returning
from atoll.peer.settings import Patience

PATIENCE = Patience(first_pause=1.0, longest_pause=5.0, between_logs=60.0, end=1800.0)


def pauses(returning: Returning, count: int, draw: float = 1.0) -> list[float]:
    return [returning.pause_seconds(draw) for _ in range(count)]


def test_pauses_double_up_to_a_bound() -> None:
    assert pauses(Returning(PATIENCE), 6) == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0]


def test_a_pause_is_drawn_from_the_upper_half() -> None:
    assert pauses(Returning(PATIENCE), 2, draw=0.0) == [0.5, 1.0]


def test_peers_do_not_come_in_the_same_moment() -> None:
    assert len({Returning(PATIENCE).pause_seconds(draw / 10) for draw in range(10)}) == 10


def test_a_short_visit_does_not_begin_anew() -> None:
    returning = Returning(PATIENCE)
    returning.lost(0.0)
    pauses(returning, 3)
    returning.welcomed(10.0)
    returning.lost(11.0)
    assert returning.pause_seconds(1.0) == 5.0
    returning.welcomed(20.0)
    returning.lost(20.0 + SETTLED_SECONDS)
    assert returning.pause_seconds(1.0) == 1.0


def test_time_alone_is_counted_from_the_first_loss() -> None:
    returning = Returning(PATIENCE)
    assert returning.away_seconds(5.0) == 0.0
    returning.lost(10.0)
    returning.lost(500.0)
    assert returning.away_seconds(510.0) == 500.0
    assert not returning.is_over(1809.0)
    assert returning.is_over(1810.0)
    returning.welcomed(1811.0)
    assert not returning.is_over(5000.0)


def test_state_is_kept_once_each_time_that_the_peer_is_alone() -> None:
    returning = Returning(PATIENCE)
    for began in (0.0, 1000.0):
        returning.lost(began)
        assert [now for now in range(0, 200, 10) if returning.is_to_keep(began + now)] == [60]
        returning.welcomed(began + 300.0)
        assert not returning.is_to_keep(began + 400.0)


def test_people_hear_of_it_at_once_and_then_seldom() -> None:
    returning = Returning(PATIENCE)
    returning.lost(0.0)
    assert [now for now in range(0, 130, 5) if returning.is_to_log(now)] == [0, 60, 120]
    returning.welcomed(130.0)
    returning.lost(131.0)
    assert returning.is_to_log(131.0)


@pytest.mark.parametrize("count", [10**4])
def test_no_number_of_attempts_is_too_large(count: int) -> None:
    assert pauses(Returning(PATIENCE), count)[-1] == 5.0
