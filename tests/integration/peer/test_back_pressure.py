"""A slow receiver holds its sender back; neither's memory grows with what is to be sent."""

from __future__ import annotations

import asyncio
import sys
from collections import deque

import psutil
import torch

from atoll.protocol.ids import PeerId
from atoll.protocol.messages import Kind, Message
from support.link_swarm import CREDIT, Peer, neighbour, peers
from support.messages import key_of
from support.slow_receiver import SENDER
from support.swarm import ROOT, environment

MEBIBYTE = 2**20
NUM_MESSAGES = 160
MESSAGE_BYTES = MEBIBYTE
IN_FLIGHT = 4
"""What the sender has handed over and its neighbour does not have, as a stage bounds its microbatches in flight."""
ROOM_BYTES = 24 * MEBIBYTE
"""For what gRPC and the allocator keep on top; all messages together are 160 MiB."""


async def test_a_slow_receiver_holds_the_sender_back_and_memory_stays() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "support.slow_receiver", str(NUM_MESSAGES)),
        env=environment(PYTHONPATH=str(ROOT / "tests")),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        address = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()
        async with peers(SENDER) as (sender,):
            receiver = Peer(PeerId("receiver"), address=address)
            await sender.configure(neighbour(receiver, dial=True, stage=1))
            grown_here = await send_all(sender, receiver.name)
            grown_there = int(await asyncio.wait_for(process.stdout.readline(), 60))
            await asyncio.wait_for(process.communicate(b""), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert grown_there <= CREDIT[Kind.ACTIVATION] * MESSAGE_BYTES + ROOM_BYTES
    assert grown_here <= (IN_FLIGHT + 1) * MESSAGE_BYTES + ROOM_BYTES


async def send_all(sender: Peer, target: PeerId) -> int:
    """By how much memory grew while all messages were sent, each a tensor of its own."""
    process = psutil.Process()
    before = most = process.memory_info().rss
    pending: deque[asyncio.Future[None]] = deque()
    for index in range(NUM_MESSAGES):
        while len(pending) >= IN_FLIGHT:
            await asyncio.wait_for(pending.popleft(), 60)
        tensor = torch.full((MESSAGE_BYTES // 4,), float(index))
        message = Message(key=key_of(microbatch=index), tensors=(("0:0", tensor),))
        pending.append(asyncio.wrap_future(sender.links.send(target, message)))
        most = max(most, process.memory_info().rss)
    await asyncio.wait_for(asyncio.gather(*pending), 60)
    return max(most, process.memory_info().rss) - before
