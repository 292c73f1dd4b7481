"""What an outbox hands out, and how submissions end."""

from __future__ import annotations

import asyncio

import pytest

from atoll.protocol.errors import LinkError
from atoll.protocol.framing import CHUNK_BYTES, MessageStream
from atoll.protocol.ids import Generation, PeerId
from atoll.protocol.messages import Kind, MessageHeader
from atoll.protocol.outbox import Outbox
from atoll.protocol.pacing import Pacer
from atoll.protocol.v1 import frames_pb2
from support.messages import encoded_of, key_of

Item = frames_pb2.Frame


def accept_all(header: MessageHeader) -> str | None:
    return None


def outbox_of(generation: int = 0, pacers: tuple[Pacer, ...] = ()) -> Outbox[Item]:
    stream = MessageStream(accept_all, generation=Generation(generation))
    return Outbox(own=PeerId("own"), other=PeerId("other"), stream=stream, wrap=lambda frame: frame, pacers=pacers)


def control(word: str) -> Item:
    """Stands for something that the owner says itself."""
    return frames_pb2.Frame(hello=frames_pb2.Hello(peer=word))


async def next_item(outbox: Outbox[Item]) -> Item:
    dispatch = await asyncio.wait_for(outbox.next(), 5)
    assert dispatch is not None
    return dispatch.item


async def test_control_goes_ahead_of_frames_and_frames_know_their_message() -> None:
    outbox = outbox_of()
    message = encoded_of(key_of(), 2 * CHUNK_BYTES)
    outbox.submit(message)
    assert (await next_item(outbox)).HasField("header")
    outbox.put(control("commit"))
    outbox.put(control("void"))
    assert [await next_item(outbox), await next_item(outbox)] == [control("commit"), control("void")]
    dispatch = await outbox.next()
    assert dispatch is not None
    assert dispatch.message == message


async def test_next_waits_for_something_to_say() -> None:
    outbox = outbox_of()
    waiting = asyncio.create_task(outbox.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put(control("progress"))
    dispatch = await asyncio.wait_for(waiting, 5)
    assert dispatch is not None
    assert dispatch.item == control("progress")


async def test_a_submission_is_done_when_acknowledged() -> None:
    outbox = outbox_of()
    done = outbox.submit(encoded_of(key_of()))
    frame = await next_item(outbox)
    assert isinstance(frame, frames_pb2.Frame)
    assert not done.done()
    outbox.handle(frames_pb2.Frame(message=frame.message, acknowledged=frames_pb2.Acknowledged()))
    await asyncio.wait_for(done, 5)
    assert outbox.num_unacknowledged == 0
    assert not outbox.is_expecting


async def test_a_refused_submission_fails_and_is_returned_as_an_event() -> None:
    outbox = outbox_of()
    done = outbox.submit(encoded_of(key_of()))
    await next_item(outbox)
    (event,) = outbox.handle(frames_pb2.Frame(message=1, refused=frames_pb2.Refused(reason="no room", final=True)))
    with pytest.raises(LinkError, match=r"link to other: .*refused: no room"):
        await done
    assert outbox.error_of(event).peer == "other"  # type: ignore[arg-type]


async def test_a_new_generation_cancels_what_belongs_to_older_ones() -> None:
    outbox = outbox_of()
    old, new = outbox.submit(encoded_of(key_of(generation=1))), outbox.submit(encoded_of(key_of(generation=2)))
    outbox.advance(Generation(2))
    assert old.cancelled()
    assert not new.done()
    assert outbox.submit(encoded_of(key_of(generation=1))).cancelled()


async def test_a_broken_stream_fails_all_submissions_now_and_later() -> None:
    outbox = outbox_of()
    before = outbox.submit(encoded_of(key_of()))
    outbox.fail(LinkError(PeerId("other"), "gone"))
    after = outbox.submit(encoded_of(key_of()))
    for future in (before, after):
        with pytest.raises(LinkError, match="gone"):
            await future


async def test_a_closed_outbox_says_so_when_all_is_settled() -> None:
    outbox = outbox_of()
    outbox.put(control("leave"))
    outbox.submit(encoded_of(key_of()))
    outbox.close()
    outbox.put(control("too late"))
    assert await next_item(outbox) == control("leave")
    frame = await next_item(outbox)
    assert isinstance(frame, frames_pb2.Frame)
    outbox.handle(frames_pb2.Frame(message=frame.message, acknowledged=frames_pb2.Acknowledged()))
    assert await asyncio.wait_for(outbox.next(), 5) is None


async def test_chunks_wait_for_their_turn_and_what_is_most_urgent_then_goes_first() -> None:
    now = [0.0]
    pacer = Pacer(10_000.0, clock=lambda: now[0])
    outbox = outbox_of(pacers=(pacer,))
    outbox.submit(encoded_of(key_of(Kind.STATE), 1000))
    assert (await next_item(outbox)).HasField("header")
    assert (await next_item(outbox)).HasField("chunk")
    outbox.submit(encoded_of(key_of(Kind.STATE), 100))
    waiting = asyncio.create_task(outbox.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.submit(encoded_of(key_of(Kind.GRADIENT), 100))
    await asyncio.sleep(0)
    assert not waiting.done()
    now[0] = 2000.0
    pacer._serve()  # what its timer calls
    dispatch = await asyncio.wait_for(waiting, 5)
    assert dispatch is not None
    assert dispatch.message is not None
    assert dispatch.message.key.kind is Kind.GRADIENT


async def test_signs_of_life_and_answers_do_not_wait_but_count() -> None:
    now = [0.0]
    pacer = Pacer(100.0, clock=lambda: now[0])
    outbox = outbox_of(pacers=(pacer,))
    pacer.spend(1000)
    outbox.put(control("alive"))
    assert await next_item(outbox) == control("alive")
    outbox.grant(Generation(0), Kind.ACTIVATION)
    assert (await next_item(outbox)).HasField("credit")
    assert pacer._bucket.delay(0.0) > 9.95


async def test_who_stops_waiting_leaves_the_queue() -> None:
    now = [0.0]
    pacer = Pacer(100.0, clock=lambda: now[0])
    pacer.spend(1000)
    outbox = outbox_of(pacers=(pacer,))
    outbox.submit(encoded_of(key_of(Kind.STATE), 100))
    waiting = asyncio.create_task(outbox.next())
    await asyncio.sleep(0)
    assert len(pacer._waiting) == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert pacer._waiting == []
