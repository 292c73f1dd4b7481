"""The coordinator as a relay: joins the tunnels of two peers that cannot dial each other, and reads nothing of it.

Theory of operation. A dialler's call is held until the target has answered with a call of its own. From then on each of the two
handlers reads from its own end and writes to the other, one frame at a time, so nothing piles up here but what gRPC's windows
hold. When either handler ends, for whatever reason, both do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count

import grpc
import grpc.aio

from atoll.coordinator.reach.relay_grants import Pair, RelayGrants
from atoll.coordinator.reach.ways import Ways
from atoll.coordinator.sessions.sessions import Sessions
from atoll.protocol.channel import PROTOCOL_VERSION
from atoll.protocol.errors import LinkError, WireError
from atoll.protocol.guard import not_own_name
from atoll.protocol.ids import COORDINATOR, PeerId
from atoll.protocol.pump import STREAM_ERRORS
from atoll.protocol.tunnel import OPEN_SECONDS, Entrances, carry, read_data
from atoll.protocol.v1 import relay_pb2_grpc, session_pb2
from atoll.protocol.v1.relay_pb2 import TunnelFrame, TunnelHello, TunnelOpened

TunnelContext = grpc.aio.ServicerContext[TunnelFrame, TunnelFrame]

HELLO_SECONDS = 10.0
MOST_TUNNELS = 512
"""At once. Each takes two streams and what their windows hold."""

_log = logging.getLogger(__name__)


class NotRelayed(Exception):
    """Why a tunnel does not come about, with gRPC's code for it."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(slots=True, eq=False)
class _Joint:
    """Where two ends meet; ``answered`` gives the target's call, ``over`` ends both."""

    source: PeerId
    target: PeerId
    answered: asyncio.Future[TunnelContext]
    dialler: TunnelContext | None = None
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Relay(relay_pb2_grpc.RelayServicer):
    """``grants`` says who may meet whom here. On the event loop."""

    def __init__(self, sessions: Sessions) -> None:
        self.grants = RelayGrants()
        self._sessions = sessions
        self._numbers = count(1)
        self._joints: dict[int, _Joint] = {}
        self._entrances = Entrances(self._reach)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server, before it starts."""
        relay_pb2_grpc.add_RelayServicer_to_server(self, server)

    async def Tunnel(self, request_iterator: object, context: TunnelContext) -> None:
        """One end of a tunnel, until it is over."""
        try:
            hello = await _hello(context)
            if hello.answer:
                await self._answer(hello, context)
            else:
                await self._dial(hello, context)
        except NotRelayed as error:
            await context.abort(error.code, error.reason)

    def planned(self, pairs: Iterable[Pair]) -> None:
        """A new plan: these peers meet here, and whoever else did for the plan before does no more."""
        self.grants.planned(pairs)
        now = time.monotonic()
        for joint in self._joints.values():
            if joint.source != COORDINATOR and self.grants.refusal(joint.source, joint.target, now) is not None:
                joint.over.set()

    def gone(self, peer: PeerId) -> None:
        """The peer is here no longer: its tunnels end."""
        for joint in self._joints.values():
            if peer in (joint.source, joint.target):
                joint.over.set()

    async def addresses(self, ways: Ways, peers: Iterable[PeerId]) -> Mapping[PeerId, str]:
        """Where this process itself dials peers."""
        found = {}
        for peer in peers:
            way = ways.to(COORDINATOR, peer)
            found[peer] = await self._entrances.entrance(peer) if way.relayed else way.address
        return found

    async def close(self) -> None:
        """Ends what this process has dialled, and all tunnels."""
        await self._entrances.close()
        for joint in self._joints.values():
            joint.over.set()

    async def _dial(self, hello: TunnelHello, context: TunnelContext) -> None:
        source, target = PeerId(hello.source), PeerId(hello.target)
        refusal = self.grants.refusal(source, target, time.monotonic())
        if refusal is not None:
            raise NotRelayed(grpc.StatusCode.PERMISSION_DENIED, refusal)
        async with self._joint(source, target) as joint:
            joint.dialler = context
            other = await self._answered(joint)
            await context.write(TunnelFrame(opened=TunnelOpened()))
            joint.opened.set()
            await _hand_on(context, other, joint.over)

    async def _answer(self, hello: TunnelHello, context: TunnelContext) -> None:
        joint = self._joints.get(hello.answer)
        if joint is None or joint.target != hello.source or joint.answered.done():
            raise NotRelayed(grpc.StatusCode.NOT_FOUND, f"nobody waits for an answer {hello.answer} of {hello.source[:80]}")
        try:
            await context.write(TunnelFrame(opened=TunnelOpened()))
            joint.answered.set_result(context)
            await _first(joint.opened, joint.over)
            if joint.dialler is not None and not joint.over.is_set():
                await _hand_on(context, joint.dialler, joint.over)
            else:
                await joint.over.wait()
        finally:
            joint.over.set()

    async def _reach(self, target: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection of this process itself."""
        try:
            async with self._joint(COORDINATOR, target) as joint:
                other = await self._answered(joint)
                carrying = asyncio.create_task(carry(other, reader, writer))
                try:
                    await _first(carrying, joint.over)
                finally:
                    carrying.cancel()
                    await asyncio.gather(carrying, return_exceptions=True)
        except NotRelayed as error:
            raise LinkError(target, error.reason) from error

    @contextlib.asynccontextmanager
    async def _joint(self, source: PeerId, target: PeerId) -> AsyncIterator[_Joint]:
        """A place to meet at, and the target's call to it."""
        if len(self._joints) >= MOST_TUNNELS:
            raise NotRelayed(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_TUNNELS} tunnels are open, there cannot be more")
        if self._sessions.find(target) is None:
            raise NotRelayed(grpc.StatusCode.UNAVAILABLE, f"{target[:80]} is not in the run now")
        number = next(self._numbers)
        joint = _Joint(source, target, asyncio.get_running_loop().create_future())
        self._joints[number] = joint
        try:
            offer = session_pb2.TunnelOffer(number=number, source=source)
            self._sessions.tell([target], session_pb2.CoordinatorMessage(tunnel=offer))
            yield joint
        finally:
            joint.over.set()
            joint.answered.cancel()
            del self._joints[number]

    async def _answered(self, joint: _Joint) -> TunnelContext:
        ending = asyncio.create_task(joint.over.wait())
        try:
            await asyncio.wait((joint.answered, ending), timeout=OPEN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
        if joint.over.is_set() or not joint.answered.done():
            raise NotRelayed(grpc.StatusCode.UNAVAILABLE, f"{joint.target} did not come to meet {joint.source} in time")
        return joint.answered.result()


async def _hello(context: TunnelContext) -> TunnelHello:
    try:
        frame: object = await asyncio.wait_for(context.read(), HELLO_SECONDS)
    except TimeoutError:
        frame = None
    if not isinstance(frame, TunnelFrame) or not frame.HasField("hello"):
        raise NotRelayed(grpc.StatusCode.INVALID_ARGUMENT, "the first frame of a tunnel must be a hello")
    hello = frame.hello
    if hello.protocol_version != PROTOCOL_VERSION:
        reason = f"this is protocol {PROTOCOL_VERSION}, not {hello.protocol_version}: install the same version of Atoll on both"
        raise NotRelayed(grpc.StatusCode.FAILED_PRECONDITION, reason)
    if (foreign := not_own_name(hello.source)) is not None:
        raise NotRelayed(grpc.StatusCode.PERMISSION_DENIED, foreign)
    return hello


async def _hand_on(own: TunnelContext, other: TunnelContext, over: asyncio.Event) -> None:
    """What one end says, to the other, until it ends or the tunnel is over; then the tunnel is."""
    moving = asyncio.create_task(_move(own, other))
    try:
        await _first(moving, over)
    finally:
        over.set()
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)


async def _move(own: TunnelContext, other: TunnelContext) -> None:
    try:
        while (frame := await read_data(own)) is not None:
            await other.write(frame)
    except WireError as error:
        _log.warning("a tunnel ends: %s", error)
    except STREAM_ERRORS:
        return


async def _first(one: asyncio.Event | asyncio.Task[None], other: asyncio.Event) -> None:
    """Returns when either has come; leaves a task that was given running."""
    waits = [asyncio.create_task(event.wait()) for event in (one, other) if isinstance(event, asyncio.Event)]
    given = [one] if isinstance(one, asyncio.Task) else []
    try:
        await asyncio.wait([*waits, *given], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
