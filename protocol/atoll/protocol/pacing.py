"""Sending no faster than an owner allows: a bucket of tokens, and whose turn it is when several streams share one.

A :class:`TokenBucket` is pure. A :class:`Pacer` waits for it on an event loop. Whoever wants to send asks for a :class:`Turn`
before choosing what to send, so what is most urgent when the turn comes goes first; of several that wait, the most urgent one
is given the turn. Small answers and signs of life do not wait: they are spent all the same, and what comes after makes up
for it. Counted are the bytes handed to gRPC; the headers of TCP and IP, about 3 %, come on top.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from atoll.protocol.messages import CHUNK_BYTES

BURST_SECONDS = 0.05
"""What may go out at once after a pause, in seconds of the rate."""
CHUNK_SECONDS = 0.05
"""What is on its way blocks what is more urgent for about so long."""
SMALLEST_CHUNK_BYTES = 16 * 1024
"""Smaller ones would let urgent messages in hardly sooner, for many more frames."""


class TokenBucket:
    """At most ``bytes_per_second`` on average. Something may be sent while there is no debt; sending it may make one."""

    def __init__(self, bytes_per_second: float, now: float) -> None:
        assert bytes_per_second > 0
        self.bytes_per_second = bytes_per_second
        self._burst = bytes_per_second * BURST_SECONDS
        self._level = self._burst
        self._at = now

    def limit(self, bytes_per_second: float, now: float) -> None:
        """From now on at another rate. A debt stays what it is, in bytes."""
        assert bytes_per_second > 0
        self._fill(now)
        self.bytes_per_second = bytes_per_second
        self._burst = bytes_per_second * BURST_SECONDS
        self._level = min(self._burst, self._level)

    def delay(self, now: float) -> float:
        """Seconds until something may be sent; 0 for now."""
        self._fill(now)
        return max(0.0, -self._level / self.bytes_per_second)

    def spend(self, num_bytes: int, now: float) -> None:
        """So much is sent now; a negative number gives back what was not."""
        self._fill(now)
        self._level = min(self._burst, self._level - num_bytes)

    def _fill(self, now: float) -> None:
        self._level = min(self._burst, self._level + (now - self._at) * self.bytes_per_second)
        self._at = now


class Turn:
    """A place in a pacer's queue, and then the right to send ``num_bytes``. ``urgency`` may change while it waits."""

    def __init__(self, num_bytes: int, urgency: int, on_granted: Callable[[], None]) -> None:
        self.num_bytes = num_bytes
        self.urgency = urgency
        self.on_granted = on_granted
        self.granted = False


class Pacer:
    """For one event loop. Shared by all streams that the rate bounds together."""

    def __init__(self, bytes_per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bucket = TokenBucket(bytes_per_second, clock())
        self._waiting: list[Turn] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def bytes_per_second(self) -> float:
        return self._bucket.bytes_per_second

    def request(self, num_bytes: int, urgency: int, on_granted: Callable[[], None]) -> Turn:
        """Asks to send ``num_bytes``: granted at once, or later with a call of ``on_granted``. Those who do not want it any
        more must :meth:`withdraw`."""
        turn = Turn(num_bytes, urgency, on_granted)
        self._waiting.append(turn)
        self._serve()
        return turn

    def withdraw(self, turn: Turn) -> None:
        """Leaves the queue, or gives back what was granted and not sent."""
        if turn.granted:
            self.spend(-turn.num_bytes)
        elif turn in self._waiting:
            self._waiting.remove(turn)

    def spend(self, num_bytes: int) -> None:
        """So much is sent without a turn, or (negative) less than granted."""
        self._bucket.spend(num_bytes, self._clock())

    def _limit(self, bytes_per_second: float) -> None:
        if bytes_per_second != self._bucket.bytes_per_second:
            self._bucket.limit(bytes_per_second, self._clock())

    def _serve(self) -> None:
        while self._waiting:
            delay = self._bucket.delay(self._clock())
            if delay > 0.0:
                self._serve_later(delay)
                return
            turn = min(self._waiting, key=lambda waiting: waiting.urgency)
            self._waiting.remove(turn)
            self._bucket.spend(turn.num_bytes, self._clock())
            turn.granted = True
            turn.on_granted()

    def _serve_later(self, delay: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay, self._serve)


class Allowance:
    """A turn at each of several pacers, one after the other, for one sender. Without pacers there is nothing to wait for."""

    def __init__(self, pacers: Sequence[Pacer], on_granted: Callable[[], None]) -> None:
        self._pacers = tuple(pacers)
        self._on_granted = on_granted
        self._turns: list[Turn] = []

    def ready(self, num_bytes: int, urgency: int) -> bool:
        """Whether ``num_bytes`` may be sent now; else ``on_granted`` will be called when it is worth asking again."""
        for turn in self._turns:
            turn.urgency = min(turn.urgency, urgency)
        while not self._turns or self._turns[-1].granted:
            if len(self._turns) == len(self._pacers):
                return True
            self._turns.append(self._pacers[len(self._turns)].request(num_bytes, urgency, self._on_granted))
        return False

    def use(self, num_bytes: int) -> None:
        """Sends ``num_bytes`` on what was granted, or on credit where nothing was."""
        for index, pacer in enumerate(self._pacers):
            granted = self._turns[index].num_bytes if index < len(self._turns) else 0
            pacer.spend(num_bytes - granted)
        self._turns.clear()

    def spend(self, num_bytes: int) -> None:
        """Sends ``num_bytes`` without a turn, whether one is awaited or not."""
        for pacer in self._pacers:
            pacer.spend(num_bytes)

    def withdraw(self) -> None:
        """Nothing will be sent."""
        for pacer, turn in zip(self._pacers, self._turns, strict=False):
            pacer.withdraw(turn)
        self._turns.clear()


def pacers_with(pacers: Sequence[Pacer], max_bytes_per_second: float | None) -> tuple[Pacer, ...]:
    """``pacers``, and one of its own for a stream whose receiver has a limit; None, 0 and what is no rate are no limit."""
    if max_bytes_per_second is None or not 0.0 < max_bytes_per_second < math.inf:
        return tuple(pacers)
    return (*pacers, Pacer(max_bytes_per_second))


async def take_turns(pacers: Sequence[Pacer], num_bytes: int, urgency: int, within_seconds: float) -> None:
    """Returns when all of ``pacers`` let ``num_bytes`` be sent. Raises TimeoutError where they do not in time; then none of
    them has been charged."""
    granted = asyncio.Event()
    allowance = Allowance(pacers, granted.set)
    try:
        async with asyncio.timeout(within_seconds):
            while not allowance.ready(num_bytes, urgency):
                granted.clear()
                await granted.wait()
    except BaseException:
        allowance.withdraw()
        raise
    allowance.use(num_bytes)


def paced_chunk_bytes(pacers: Sequence[Pacer], link_rate: float | None = None) -> int:
    """How large chunks should be that all of ``pacers`` bound, on a link that has shown ``link_rate``."""
    rates = [pacer.bytes_per_second for pacer in pacers]
    return chunk_bytes_for(min(rates if link_rate is None else [*rates, link_rate], default=None))


def chunk_bytes_for(bytes_per_second: float | None) -> int:
    """How large chunks should be on a link of that speed, so that urgent messages get in between soon; a power of two."""
    if bytes_per_second is None or bytes_per_second * CHUNK_SECONDS >= CHUNK_BYTES:
        return CHUNK_BYTES
    chunk = SMALLEST_CHUNK_BYTES
    while 2 * chunk <= bytes_per_second * CHUNK_SECONDS:
        chunk *= 2
    return chunk
