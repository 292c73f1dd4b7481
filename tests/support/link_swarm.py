"""Peers' links over real gRPC in one process, and a proxy that tampers with what passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio

from atoll.peer.links.links import Links, LinkSettings
from atoll.protocol.assignment import Neighbour
from atoll.protocol.channel import open_channel, start_server
from atoll.protocol.errors import LinkError
from atoll.protocol.ids import Generation, PeerId, StageIndex
from atoll.protocol.messages import Kind, Message, MessageHeader
from atoll.protocol.pacing import Pacer
from atoll.protocol.v1 import frames_pb2, frames_pb2_grpc

CREDIT = {Kind.ACTIVATION: 2, Kind.GRADIENT: 2}
Context = grpc.aio.ServicerContext[frames_pb2.Frame, frames_pb2.Frame]
Tamper = Callable[[frames_pb2.Frame], Iterable[frames_pb2.Frame]]


def settings_of(**changes: object) -> LinkSettings:
    """Settings with short deadlines."""
    return LinkSettings(**{"credit": CREDIT, "connect_seconds": 10.0, "silence_seconds": 10.0, **changes})  # type: ignore[arg-type]


def accept_all(peer: PeerId, header: MessageHeader) -> str | None:
    return None


@dataclass
class Peer:
    """One peer's links, what arrived and what went wrong."""

    name: PeerId
    pacers: tuple[Pacer, ...] = ()
    links: Links = field(init=False)
    server: grpc.aio.Server = field(init=False)
    address: str = ""
    arrived: asyncio.Queue[tuple[PeerId, Message]] = field(default_factory=asyncio.Queue)
    faults: asyncio.Queue[LinkError] = field(default_factory=asyncio.Queue)

    async def start(self) -> None:
        self.links = Links(
            self.name,
            on_message=lambda peer, message: self.arrived.put_nowait((peer, message)),
            on_fault=self.faults.put_nowait,
            pacers=self.pacers,
        )
        self.server, self.address = await start_server([self.links.register], "127.0.0.1:0")

    async def stop(self) -> None:
        await self.links.close()
        await self.server.stop(0)

    async def receive(self) -> Message:
        """The next message, or the fault that came instead."""
        message = asyncio.ensure_future(self.arrived.get())
        fault = asyncio.ensure_future(self.faults.get())
        await asyncio.wait((message, fault), return_when=asyncio.FIRST_COMPLETED, timeout=30)
        if fault.done():
            message.cancel()
            raise fault.result()
        fault.cancel()
        assert message.done(), f"{self.name} received nothing for 30 s"
        return message.result()[1]

    async def fault(self) -> LinkError:
        """The next fault."""
        return await asyncio.wait_for(self.faults.get(), 30)

    async def configure(self, *neighbours: Neighbour, generation: int = 1, settings: LinkSettings | None = None) -> None:
        await self.links.configure(
            generation=Generation(generation),
            neighbours=neighbours,
            settings=settings or settings_of(),
            accept=accept_all,
        )


def neighbour(
    peer: Peer,
    *,
    dial: bool,
    stage: int = 0,
    address: str = "",
    max_bytes_per_second: float | None = None,
    codec: str = "raw",
) -> Neighbour:
    return Neighbour(
        stage=StageIndex(stage),
        peer=peer.name,
        address=address or peer.address,
        dial=dial,
        max_bytes_per_second=max_bytes_per_second,
        codec=codec,
    )


@asynccontextmanager
async def peers(*names: str, pacers: tuple[Pacer, ...] = ()) -> AsyncIterator[list[Peer]]:
    """Peers that listen, not linked yet; ``pacers`` bound what the first of them sends."""
    async with AsyncExitStack() as stack:
        started: list[Peer] = []
        for name in names:
            peer = Peer(PeerId(name), () if started else pacers)
            await peer.start()
            stack.push_async_callback(peer.stop)
            started.append(peer)
        yield started


@asynccontextmanager
async def linked_pair(
    settings: LinkSettings | None = None, tamper: Tamper | None = None, *, codecs: tuple[str, str] = ("raw", "raw")
) -> AsyncIterator[tuple[Peer, Peer]]:
    """Two linked peers, which encode with these codecs; ``tamper`` sees what the first sends to the second."""
    async with AsyncExitStack() as stack:
        left, right = await stack.enter_async_context(peers("left", "right"))
        address = right.address
        if tamper is not None:
            address = await stack.enter_async_context(proxy(right.address, tamper))
        await asyncio.gather(
            left.configure(neighbour(right, dial=True, stage=1, address=address, codec=codecs[0]), settings=settings),
            right.configure(neighbour(left, dial=False, codec=codecs[1]), settings=settings),
        )
        yield left, right


@asynccontextmanager
async def proxy(target: str, tamper: Tamper) -> AsyncIterator[str]:
    """A server that passes Link streams on to ``target``; what each frame becomes is up to ``tamper``."""
    server, address = await start_server(
        [lambda server: frames_pb2_grpc.add_LinksServicer_to_server(_Proxy(target, tamper), server)], "127.0.0.1:0"
    )
    yield address
    await server.stop(0)


class _Proxy(frames_pb2_grpc.LinksServicer):
    def __init__(self, target: str, tamper: Tamper) -> None:
        self._target = target
        self._tamper = tamper

    async def Link(self, request_iterator: object, context: Context) -> None:
        async with open_channel(self._target) as channel:
            call = frames_pb2_grpc.LinksStub(channel).Link()
            back = asyncio.create_task(self._pass_back(call, context))
            try:
                while isinstance(frame := await context.read(), frames_pb2.Frame):
                    for passed in self._tamper(frame):
                        await call.write(passed)
            finally:
                back.cancel()
                call.cancel()
                await asyncio.gather(back, return_exceptions=True)

    async def _pass_back(self, call: grpc.aio.StreamStreamCall[frames_pb2.Frame, frames_pb2.Frame], context: Context) -> None:
        while isinstance(frame := await call.read(), frames_pb2.Frame):
            await context.write(frame)
