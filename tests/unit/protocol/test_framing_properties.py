"""Whatever the transport's pace and whatever one flipped bit hits: right data, or a report, never wrong data."""

from __future__ import annotations

import random

from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol.errors import WireError
from atoll.protocol.framing import CHUNK_BYTES, Acknowledged, Arrived, GaveUp, MessageStream, StreamEvent
from atoll.protocol.ids import Generation
from atoll.protocol.messages import EncodedMessage, Kind, MessageHeader
from atoll.protocol.v1 import frames_pb2
from support.messages import contents, encoded_of, key_of

CREDIT = {Kind.ACTIVATION: 2, Kind.GRADIENT: 1}
SIZES = st.lists(st.sampled_from([0, 1, 13, CHUNK_BYTES, CHUNK_BYTES + 1]), max_size=3)
KINDS = st.sampled_from([Kind.ACTIVATION, Kind.GRADIENT, Kind.TIED_GRADIENT, Kind.STATE])


def accept_all(header: MessageHeader) -> str | None:
    return None


@settings(max_examples=60)
@given(st.lists(st.tuples(KINDS, SIZES), max_size=6), st.lists(st.tuples(KINDS, SIZES), max_size=6), st.integers(0, 2**32))
def test_any_interleaving_delivers_everything_once(
    left_sends: list[tuple[Kind, list[int]]], right_sends: list[tuple[Kind, list[int]]], seed: int
) -> None:
    pace = random.Random(seed)
    ends = [MessageStream(accept_all, credit=CREDIT), MessageStream(accept_all, credit=CREDIT)]
    sent = [_messages(left_sends), _messages(right_sends)]
    todo = [list(sent[0]), list(sent[1])]
    wires: list[list[frames_pb2.Frame]] = [[], []]  # frames on their way to end 0, to end 1
    got: list[list[EncodedMessage]] = [[], []]
    idle = 0
    while idle < 40:
        side = pace.randrange(2)
        idle += 1
        if todo[side] and pace.random() < 0.3:
            ends[side].submit(todo[side].pop(0))
            idle = 0
        if pace.random() < 0.7 and (frame := ends[side].next_frame()) is not None:
            wires[1 - side].append(frame)
            idle = 0
        if wires[side] and pace.random() < 0.7:
            for event in ends[side].handle(wires[side].pop(0)):
                if isinstance(event, Arrived):
                    got[side].append(event.message)
                    ends[side].grant(event.message.key.generation, event.message.key.kind)
            idle = 0
    for side in range(2):
        assert sorted(map(contents, got[side]), key=str) == sorted(map(contents, sent[1 - side]), key=str)
        assert ends[side].num_unacknowledged == ends[side].num_unfinished == 0
        for kind in Kind:
            order = [m.key.microbatch for m in got[side] if m.key.kind is kind]
            assert order == sorted(order)


@settings(max_examples=150)
@given(st.lists(st.sampled_from([0, 1, 40, 700]), min_size=1, max_size=3), st.data())
def test_one_flipped_bit_in_a_header_or_chunk_is_recovered(sizes: list[int], data: st.DataObject) -> None:
    message = encoded_of(key_of(), *sizes)
    frames = _frames(message)
    victim = data.draw(st.integers(0, len(frames) - 1))
    frames[victim] = _flip_content(frames[victim], data)
    events = _deliver(message, frames)
    arrived = [event.message for event in events if isinstance(event, Arrived)]
    assert [contents(found) for found in arrived] == [contents(message)]


@settings(max_examples=300)
@given(st.lists(st.sampled_from([0, 1, 40]), min_size=1, max_size=3), st.data())
def test_one_flipped_bit_anywhere_never_gives_wrong_data(sizes: list[int], data: st.DataObject) -> None:
    message = encoded_of(key_of(), *sizes)
    frames = _frames(message)
    victim = data.draw(st.integers(0, len(frames) - 1))
    raw = bytearray(frames[victim].SerializeToString())
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << (bit % 8)
    try:
        frames[victim] = frames_pb2.Frame.FromString(bytes(raw))
        events = _deliver(message, frames)
    except (DecodeError, WireError):
        return  # the stream breaks, which its owner reports
    for event in events:
        if isinstance(event, Arrived):
            assert contents(event.message) == contents(message)


def _messages(sends: list[tuple[Kind, list[int]]]) -> list[EncodedMessage]:
    return [encoded_of(key_of(kind, microbatch=index), *sizes) for index, (kind, sizes) in enumerate(sends)]


def _frames(message: EncodedMessage) -> list[frames_pb2.Frame]:
    stream = MessageStream(accept_all)
    stream.submit(message)
    frames: list[frames_pb2.Frame] = []
    while (frame := stream.next_frame()) is not None:
        frames.append(frame)
    return frames


def _flip_content(frame: frames_pb2.Frame, data: st.DataObject) -> frames_pb2.Frame:
    """Flips a bit of the chunk, or of a value in the header, keeping the frame readable."""
    if frame.HasField("chunk"):
        raw = bytearray(frame.chunk)
        bit = data.draw(st.integers(0, 8 * len(raw) - 1))
        raw[bit // 8] ^= 1 << (bit % 8)
        return frames_pb2.Frame(message=frame.message, chunk=bytes(raw))
    raw = bytearray(frame.header.SerializeToString())
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << (bit % 8)
    try:
        return frames_pb2.Frame(message=frame.message, header=frames_pb2.MessageHeader.FromString(bytes(raw)))
    except DecodeError:
        return frame


def _deliver(message: EncodedMessage, frames: list[frames_pb2.Frame]) -> list[StreamEvent]:
    """Feeds prepared frames for a submission of ``message``, then lets both ends finish by themselves."""
    sender, receiver = MessageStream(accept_all), MessageStream(accept_all)
    sender.submit(message)
    for _ in frames:
        sender.next_frame()
    events = [event for frame in frames for event in receiver.handle(frame)]
    for _ in range(100):
        answer = receiver.next_frame()
        settled = [] if answer is None else sender.handle(answer)
        assert not any(isinstance(event, GaveUp) for event in settled) or not any(isinstance(e, Arrived) for e in events)
        frame = sender.next_frame()
        if frame is not None:
            events += receiver.handle(frame)
        if answer is None and frame is None:
            break
    return events


def test_acknowledged_means_arrived() -> None:
    sender, receiver = MessageStream(accept_all), MessageStream(accept_all)
    number = sender.submit(encoded_of(key_of(), 5))
    while (frame := sender.next_frame()) is not None:
        receiver.handle(frame)
    answer = receiver.next_frame()
    assert answer is not None
    assert sender.handle(answer) == [Acknowledged(number=number)]
    assert sender.advance(Generation(9)) == []
