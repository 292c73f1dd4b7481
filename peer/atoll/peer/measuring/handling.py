"""What a message takes of this machine's processors, measured: two ends of a link in this very process exchange some.

A small message costs a process little but not nothing: its frames, its acknowledgement and its credit pass through Python,
gRPC and the system at both ends. Where computing takes every core, that time is missing there, and plans count it.
"""

from __future__ import annotations

import asyncio
import logging
import time

import grpc.aio
import torch

from atoll.peer.links.links import Links, LinkSettings
from atoll.protocol.assignment import Neighbour
from atoll.protocol.channel import start_server
from atoll.protocol.errors import AtollError
from atoll.protocol.ids import Generation, MicrobatchIndex, PeerId, StageIndex, StepNumber
from atoll.protocol.messages import Kind, Message, MessageHeader, MessageKey

_MESSAGES, _WARM_UP = 40, 10
_PAUSE_SECONDS = 0.003  # so that each one wakes threads that sleep, as in a step
_ELEMENTS = 16_384
_LIMIT_SECONDS = 10.0

_log = logging.getLogger("atoll.peer")


async def handling_seconds() -> float:
    """Seconds that a core is busy with one end of a message of 64 KiB while nothing else goes on in this process; 0 where that
    cannot be measured. Takes well under a second."""
    try:
        async with asyncio.timeout(_LIMIT_SECONDS):
            return await _measure()
    except (AtollError, TimeoutError) as error:
        _log.warning("what a message takes could not be measured: %s", error or f"nothing came in {_LIMIT_SECONDS:g} s")
        return 0.0


async def _measure() -> float:
    pair = await _Pair.open()
    try:
        await pair.connect()
        for index in range(_WARM_UP):
            await pair.exchange(index)
        before = time.process_time()
        for index in range(_WARM_UP, _WARM_UP + _MESSAGES):
            await pair.exchange(index)
            await asyncio.sleep(_PAUSE_SECONDS)
        return (time.process_time() - before) / _MESSAGES / 2.0
    finally:
        await pair.close()


class _Pair:
    """Two ends of one link over the loopback interface."""

    _server: grpc.aio.Server
    _address: str

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[MessageKey | AtollError] = asyncio.Queue()
        self._ends = tuple(
            Links(PeerId(name), on_message=self._on_message, on_fault=self._arrived.put_nowait) for name in ("near", "far")
        )
        self._values = torch.zeros(_ELEMENTS)

    @classmethod
    async def open(cls) -> _Pair:
        pair = cls()
        pair._server, pair._address = await start_server([pair._ends[1].register], "127.0.0.1:0")
        return pair

    async def connect(self) -> None:
        near, far = self._ends
        settings = LinkSettings(credit={Kind.ACTIVATION: 1}, connect_seconds=_LIMIT_SECONDS)
        dialled = Neighbour(stage=StageIndex(1), peer=PeerId("far"), address=self._address, dial=True)
        dialling = Neighbour(stage=StageIndex(0), peer=PeerId("near"), address="", dial=False)
        await asyncio.gather(
            near.configure(generation=Generation(1), neighbours=(dialled,), settings=settings, accept=_accept),
            far.configure(generation=Generation(1), neighbours=(dialling,), settings=settings, accept=_accept),
        )

    async def exchange(self, index: int) -> None:
        """One message there, taken and acknowledged."""
        near, far = self._ends
        key = MessageKey(
            generation=Generation(1),
            step=StepNumber(1),
            microbatch=MicrobatchIndex(index),
            kind=Kind.ACTIVATION,
            source=StageIndex(0),
            target=StageIndex(1),
        )
        near.send(PeerId("far"), Message(key=key, tensors=(("value", self._values),)))
        answer = await self._arrived.get()
        if isinstance(answer, AtollError):
            raise answer
        far.consumed(answer, PeerId("near"))

    async def close(self) -> None:
        for end in self._ends:
            await end.close()
        await self._server.stop(0)

    def _on_message(self, peer: PeerId, message: Message) -> None:
        self._arrived.put_nowait(message.key)


def _accept(peer: PeerId, header: MessageHeader) -> str | None:
    return None
