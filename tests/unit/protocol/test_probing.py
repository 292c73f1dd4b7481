"""The probe against links that are computed: a sender, a receiver, and what lies between."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol.probing import LoadSender, RateEstimator

Arrival = Callable[[float, int], float]


def shaped(rate: float, burst: float = 0.0) -> Arrival:
    """When what is sent has passed a link of ``rate``, whose first ``burst`` bytes pass at once."""
    free, left = 0.0, burst

    def pass_through(now: float, size: int) -> float:
        nonlocal free, left
        at_once = min(left, size)
        left -= at_once
        free = max(free, now) + (size - at_once) / rate
        return free

    return pass_through


def run(
    link: Arrival, round_trip: float, *, max_seconds: float = 4.0, max_bytes: int = 2**28
) -> tuple[float | None, float, int]:
    """The estimate, how long it took, and how many bytes."""
    limits = {"max_seconds": max_seconds, "max_bytes": max_bytes, "round_trip_seconds": round_trip}
    sender, receiver = LoadSender(0.0, **limits), RateEstimator(0.0, **limits)  # type: ignore[arg-type]
    now, events, order = 0.0, [(0.0, 0, "send", 0)], 0
    sent = 0
    while events:
        now, _, what, size = heapq.heappop(events)
        if what == "arrive":
            receiver.arrived(size, now)
            order += 1
            heapq.heappush(events, (now + round_trip / 2, order, "report", receiver.num_bytes))
            if receiver.enough(now):
                break
        elif what == "report":
            sender.progressed(size, False, now)
        while not sender.finished(now) and (size := sender.next_bytes()):
            sender.sent(size)
            sent += size
            order += 1
            heapq.heappush(events, (link(now, size) + round_trip / 2, order, "arrive", size))
    return receiver.bytes_per_second(), now, sent


@given(st.floats(1e4, 2e8), st.floats(1e-4, 0.3))
@settings(max_examples=60)
def test_the_rate_of_a_steady_link_is_found(rate: float, round_trip: float) -> None:
    found, seconds, _ = run(shaped(rate), round_trip)
    assert found == pytest.approx(rate, rel=0.1)
    assert seconds <= 4.0 + 64 * 1024 / rate + 1.0


def test_a_fast_link_takes_less_than_a_second() -> None:
    _, seconds, sent = run(shaped(12.5e6), 0.02)
    assert seconds < 1.0
    assert sent < 12.5e6


def test_what_a_shaper_lets_through_at_once_does_not_count() -> None:
    found, _, _ = run(shaped(1e6, burst=2e6), 0.02)
    assert found == pytest.approx(1e6, rel=0.1)


def test_it_never_takes_more_than_the_bytes_it_may() -> None:
    _, _, sent = run(shaped(1e9), 0.01, max_bytes=5 * 10**6)
    assert sent <= 5 * 10**6


def test_it_ends_in_time_where_the_rate_never_settles() -> None:
    rates = iter([1e6, 3e6] * 1000)
    free = 0.0

    def restless(now: float, size: int) -> float:
        nonlocal free
        free = max(free, now) + size / next(rates)
        return free

    found, seconds, _ = run(restless, 0.4, max_seconds=2.0)
    assert found is not None
    assert 0.8e6 < found < 3.2e6
    assert seconds < 3.0


@pytest.mark.parametrize(("rate", "most"), [(1_000_000, 3 * 80_000), (125_000, 20_000), (31_250, 20_000)])
def test_little_is_under_way_when_it_ends(rate: int, most: int) -> None:
    """What was sent and has not arrived waits in front of the end, and of the next probe."""
    sender = LoadSender(0.0, max_seconds=4.0, max_bytes=2**28, round_trip_seconds=0.08)
    arrived, now = 0, 0.0
    for _ in range(300):
        while size := sender.next_bytes():
            sender.sent(size)
        now += 0.01
        arrived += rate // 100
        sender.progressed(arrived, False, now)
    assert sender._sent - arrived < most


def test_the_first_arrival_alone_says_nothing() -> None:
    estimator = RateEstimator(0.0, max_seconds=1.0, max_bytes=100, round_trip_seconds=0.01)
    assert estimator.bytes_per_second() is None
    estimator.arrived(50, 0.1)
    assert estimator.bytes_per_second() is None
    estimator.arrived(50, 0.2)
    assert estimator.bytes_per_second() == pytest.approx(500.0)
    assert estimator.enough(0.2)


def test_a_sender_stops_when_it_is_told() -> None:
    sender = LoadSender(0.0, max_seconds=4.0, max_bytes=2**20, round_trip_seconds=0.01)
    assert not sender.finished(1.0)
    assert sender.finished(4.0)
    sender.progressed(10**9, True, 1.0)  # more than was sent: not believed
    assert sender.finished(1.0)
    assert sender.next_bytes() > 0
