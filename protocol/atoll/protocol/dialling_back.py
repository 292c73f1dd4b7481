"""Whether a peer can be dialled where it says that it is: the question, and the service that answers it.

Who may ask, and so learn of an address that it can be reached from outside, is the coordinator alone.
"""

from __future__ import annotations

import asyncio
import time

import grpc
import grpc.aio

from atoll.protocol.channel import open_channel
from atoll.protocol.errors import IdentityRefused, JobError
from atoll.protocol.ids import PeerId
from atoll.protocol.pump import describe
from atoll.protocol.security import Security
from atoll.protocol.v1 import relay_pb2, relay_pb2_grpc

DIAL_SECONDS = 4.0
"""For all attempts. One to an address from which nothing comes back takes one second (``channel``)."""
_PAUSES_SECONDS = (0.1, 0.3)
"""Between attempts: a busy machine may not come through its handshake in time."""


class ReachServicer(relay_pb2_grpc.ReachServicer):
    """``name`` is who answers."""

    def __init__(self, name: str) -> None:
        self._name = name

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server, before it starts."""
        relay_pb2_grpc.add_ReachServicer_to_server(self, server)

    async def Greet(self, request: relay_pb2.GreetRequest, context: object) -> relay_pb2.GreetReply:
        """Says who is here."""
        return relay_pb2.GreetReply(name=self._name)


async def why_not_dialled(address: str, peer: PeerId, security: Security | None) -> str:
    """Dials ``peer`` at ``address``, and gives the reason where it does not answer there; empty when it does."""
    reason, deadline = "", time.monotonic() + DIAL_SECONDS
    for pause in (*_PAUSES_SECONDS, None):
        left = deadline - time.monotonic()
        if left <= 0.0:
            break
        try:
            async with asyncio.timeout(left), open_channel(address, security, peer) as channel:
                reply = await relay_pb2_grpc.ReachStub(channel).Greet(relay_pb2.GreetRequest())
        except TimeoutError:
            reason = reason or f"nothing answered within {DIAL_SECONDS:g} s"
        except grpc.aio.AioRpcError as error:
            reason = describe(error)
        except (IdentityRefused, JobError) as error:
            return str(error)
        else:
            return "" if reply.name == peer else f"it is {reply.name[:80]!r} who answers there"
        if pause is not None:
            await asyncio.sleep(pause)
    return reason
