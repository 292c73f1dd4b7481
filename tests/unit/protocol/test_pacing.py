from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol.messages import CHUNK_BYTES
from atoll.protocol.pacing import Allowance, Pacer, TokenBucket, chunk_bytes_for, paced_chunk_bytes, pacers_with, take_turns


@given(
    st.floats(1e3, 1e9),
    st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 10**6)), min_size=1, max_size=50),
)
@settings(max_examples=200)
def test_no_period_exceeds_the_rate_by_more_than_a_burst_and_a_chunk(rate: float, wishes: list[tuple[float, int]]) -> None:
    bucket, now, sent = TokenBucket(rate, 0.0), 0.0, []
    for pause, size in wishes:
        now += pause
        now += bucket.delay(now) * (1 + 1e-9) + 1e-12
        bucket.spend(size, now)
        sent.append((now, size))
    for first in range(len(sent)):
        total = 0
        for last in range(first, len(sent)):
            total += sent[last][1]
            seconds = sent[last][0] - sent[first][0]
            assert total <= rate * (seconds + 0.05) * (1 + 1e-6) + sent[last][1] + 1


def test_what_is_not_sent_now_cannot_be_saved_up() -> None:
    bucket = TokenBucket(1000.0, 0.0)
    assert bucket.delay(100.0) == 0.0
    bucket.spend(1050, 100.0)
    assert bucket.delay(100.0) == pytest.approx(1.0)
    bucket.spend(-500, 100.5)
    assert bucket.delay(100.5) == 0.0


class Loop:
    """A pacer whose clock the test moves."""

    def __init__(self, rate: float) -> None:
        self.now = 0.0
        self.pacer = Pacer(rate, clock=lambda: self.now)
        self.granted: list[str] = []

    def request(self, name: str, urgency: int, size: int = 1000) -> None:
        self.pacer.request(size, urgency, lambda: self.granted.append(name))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.pacer._serve()  # what its timer calls


async def test_of_several_that_wait_the_most_urgent_goes_first() -> None:
    loop = Loop(1000.0)
    loop.request("first", 3)
    assert loop.granted == ["first"]
    loop.request("state", 3)
    loop.request("gradient", 0)
    loop.request("activation", 1)
    for _ in range(3):
        loop.pass_time(1.0)
    assert loop.granted == ["first", "gradient", "activation", "state"]


async def test_among_equals_the_first_to_ask_goes_first() -> None:
    loop = Loop(1000.0)
    for name in ("a", "b", "c"):
        loop.request(name, 1)
    for _ in range(2):
        loop.pass_time(1.0)
    assert loop.granted == ["a", "b", "c"]


async def test_who_withdraws_is_passed_over_and_gives_back() -> None:
    loop = Loop(1000.0)
    turn = loop.pacer.request(1000, 0, lambda: None)
    waiting = loop.pacer.request(1000, 0, lambda: loop.granted.append("withdrawn"))
    loop.request("last", 3)
    loop.pacer.withdraw(waiting)
    loop.pacer.withdraw(turn)
    loop.pass_time(0.0)
    assert loop.granted == ["last"]


async def test_a_cancelled_wait_leaves_the_queue() -> None:
    pacer = Pacer(1.0)
    pacer.spend(10**6)
    waiting = asyncio.create_task(take_turns([pacer], 1, 0, within_seconds=60.0))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    assert pacer._waiting == []


async def test_an_allowance_needs_a_turn_of_every_pacer() -> None:
    now = [0.0]
    fast, slow = Pacer(1e6, clock=lambda: now[0]), Pacer(1e3, clock=lambda: now[0])
    woken: list[bool] = []
    allowance = Allowance([fast, slow], lambda: woken.append(True))
    assert allowance.ready(1000, 1)
    allowance.use(1000)
    assert not allowance.ready(1000, 1)
    now[0] = 1.0
    slow._serve()
    assert woken
    assert allowance.ready(1000, 1)
    allowance.use(10)  # less than was granted: the rest is given back
    assert allowance.ready(1000, 1)
    allowance.use(1000)
    assert not allowance.ready(1000, 1)
    allowance.withdraw()


async def test_what_becomes_more_urgent_while_it_waits_overtakes() -> None:
    now = [0.0]
    pacer = Pacer(1000.0, clock=lambda: now[0])
    pacer.spend(1000)
    mine, other = Allowance([pacer], lambda: None), Allowance([pacer], lambda: None)
    assert not other.ready(1000, 1)
    assert not mine.ready(1000, 3)
    assert not mine.ready(1000, 0)
    now[0] = 1.0
    pacer._serve()
    assert mine.ready(1000, 0)
    assert not other.ready(1000, 1)
    mine.withdraw()
    other.withdraw()


def test_without_pacers_nothing_waits() -> None:
    allowance = Allowance((), lambda: None)
    assert allowance.ready(10**9, 3)
    allowance.use(10**9)


async def test_what_is_no_rate_is_no_limit() -> None:
    own = (Pacer(1e6),)
    for nothing in (None, 0.0, -1.0, float("nan"), float("inf")):
        assert pacers_with(own, nothing) == own
    assert [pacer.bytes_per_second for pacer in pacers_with(own, 5.0)] == [1e6, 5.0]


async def test_turns_that_do_not_come_in_time_are_given_up() -> None:
    pacer = Pacer(1.0)
    pacer.spend(1000)
    with pytest.raises(TimeoutError):
        await take_turns([pacer], 1, 0, within_seconds=0.01)
    assert pacer._waiting == []


async def test_a_wait_that_is_given_up_leaves_no_debt_where_a_turn_had_come() -> None:
    free, full = Pacer(1000.0, clock=lambda: 0.0), Pacer(1.0)
    full.spend(1000)
    with pytest.raises(TimeoutError):
        await take_turns([free, full], 5000, 0, within_seconds=0.01)
    assert free._bucket.delay(0.0) == 0.0
    await take_turns([free], 5000, 0, within_seconds=60.0)
    assert free._bucket.delay(0.0) == pytest.approx(4.95)


def test_chunks_are_smaller_on_slow_links() -> None:
    assert chunk_bytes_for(None) == chunk_bytes_for(1e9) == CHUNK_BYTES
    assert chunk_bytes_for(125e3) == 16 * 1024  # 1 Mbit/s
    assert chunk_bytes_for(1.25e6) == 32 * 1024
    assert chunk_bytes_for(2.5e6) == 64 * 1024
    assert paced_chunk_bytes([Pacer(2.5e6), Pacer(1e9)]) == 64 * 1024
    assert paced_chunk_bytes([Pacer(2.5e6)], 1.25e6) == paced_chunk_bytes([], 1.25e6) == 32 * 1024
    assert paced_chunk_bytes([]) == CHUNK_BYTES
