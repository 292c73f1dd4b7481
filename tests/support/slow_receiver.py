"""A peer of its own process that takes what its neighbour sends slowly, and tells how much memory that took.

Run as a module with a number of messages. Prints where it listens, and when it has taken so many messages of a neighbour called
``sender``, by how many bytes its memory had grown at most. It ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys

import psutil

from atoll.protocol.ids import PeerId
from support.link_swarm import CREDIT, Peer, neighbour, peers

SENDER = PeerId("sender")
TAKES_SECONDS = 0.02


async def take(receiver: Peer, num_messages: int) -> int:
    """By how much memory grew while all messages were taken, one after the other."""
    process = psutil.Process()
    before = most = process.memory_info().rss
    for _ in range(num_messages):
        message = await receiver.receive()
        await asyncio.sleep(TAKES_SECONDS)
        assert receiver.arrived.qsize() < CREDIT[message.key.kind], "it holds more than was granted"
        most = max(most, process.memory_info().rss)
        receiver.links.consumed(message.key, SENDER)
    return most - before


async def main(num_messages: int) -> None:
    async with peers("receiver") as (receiver,):
        print(receiver.address, flush=True)
        await receiver.configure(neighbour(Peer(SENDER), dial=False))
        print(await take(receiver, num_messages), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
