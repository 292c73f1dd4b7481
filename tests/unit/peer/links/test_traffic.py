"""What a link's own traffic says of it, on links that are computed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.peer.links.traffic import LinkTraffic
from atoll.peer.links.usage import UsageTable
from atoll.protocol.courtesy import Courtesy
from atoll.protocol.ids import PeerId
from atoll.protocol.messages import Kind
from support.messages import encoded_of, key_of

TARGET = PeerId("target")


def traffic_of(rate: float, trip: float, transfers: list[tuple[float, int]]) -> LinkTraffic:
    """What is seen of a link that is given transfers of (when, bytes), each as soon as that moment has come."""
    traffic = LinkTraffic()
    traffic.echoed(trip)
    free, events = 0.0, []
    for number, (at, size) in enumerate(transfers):
        key = key_of(microbatch=number)
        free = max(free, at) + size / rate
        events += [(at, 0, key, size), (free + trip, 1, key, size)]
    for now, order, key, size in sorted(events, key=lambda event: event[:2]):
        if order == 0:
            traffic.began(key, size, now)
        else:
            traffic.acknowledged(key, now)
    return traffic


@given(st.floats(1e5, 1e9), st.floats(1e-4, 0.3), st.integers(1, 20))
@settings(max_examples=100)
def test_a_saturated_link_shows_its_rate(rate: float, trip: float, count: int) -> None:
    size = max(10**6, int(rate * trip))
    found = traffic_of(rate, trip, [(0.001 * number, size) for number in range(count)])
    assert found.bytes_per_second == pytest.approx(rate, rel=0.25)


@given(st.floats(1e5, 1e8), st.floats(1e-3, 0.3))
@settings(max_examples=100)
def test_transfers_with_pauses_show_the_same(rate: float, trip: float) -> None:
    size = max(10**6, int(rate * trip))
    pause = 3 * (size / rate + trip)
    found = traffic_of(rate, trip, [(number * pause, size) for number in range(5)])
    assert found.bytes_per_second == pytest.approx(rate, rel=0.01)


def test_a_lasting_change_is_followed() -> None:
    traffic = LinkTraffic()
    now = 0.0
    for number in range(40):
        seconds = 0.1 if number < 20 else 0.4
        traffic.began(key_of(microbatch=number), 10**6, now)
        traffic.acknowledged(key_of(microbatch=number), now + seconds)
        now += 1.0
    assert traffic.bytes_per_second == pytest.approx(10**6 / 0.4, rel=0.02)


def test_small_messages_say_nothing() -> None:
    assert traffic_of(1e6, 0.01, [(number, 1000) for number in range(10)]).bytes_per_second is None


def test_more_is_never_claimed_than_can_be_seen() -> None:
    traffic = LinkTraffic()
    traffic.echoed(0.1)
    traffic.began(key_of(), 10**5, 0.0)
    traffic.acknowledged(key_of(), 0.1)  # within the round trip, as far as one can tell
    assert traffic.bytes_per_second == pytest.approx(10**5 / 0.01)


def test_what_is_dropped_does_not_count() -> None:
    traffic = LinkTraffic()
    traffic.began(key_of(microbatch=0), 10**6, 0.0)
    traffic.began(key_of(microbatch=1), 10**6, 0.0)
    traffic.dropped(key_of(microbatch=0), 0.0)
    traffic.acknowledged(key_of(microbatch=1), 0.5)
    assert traffic.bytes_per_second == pytest.approx(2e6)
    traffic.dropped(key_of(microbatch=7), 8.0)
    traffic.acknowledged(key_of(microbatch=8), 9.0)
    assert traffic.bytes_per_second == pytest.approx(2e6)


def test_a_period_with_a_dropped_message_begins_anew() -> None:
    traffic = LinkTraffic()
    traffic.echoed(0.1)
    for number in range(3):
        traffic.began(key_of(microbatch=number), 10**6, 0.0)
    traffic.acknowledged(key_of(microbatch=0), 0.3)
    traffic.dropped(key_of(microbatch=1), 0.4)
    traffic.acknowledged(key_of(microbatch=2), 0.9)
    assert traffic.bytes_per_second == pytest.approx(2e6)


def test_the_shortest_round_trip_counts() -> None:
    traffic = LinkTraffic()
    for seconds in (0.3, 0.1, 0.2):
        traffic.echoed(seconds)
    assert traffic.round_trip_seconds == 0.1


def test_a_link_is_busy_while_something_is_under_way_each_direction_on_its_own() -> None:
    table = UsageTable(PeerId("own"), Courtesy())
    first, second = encoded_of(key_of(microbatch=0), 10**6), encoded_of(key_of(microbatch=1), 10**6)
    back = encoded_of(key_of(Kind.GRADIENT), 10**6)
    table.traffic(TARGET).echoed(0.1)
    table.began(TARGET, first, 10.0)
    table.began(TARGET, second, 11.0)
    table.settled(TARGET, first.key, 12.0, arrived=True)
    table.settled(TARGET, second.key, 13.0, arrived=True)
    table.began(TARGET, back, 20.0)
    table.settled(TARGET, back.key, 20.5, arrived=False)
    backward, forward = table.report()
    assert (forward.direction, forward.seconds_busy) == ("forward", 3.0)
    assert (backward.direction, backward.seconds_busy) == ("backward", 0.5)
    assert forward.bytes_per_second == backward.bytes_per_second > 0
    assert forward.round_trip_seconds == 0.1
