"""What owners allow is what is sent: over real links on loopback."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

from atoll.protocol.messages import Kind, Message, MessageKey
from atoll.protocol.pacing import Pacer
from support.link_swarm import Peer, neighbour, peers
from support.messages import key_of
from support.waiting import assert_eventually

CAP = 2e6
ROOM = 1.1
"""What may be over: the burst, a chunk, and the clocks of a busy machine."""


def message(key: MessageKey, num_bytes: int) -> Message:
    return Message(key=key, tensors=(("0:0", torch.zeros(num_bytes // 4)),))


async def send_and_time(sender: Peer, sends: list[tuple[Peer, Message]]) -> float:
    """Seconds until all of it is acknowledged."""
    began = time.monotonic()
    done = [asyncio.wrap_future(sender.links.send(target.name, message)) for target, message in sends]
    await asyncio.wait_for(asyncio.gather(*done), 60)
    return time.monotonic() - began


async def test_two_links_together_stay_below_the_upload_cap() -> None:
    async with peers("sender", "one", "two", pacers=(Pacer(CAP),)) as (sender, one, two):
        await asyncio.gather(
            sender.configure(neighbour(one, dial=True, stage=1), neighbour(two, dial=True, stage=2)),
            one.configure(neighbour(sender, dial=False)),
            two.configure(neighbour(sender, dial=False)),
        )
        size = 2_500_000
        sends = [(one, message(key_of(Kind.ACTIVATION), size)), (two, message(key_of(Kind.GRADIENT), size))]
        seconds = await send_and_time(sender, sends)
    assert 2 * size / seconds <= ROOM * CAP


async def test_a_neighbour_is_sent_no_more_than_its_owner_allows() -> None:
    async with peers("sender", "capped", "free") as (sender, capped, free):
        await asyncio.gather(
            sender.configure(
                neighbour(capped, dial=True, stage=1, max_bytes_per_second=CAP), neighbour(free, dial=True, stage=2)
            ),
            capped.configure(neighbour(sender, dial=False)),
            free.configure(neighbour(sender, dial=False)),
        )
        size = 4_500_000
        to_free = asyncio.create_task(send_and_time(sender, [(free, message(key_of(Kind.ACTIVATION), size))]))
        seconds = await send_and_time(sender, [(capped, message(key_of(Kind.ACTIVATION), size))])
        assert await to_free < seconds
        await assert_eventually(lambda: all(use.round_trip_seconds > 0 for use in sender.links.uses()))
        shown = {use.target: use for use in sender.links.uses()}
    assert shown[capped.name].bytes_per_second <= ROOM * CAP
    assert shown[capped.name].bytes_per_second < shown[free.name].bytes_per_second
    assert shown[capped.name].seconds_busy == pytest.approx(seconds, rel=0.2)
    assert size / seconds <= ROOM * CAP


async def test_a_gradient_overtakes_an_activation_that_a_cap_holds_up() -> None:
    async with peers("sender", "receiver", pacers=(Pacer(0.5e6),)) as (sender, receiver):
        await asyncio.gather(
            sender.configure(neighbour(receiver, dial=True, stage=1)), receiver.configure(neighbour(sender, dial=False))
        )
        sender.links.send(receiver.name, message(key_of(Kind.ACTIVATION), 1_000_000))
        sender.links.send(receiver.name, message(key_of(Kind.GRADIENT), 40_000))
        assert (await receiver.receive()).key.kind is Kind.GRADIENT
        assert (await receiver.receive()).key.kind is Kind.ACTIVATION
