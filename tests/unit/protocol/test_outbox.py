"""What an outbox hands out, and how submissions end."""

from __future__ import annotations

import asyncio

import pytest

from atoll.protocol.errors import LinkError
from atoll.protocol.framing import CHUNK_BYTES, MessageStream
from atoll.protocol.ids import Generation, PeerId
from atoll.protocol.messages import MessageHeader
from atoll.protocol.outbox import Outbox
from atoll.protocol.v1 import frames_pb2
from support.messages import encoded_of, key_of

Item = str | frames_pb2.Frame


def accept_all(header: MessageHeader) -> str | None:
    return None


def outbox_of(generation: int = 0) -> Outbox[Item]:
    stream = MessageStream(accept_all, generation=Generation(generation))
    return Outbox(own=PeerId("own"), other=PeerId("other"), stream=stream, wrap=lambda frame: frame)


async def next_item(outbox: Outbox[Item]) -> Item:
    dispatch = await asyncio.wait_for(outbox.next(), 5)
    assert dispatch is not None
    return dispatch.item


async def test_control_goes_ahead_of_frames_and_frames_know_their_message() -> None:
    outbox = outbox_of()
    message = encoded_of(key_of(), 2 * CHUNK_BYTES)
    outbox.submit(message)
    assert isinstance(await next_item(outbox), frames_pb2.Frame)
    outbox.put("commit")
    outbox.put("void")
    assert [await next_item(outbox), await next_item(outbox)] == ["commit", "void"]
    dispatch = await outbox.next()
    assert dispatch is not None
    assert dispatch.message == message


async def test_next_waits_for_something_to_say() -> None:
    outbox = outbox_of()
    waiting = asyncio.create_task(outbox.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put("progress")
    dispatch = await asyncio.wait_for(waiting, 5)
    assert dispatch is not None
    assert dispatch.item == "progress"


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
    outbox.put("leave")
    outbox.submit(encoded_of(key_of()))
    outbox.close()
    outbox.put("too late")
    assert await next_item(outbox) == "leave"
    frame = await next_item(outbox)
    assert isinstance(frame, frames_pb2.Frame)
    outbox.handle(frames_pb2.Frame(message=frame.message, acknowledged=frames_pb2.Acknowledged()))
    assert await asyncio.wait_for(outbox.next(), 5) is None
