"""Answers what `atoll-peer doctor` asks: versions, the time, and whether whoever asks can be reached from here."""

from __future__ import annotations

import asyncio
import time

import grpc.aio

from atoll.protocol.channel import PROTOCOL_VERSION, open_channel
from atoll.protocol.errors import AtollError
from atoll.protocol.guard import not_own_name
from atoll.protocol.ids import PeerId
from atoll.protocol.security import Security
from atoll.protocol.v1 import examination_pb2, examination_pb2_grpc

DIAL_SECONDS = 4.0
PROBING_SECONDS = 60.0
"""For which whoever was examined may measure its line."""
MOST_AT_ONCE = 4
"""Addresses that are dialled for those who ask; others wait their turn."""

Context = grpc.aio.ServicerContext[examination_pb2.ExamineRequest, examination_pb2.ExamineReply]


class ExaminationServicer(examination_pb2_grpc.ExaminationServicer):
    """``version`` is this software's."""

    def __init__(self, version: str, security: Security) -> None:
        self._version = version
        self._security = security
        self._turn = asyncio.Semaphore(MOST_AT_ONCE)
        self._examined: dict[str, float] = {}

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server, before it starts."""
        examination_pb2_grpc.add_ExaminationServicer_to_server(self, server)

    def is_here(self, name: str) -> bool:
        """Whether this peer was examined just now: it may measure its line to the coordinator, as one with a session may."""
        self._examined = {one: until for one, until in self._examined.items() if until > time.monotonic()}
        return name in self._examined

    async def Examine(self, request: examination_pb2.ExamineRequest, context: Context) -> examination_pb2.ExamineReply:
        """Dials the caller where it says that it listens, and nobody else."""
        if (foreign := not_own_name(request.name)) is not None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, foreign)
        self._examined[request.name] = time.monotonic() + PROBING_SECONDS
        unreachable = "it listens nowhere"
        if request.address:
            async with self._turn:
                unreachable = await self._why_not_reached(PeerId(request.name), request.address)
        return examination_pb2.ExamineReply(
            protocol_version=PROTOCOL_VERSION, version=self._version, time=time.time(), unreachable=unreachable
        )

    async def _why_not_reached(self, peer: PeerId, address: str) -> str:
        """Empty where a connection came about, with TLS that is sure of whose it is."""
        try:
            async with asyncio.timeout(DIAL_SECONDS), open_channel(address, self._security, peer) as channel:
                await channel.channel_ready()
        except TimeoutError:
            return f"no connection from the coordinator to {address} within {DIAL_SECONDS:g} s"
        except AtollError as error:
            return str(error)
        return ""
