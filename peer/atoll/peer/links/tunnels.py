"""A peer's tunnels through the coordinator: to those whom it cannot dial, and from those who cannot dial it.

What comes through one is carried to this peer's own server, as if it had been dialled there; so nothing else of a peer knows of
tunnels but where it is told an address.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace

from atoll.protocol.addresses import parse_address
from atoll.protocol.assignment import Assignment, Donor, Neighbour
from atoll.protocol.errors import LinkError
from atoll.protocol.ids import PeerId
from atoll.protocol.security import Security
from atoll.protocol.tunnel import FRAME_BYTES, Entrances, carry_over_relay, close_connection
from atoll.protocol.v1 import session_pb2
from atoll.protocol.v1.relay_pb2 import TunnelHello

_log = logging.getLogger("atoll.peer")


class Tunnels:
    """``relay`` says where the coordinator is now. Without ``security`` in plain text."""

    def __init__(self, own: PeerId, relay: Callable[[], str], security: Security | None) -> None:
        self._own = own
        self._relay = relay
        self._security = security
        self._entrances = Entrances(self._dial)
        self._tasks: set[asyncio.Task[None]] = set()
        self.bound = ""
        """Where this peer's server listens."""

    async def address(self, peer: PeerId, address: str, *, relayed: bool) -> str:
        """Where to dial a peer that is said to be at ``address``, or to be ``relayed``."""
        return await self._entrances.entrance(peer) if relayed else address

    async def passable(self, assignment: Assignment) -> Assignment:
        """The assignment with addresses that can be dialled from here."""
        return replace(
            assignment,
            neighbours=tuple([await self._neighbour(neighbour) for neighbour in assignment.neighbours]),
            donors=tuple([await self._donor(donor) for donor in assignment.donors]),
        )

    def answer(self, offer: session_pb2.TunnelOffer) -> None:
        """Somebody wants this peer."""
        task = asyncio.create_task(self._answer(offer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends all of them."""
        await self._entrances.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _neighbour(self, neighbour: Neighbour) -> Neighbour:
        if not neighbour.dial:
            return neighbour
        return replace(neighbour, address=await self.address(neighbour.peer, neighbour.address, relayed=neighbour.relayed))

    async def _donor(self, donor: Donor) -> Donor:
        return replace(donor, address=await self.address(donor.peer, donor.address, relayed=donor.relayed))

    async def _dial(self, target: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = TunnelHello(source=self._own, target=target)
        await carry_over_relay(self._relay(), self._security, hello, reader, writer)

    async def _answer(self, offer: session_pb2.TunnelOffer) -> None:
        bound = parse_address(self.bound)
        host = bound.host
        if bound.is_unspecified:
            host = "::1" if ":" in bound.host else "127.0.0.1"
        hello = TunnelHello(source=self._own, answer=offer.number)
        with contextlib.suppress(OSError):  # the server has ended, and so does this peer
            reader, writer = await asyncio.open_connection(host, bound.port, limit=FRAME_BYTES)
            try:
                await carry_over_relay(self._relay(), self._security, hello, reader, writer)
            except LinkError as error:
                _log.info("a tunnel that %s wanted did not come about: %s", offer.source, error)
            finally:
                await close_connection(writer)
