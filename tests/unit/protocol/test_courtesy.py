"""What is sent in the background beside training, by a clock that the test moves."""

from __future__ import annotations

from atoll.protocol.courtesy import BESIDE, BETWEEN, QUIET_SECONDS, UNLIMITED, Courtesy
from atoll.protocol.messages import CHUNK_BYTES
from atoll.protocol.pacing import paced_chunk_bytes

LINE = 1e6
CHUNK = 10_000


class Line:
    """A sender that always has another chunk for the background."""

    def __init__(self) -> None:
        self.now = 100.0
        self.courtesy = Courtesy(clock=lambda: self.now)
        self.sent = 0

    def pass_time(self, seconds: float) -> int:
        """The bytes that were let go meanwhile."""
        before, ends = self.sent, self.now + seconds
        while self.now < ends:
            turn = self.courtesy.request(CHUNK, 3, lambda: None)
            while not turn.granted and self.now < ends:
                self.now += 0.001
                self.courtesy._serve()  # what its timer calls
            if not turn.granted:
                self.courtesy.withdraw(turn)
            else:
                self.sent += CHUNK
            self.now += 1e-6
            if self.sent - before > 100 * LINE * seconds:
                break
        return self.sent - before


async def test_beside_training_it_is_a_small_share_and_between_messages_most() -> None:
    line = Line()
    line.courtesy.tell(under_way=True, line_bytes_per_second=LINE)
    line.pass_time(1.0)  # what was allowed before
    assert line.pass_time(10.0) <= 10.0 * BESIDE * LINE + CHUNK
    line.courtesy.tell(under_way=False, line_bytes_per_second=None)
    between = line.pass_time(QUIET_SECONDS / 2)
    assert 0.9 * BETWEEN * LINE <= between / (QUIET_SECONDS / 2) <= 1.1 * BETWEEN * LINE


async def test_it_is_let_go_where_there_was_no_training_for_a_while() -> None:
    line = Line()
    assert line.pass_time(1.0) > 10 * LINE
    line.courtesy.tell(under_way=True, line_bytes_per_second=LINE)
    line.courtesy.tell(under_way=False, line_bytes_per_second=None)
    assert line.pass_time(1.0) < LINE
    line.now += QUIET_SECONDS
    assert line.pass_time(1.0) > 10 * LINE


async def test_training_that_begins_holds_back_at_once_what_waits() -> None:
    line = Line()
    line.courtesy.tell(under_way=False, line_bytes_per_second=LINE)
    line.courtesy.tell(under_way=True, line_bytes_per_second=None)
    line.courtesy.spend(int(LINE))
    waiting = line.courtesy.request(CHUNK, 3, lambda: None)
    line.now += 1.0
    line.courtesy.tell(under_way=True, line_bytes_per_second=None)
    assert not waiting.granted, "a debt of a second of the line takes twenty at this share"
    line.now += 1.0 / BESIDE
    line.courtesy._serve()
    assert waiting.granted
    line.courtesy.withdraw(waiting)


def test_chunks_suit_the_line() -> None:
    courtesy = Courtesy()
    assert paced_chunk_bytes((courtesy,)) == CHUNK_BYTES
    courtesy.tell(under_way=True, line_bytes_per_second=LINE)
    assert paced_chunk_bytes((courtesy,)) <= 0.05 * LINE
    assert courtesy.bytes_per_second < UNLIMITED
