"""One message stream against another: order, urgency, credit, refusals, generations."""

from __future__ import annotations

import pytest

from atoll.protocol.errors import WireError
from atoll.protocol.framing import (
    CHUNK_BYTES,
    MAX_ATTEMPTS,
    Acknowledged,
    Arrived,
    CorruptSender,
    GaveUp,
    MessageStream,
    StreamEvent,
    frames_of,
)
from atoll.protocol.ids import Generation
from atoll.protocol.messages import EncodedMessage, Kind, MessageHeader
from atoll.protocol.v1 import frames_pb2
from support.messages import contents, encoded_of, key_of, tensor_of

GRPC_LIMIT_BYTES = 4 * 2**20


def accept_all(header: MessageHeader) -> str | None:
    return None


class Pair:
    """Two ends joined by a perfect transport that a test may interfere with."""

    def __init__(self, credit: dict[Kind, int] | None = None) -> None:
        self.left = MessageStream(accept_all, credit=credit)
        self.right = MessageStream(accept_all, credit=credit)
        self.sent: list[frames_pb2.Frame] = []

    def run(self) -> tuple[list[StreamEvent], list[StreamEvent]]:
        """Moves frames until both ends are quiet; what happened at the left and at the right."""
        left: list[StreamEvent] = []
        right: list[StreamEvent] = []
        while True:
            there, back = self.left.next_frame(), self.right.next_frame()
            if there is not None:
                self.sent.append(there)
                right += self.right.handle(there)
            if back is not None:
                left += self.left.handle(back)
            if there is None and back is None:
                return left, right


def arrivals(events: list[StreamEvent]) -> list[EncodedMessage]:
    return [event.message for event in events if isinstance(event, Arrived)]


@pytest.mark.parametrize(
    "sizes",
    [(), (0,), (1,), (0, 5, 0, 0, 3, 0), (CHUNK_BYTES,), (CHUNK_BYTES + 1,), (3 * CHUNK_BYTES, 7, CHUNK_BYTES - 7)],
    ids=str,
)
def test_a_message_arrives_as_it_was_sent(sizes: tuple[int, ...]) -> None:
    pair = Pair()
    message = encoded_of(key_of(), *sizes)
    number = pair.left.submit(message)
    left, right = pair.run()
    assert [contents(arrived) for arrived in arrivals(right)] == [contents(message)]
    assert left == [Acknowledged(number=number)]
    assert pair.left.num_unacknowledged == pair.right.num_unfinished == 0
    assert len(pair.sent) == 1 + -(-sum(sizes) // CHUNK_BYTES)
    assert max(frame.ByteSize() for frame in pair.sent) < GRPC_LIMIT_BYTES / 4


def test_both_ends_send_at_once() -> None:
    pair = Pair()
    pair.left.submit(encoded_of(key_of(Kind.ACTIVATION), 2 * CHUNK_BYTES))
    pair.right.submit(encoded_of(key_of(Kind.GRADIENT), 2 * CHUNK_BYTES))
    left, right = pair.run()
    assert [message.key.kind for message in arrivals(left)] == [Kind.GRADIENT]
    assert [message.key.kind for message in arrivals(right)] == [Kind.ACTIVATION]


def test_the_urgent_overtake_the_others_between_chunks() -> None:
    pair = Pair()
    for kind in (Kind.STATE, Kind.BATCH, Kind.ACTIVATION, Kind.TIED_GRADIENT):
        pair.left.submit(encoded_of(key_of(kind), 2 * CHUNK_BYTES))
    pair.right.handle(pair.left.next_frame() or frames_pb2.Frame())
    pair.left.submit(encoded_of(key_of(Kind.GRADIENT), 2 * CHUNK_BYTES))
    _, right = pair.run()
    kinds = [message.key.kind for message in arrivals(right)]
    assert kinds == [Kind.GRADIENT, Kind.TIED_GRADIENT, Kind.ACTIVATION, Kind.BATCH, Kind.STATE]


def test_messages_of_one_kind_keep_their_order_and_older_generations_go_first() -> None:
    pair = Pair()
    for generation, microbatch in ((2, 0), (1, 0), (1, 1), (2, 1)):
        pair.left.submit(encoded_of(key_of(generation=generation, microbatch=microbatch), CHUNK_BYTES + 1))
    _, right = pair.run()
    assert [(m.key.generation, m.key.microbatch) for m in arrivals(right)] == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_without_credit_a_message_waits_for_a_grant_of_its_kind_and_generation() -> None:
    pair = Pair(credit={Kind.ACTIVATION: 2})
    for microbatch in range(4):
        pair.left.submit(encoded_of(key_of(microbatch=microbatch), 10))
    pair.left.submit(encoded_of(key_of(Kind.GRADIENT), 10))
    _, right = pair.run()
    assert [m.key.microbatch for m in arrivals(right) if m.key.kind is Kind.ACTIVATION] == [0, 1]
    assert Kind.GRADIENT in {m.key.kind for m in arrivals(right)}
    pair.right.grant(Generation(2), Kind.ACTIVATION)
    assert arrivals(pair.run()[1]) == []
    pair.right.grant(Generation(1), Kind.ACTIVATION)
    assert [m.key.microbatch for m in arrivals(pair.run()[1])] == [2]
    pair.right.grant(Generation(1), Kind.ACTIVATION)
    assert [m.key.microbatch for m in arrivals(pair.run()[1])] == [3]


def test_a_sender_that_ignores_credit_is_refused_before_anything_is_allocated() -> None:
    greedy = MessageStream(accept_all)
    receiver = MessageStream(accept_all, credit={Kind.ACTIVATION: 1})
    pair = Pair()
    pair.left, pair.right = greedy, receiver
    greedy.submit(encoded_of(key_of(microbatch=0), 10))
    greedy.submit(encoded_of(key_of(microbatch=1), 10))
    left, right = pair.run()
    assert len(arrivals(right)) == 1
    assert [event.reason for event in left if isinstance(event, GaveUp)] == [
        "activation of microbatch 1, step 1, stage 0 to 1, generation 1 was refused: more than the 1 messages that were granted"
    ]


def test_an_unexpected_message_is_refused_for_good_and_its_chunks_are_skipped() -> None:
    pair = Pair()
    pair.right = MessageStream(lambda header: "nobody asked for it" if header.num_bytes > 10 else None)
    refused = pair.left.submit(encoded_of(key_of(microbatch=0), 3 * CHUNK_BYTES))
    pair.left.submit(encoded_of(key_of(microbatch=1), 5))
    left, right = pair.run()
    gave_up = next(event for event in left if isinstance(event, GaveUp))
    assert gave_up.number == refused
    assert not gave_up.corrupt
    assert "nobody asked for it" in gave_up.reason
    assert [m.key.microbatch for m in arrivals(right)] == [1]


def test_a_message_beyond_the_limit_is_refused() -> None:
    pair = Pair()
    pair.right = MessageStream(accept_all, max_message_bytes=100)
    pair.left.submit(encoded_of(key_of(), 101))
    left, _ = pair.run()
    assert [event.corrupt for event in left if isinstance(event, GaveUp)] == [False]


@pytest.mark.parametrize("damage", ["header", "chunk", "short chunk", "lost chunk"])
def test_a_damaged_message_is_sent_again(damage: str) -> None:
    pair = Pair()
    message = encoded_of(key_of(), CHUNK_BYTES, 100)
    number = pair.left.submit(message)
    frames = [pair.left.next_frame() or frames_pb2.Frame() for _ in range(3)]
    if damage == "header":
        frames[0].header.key.microbatch += 1
    elif damage == "chunk":
        frames[1].chunk = b"\x00" + frames[1].chunk[1:]
    elif damage == "short chunk":
        frames[1].chunk = frames[1].chunk[:-1]
    else:
        del frames[1]
    first = [event for frame in frames for event in pair.right.handle(frame)]
    left, right = pair.run()
    assert first == []
    assert [contents(arrived) for arrived in arrivals(right)] == [contents(message)]
    assert [event.attempts for event in right if isinstance(event, Arrived)] == [2]
    assert left == [Acknowledged(number=number)]


def test_a_resend_costs_no_credit() -> None:
    pair = Pair(credit={Kind.ACTIVATION: 1})
    pair.left.submit(encoded_of(key_of(), 10))
    header, chunk = pair.left.next_frame(), pair.left.next_frame()
    assert header is not None
    assert chunk is not None
    chunk.chunk = bytes(10)
    pair.right.handle(header)
    pair.right.handle(chunk)
    assert len(arrivals(pair.run()[1])) == 1


def test_damage_at_every_attempt_is_reported_at_both_ends() -> None:
    pair = Pair()
    number = pair.left.submit(encoded_of(key_of(), 10))
    left: list[StreamEvent] = []
    right: list[StreamEvent] = []
    for _ in range(20):
        frame = pair.left.next_frame()
        if frame is not None:
            if frame.HasField("chunk"):
                frame.chunk = bytes(10)
            right += pair.right.handle(frame)
        answer = pair.right.next_frame()
        if answer is not None:
            left += pair.left.handle(answer)
    assert [(event.number, event.corrupt) for event in left if isinstance(event, GaveUp)] == [(number, True)]
    assert [type(event) for event in right] == [CorruptSender]
    assert f"{MAX_ATTEMPTS} times" in right[0].reason  # type: ignore[union-attr]
    pair.left.submit(encoded_of(key_of(microbatch=1), 10))
    assert len(arrivals(pair.run()[1])) == 1


def test_older_generations_are_dropped_on_both_sides_without_blame() -> None:
    pair = Pair(credit={Kind.ACTIVATION: 1})
    old = pair.left.submit(encoded_of(key_of(generation=1), 3 * CHUNK_BYTES))
    for _ in range(2):
        pair.right.handle(pair.left.next_frame() or frames_pb2.Frame())
    pair.right.advance(Generation(2))
    left, right = pair.run()
    assert left == [Acknowledged(number=old)]
    assert arrivals(right) == []
    pair.left.submit(encoded_of(key_of(generation=1, microbatch=1), 5))
    assert pair.left.advance(Generation(2)) == [2]
    pair.left.submit(encoded_of(key_of(generation=2), 5))
    assert [m.key.generation for m in arrivals(pair.run()[1])] == [2]


def test_a_header_of_an_older_generation_is_acknowledged_unread() -> None:
    pair = Pair()
    pair.right.advance(Generation(5))
    number = pair.left.submit(encoded_of(key_of(generation=4), 10))
    left, right = pair.run()
    assert (left, right) == ([Acknowledged(number=number)], [])


def test_frames_that_have_no_place_in_a_stream() -> None:
    stream = MessageStream(accept_all)
    assert stream.handle(frames_pb2.Frame()) == []
    assert stream.handle(frames_pb2.Frame(message=7, chunk=b"stray")) == []
    assert stream.handle(frames_pb2.Frame(message=7, acknowledged=frames_pb2.Acknowledged())) == []
    assert stream.handle(frames_pb2.Frame(message=7, refused=frames_pb2.Refused(reason="no"))) == []
    with pytest.raises(WireError, match="hello"):
        stream.handle(frames_pb2.Frame(hello=frames_pb2.Hello(peer="late")))


def test_frames_of_gives_what_a_stream_would_send() -> None:
    message = encoded_of(key_of(), CHUNK_BYTES + 5, 3)
    stream = MessageStream(accept_all)
    events = [event for frame in frames_of(message, 1) for event in stream.handle(frame)]
    assert [contents(arrived) for arrived in arrivals(events)] == [contents(message)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda h: h.tensors[0].shape.__setitem__(0, 2**62), "bytes announced"),
        (lambda h: setattr(h.tensors[0], "dtype", "object"), "unknown dtype"),
        (lambda h: setattr(h.key, "kind", 99), "unknown message kind"),
        (lambda h: setattr(h, "num_bytes", 2**60), "do not add up"),
        (lambda h: h.tensors.add().CopyFrom(h.tensors[0]), "same name"),
        (lambda h: h.tensors[0].order.extend([1]), "memory order"),
        (lambda h: h.tensors.extend([h.tensors[0]] * 5000), "too large"),
        (lambda h: h.tensors[0].shape.extend([1] * 100), "dimensions"),
    ],
    ids=["shape", "dtype", "kind", "total", "names", "order", "count", "rank"],
)
def test_a_header_that_contradicts_itself_is_refused(change: object, reason: str) -> None:
    assert callable(change)
    message = EncodedMessage(key=key_of(), tensors=(tensor_of("t", b"12345"),))
    proto = message.header().to_proto(1)
    change(proto)
    header = _resealed(proto)
    stream = MessageStream(accept_all)
    assert stream.handle(frames_pb2.Frame(message=1, header=header)) == []
    answer = stream.next_frame()
    assert answer is not None
    assert answer.refused.final
    assert reason in answer.refused.reason


def _resealed(proto: frames_pb2.MessageHeader) -> frames_pb2.MessageHeader:
    import zlib

    proto.ClearField("header_checksum")
    proto.header_checksum = zlib.crc32(proto.SerializeToString(deterministic=True), zlib.crc32((1).to_bytes(8, "little")))
    return proto


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_message_that_broke_off_goes_on_on_another_stream(cut: int) -> None:
    message = encoded_of(key_of(Kind.STATE), CHUNK_BYTES + 5, 0, 2 * CHUNK_BYTES, 9)
    broken = MessageStream(accept_all)
    for frame in list(frames_of(message, 1))[: 1 + cut]:
        assert broken.handle(frame) == []
    (rest,) = broken.take_unfinished()
    assert rest.received == cut * CHUNK_BYTES
    assert broken.num_unfinished == 0
    other = MessageStream(accept_all)
    other.go_on_with(rest)
    frames = list(frames_of(message, 7, CHUNK_BYTES // 4, rest.received))
    events = [event for frame in frames for event in other.handle(frame)]
    assert [contents(found) for found in arrivals(events)] == [contents(message)]
    assert sum(len(frame.chunk) for frame in frames) == message.num_bytes - cut * CHUNK_BYTES


def test_a_rest_does_not_go_on_with_another_message() -> None:
    one, other = (encoded_of(key_of(Kind.STATE, microbatch=number), 2 * CHUNK_BYTES) for number in (0, 1))
    stream = MessageStream(accept_all)
    for frame in list(frames_of(one, 1))[:2]:
        stream.handle(frame)
    (rest,) = stream.take_unfinished()
    stream.go_on_with(rest)
    assert [event for frame in frames_of(other, 2, begin=rest.received) for event in stream.handle(frame)] == []
    answer = stream.next_frame()
    assert answer is not None
    assert answer.refused.final
    assert "another one" in answer.refused.reason
