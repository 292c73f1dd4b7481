"""Whether it pays to wait for a peer that is out of reach: by how long absences lasted, and what its return saves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.run.absences import Absences, PatienceSettings, patience_seconds
from atoll.protocol.ids import PeerId

A, B = PeerId("a"), PeerId("b")
EXACT = PatienceSettings(margin=1.0)


@pytest.mark.parametrize(("saved", "patience"), [(90.0, 0.0), (100.0, 18.75), (400.0, 75.0), (3600.0, 300.0)])
def test_before_anybody_was_away_the_wait_grows_with_what_it_saves(saved: float, patience: float) -> None:
    assert Absences(PatienceSettings()).patience_seconds(0.0, saved, 0.0) == patience


def test_where_peers_came_back_soon_little_is_worth_a_short_wait() -> None:
    absences = Absences(PatienceSettings())
    for number in range(20):
        absences.gone(A, 100.0 * number)
        absences.back(A, 100.0 * number + 4.0, with_state=True)
    assert absences.patience_seconds(0.0, 20.0, 2000.0) == 5.0
    assert absences.patience_seconds(4.0, 20.0, 2000.0) == 1.0
    assert absences.patience_seconds(5.0, 20.0, 2000.0) == 0.0, "it is not as all the others were"


def test_where_nobody_ever_came_back_with_what_it_held_nobody_is_waited_for() -> None:
    absences = Absences(PatienceSettings())
    for number in range(50):
        absences.gone(A, 100.0 * number)
        absences.back(A, 100.0 * number + 4.0, with_state=False)
    assert absences.patience_seconds(0.0, 300.0, 5000.0) == 0.0


def test_whoever_stays_away_counts_as_one_that_never_returns() -> None:
    absences = Absences(PatienceSettings())
    for peer in (A, B):
        absences.gone(peer, 0.0)
    assert absences.seconds(100.0).count(math.inf) == 2
    assert absences.seconds(601.0).count(math.inf) == 4
    absences.back(A, 602.0, with_state=True)
    assert absences.seconds(602.0).count(math.inf) == 3
    absences.back(A, 603.0, with_state=True)
    assert absences.seconds(603.0).count(602.0) == 1, "it was not away in between"


lasting = st.lists(st.floats(0.1, 500.0) | st.just(math.inf), max_size=12)


@given(absences=lasting, gone=st.floats(0.0, 500.0), saved=st.floats(0.0, 5000.0), other=st.floats(0.0, 600.0))
def test_no_other_wait_is_expected_to_lose_less(absences: list[float], gone: float, saved: float, other: float) -> None:
    longer = [seconds - gone for seconds in absences if seconds > gone]

    def lost(limit: float) -> float:
        return sum(seconds if seconds <= limit else limit + saved for seconds in longer)

    assert lost(patience_seconds(absences, gone, saved, EXACT)) <= lost(other) + 1e-6


@given(absences=lasting, saved=st.floats(0.0, 5000.0), share=st.floats(0.0, 0.99))
def test_the_end_of_a_wait_does_not_move_while_it_lasts(absences: list[float], saved: float, share: float) -> None:
    whole = patience_seconds(absences, 0.0, saved, EXACT)
    left = patience_seconds(absences, share * whole, saved, EXACT)
    assert left == pytest.approx((1.0 - share) * whole, abs=1e-6)
