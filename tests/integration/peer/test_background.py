"""State that is fetched over a line of its sender's gradients leaves the line to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from atoll.peer.stage.events import StateKept
from atoll.peer.state.lending import Lending
from atoll.protocol.channel import open_channel, start_server
from atoll.protocol.ids import Generation, PeerId, StepNumber
from atoll.protocol.messages import Kind
from atoll.protocol.v1 import state_pb2, state_pb2_grpc
from support.link_swarm import Peer, neighbour, peers
from support.messages import key_of, message_of
from support.shaped_proxy import Shape, shaped_proxy
from support.waiting import assert_eventually

LINE = Shape(up=4e6, down=4e6, delay_seconds=0.01, shared=True)
GRADIENT_ELEMENTS = 250_000
MOST_SHARE = 0.25
"""Of a gradient of a quarter of a second, what may come in between: a twentieth of the line, and the chunk under way."""


class Copy:
    """A copy of 100 MB in the background; ``num_bytes`` have arrived."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.num_bytes = 0

    async def run(self) -> None:
        async with open_channel(self._address) as channel:
            request = state_pb2.StateRequest(peer="receiver", generation=1, step=1, names=["weight"])
            async for part in state_pb2_grpc.StateStub(channel).Fetch(request):
                self.num_bytes += len(part.frame.chunk)


@asynccontextmanager
async def copying() -> AsyncIterator[tuple[Peer, Peer, Copy]]:
    """A sender and a receiver that are linked over a shaped line, over which the receiver copies state of the sender."""
    async with peers("sender", "receiver") as (sender, receiver):
        lending = Lending(sender.name, (sender.links.courtesy,))
        state = {"weight": torch.zeros(25_000_000)}
        server, direct = await start_server([sender.links.register, lending.register], "127.0.0.1:0")
        async with shaped_proxy(direct, LINE) as address:
            await asyncio.gather(
                sender.configure(neighbour(receiver, dial=False, stage=1)),
                receiver.configure(neighbour(sender, dial=True, address=address)),
            )
            lending.lend(StateKept(generation=Generation(1), step=StepNumber(1), borrowers=(PeerId("receiver"),), state=state))
            copy = Copy(address)
            await send_gradient(sender, receiver, 0)  # which shows what the line carries
            task = asyncio.create_task(copy.run())
            yield sender, receiver, copy
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await server.stop(0)


async def send_gradient(sender: Peer, receiver: Peer, microbatch: int) -> None:
    """Returns when it has arrived."""
    message = message_of(key_of(Kind.GRADIENT, microbatch=microbatch), GRADIENT_ELEMENTS)
    sender.links.send(receiver.name, message)
    receiver.links.consumed((await receiver.receive()).key, sender.name)


async def test_a_gradient_is_hardly_delayed_by_a_copy_that_goes_on() -> None:
    async with copying() as (sender, receiver, copy):
        between = 0
        for microbatch in range(1, 6):
            arrived = copy.num_bytes
            await assert_eventually(lambda before=arrived: copy.num_bytes > before)  # type: ignore[misc]
            arrived = copy.num_bytes
            await send_gradient(sender, receiver, microbatch)
            between += copy.num_bytes - arrived
        assert between <= 5 * MOST_SHARE * 4 * GRADIENT_ELEMENTS
