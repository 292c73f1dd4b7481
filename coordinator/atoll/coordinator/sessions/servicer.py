"""The coordinator's RPCs: status codes and streams here, decisions elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

import grpc
import grpc.aio

from atoll.coordinator import transfer
from atoll.coordinator.sessions.membership import Refusal
from atoll.coordinator.sessions.session import SessionContext
from atoll.coordinator.sessions.sessions import Sessions
from atoll.protocol.errors import AtollError, IdentityRefused
from atoll.protocol.guard import not_own_name
from atoll.protocol.ids import Generation, PeerId
from atoll.protocol.v1 import operator_pb2, operator_pb2_grpc, session_pb2, session_pb2_grpc

JOIN_SECONDS = 10.0
"""A connection that does not introduce itself for this long is closed."""


class StateKeeper(Protocol):
    """Where peers' state goes to and comes from."""

    async def receive(self, context: transfer.Context) -> None:
        """Serve one StoreState stream."""

    async def send(
        self,
        context: transfer.Context,
        peer: PeerId,
        generation: Generation,
        names: tuple[str, ...],
        max_bytes_per_second: float,
    ) -> None:
        """Serve one FetchState stream, no faster than that (0: no limit)."""


class OperatorDesk(Protocol):
    """What the operator may ask."""

    def status(self, *, timelines: bool = False) -> operator_pb2.StatusReply: ...

    def fleet(self) -> operator_pb2.FleetReply: ...

    def stop(self, reason: str) -> None: ...

    async def export(self) -> operator_pb2.ExportReply: ...

    async def replan(self) -> operator_pb2.ReplanReply: ...

    def remove_peer(self, name: str, hand_over_seconds: float) -> bool: ...

    def allow_peer(self, name: str) -> bool: ...


class CoordinatorServicer(session_pb2_grpc.CoordinatorServicer):
    """Sessions and state transfers of peers."""

    def __init__(self, sessions: Sessions, state: StateKeeper) -> None:
        self._sessions = sessions
        self._state = state

    async def Session(self, request_iterator: object, context: SessionContext) -> None:
        """A peer's session; the first message introduces it."""
        try:
            first = await asyncio.wait_for(context.read(), JOIN_SECONDS)
        except TimeoutError:
            first = None
        if not isinstance(first, session_pb2.PeerMessage) or not first.HasField("join"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a session must be Join")
        foreign = not_own_name(first.join.name)
        verdict = Refusal(reason=foreign) if foreign else await self._sessions.admit(first.join, context.peer())
        if isinstance(verdict, Refusal):
            rejected = session_pb2.Rejected(reason=verdict.reason, again=verdict.again)
            with contextlib.suppress(TimeoutError):  # it does not even read why
                await asyncio.wait_for(context.write(session_pb2.CoordinatorMessage(rejected=rejected)), JOIN_SECONDS)
            return
        await self._sessions.converse(verdict, context)

    async def StoreState(self, request_iterator: object, context: transfer.Context) -> None:
        """A peer hands in its state."""
        try:
            await self._state.receive(context)
        except IdentityRefused as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except AtollError as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))

    async def FetchState(self, request: session_pb2.FetchStateRequest, context: transfer.Context) -> None:
        """A peer fetches the first values that it cannot make itself."""
        if (foreign := not_own_name(request.peer)) is not None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, foreign)
        try:
            peer, limit = PeerId(request.peer), request.max_bytes_per_second
            await self._state.send(context, peer, Generation(request.generation), tuple(request.names), limit)
        except AtollError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))


class OperatorServicer(operator_pb2_grpc.OperatorServicer):
    """The operator's questions and wishes."""

    def __init__(self, desk: OperatorDesk) -> None:
        self._desk = desk

    async def Status(self, request: operator_pb2.StatusRequest, context: object) -> operator_pb2.StatusReply:
        """How the run stands."""
        return self._desk.status(timelines=request.timelines)

    async def Fleet(self, request: operator_pb2.FleetRequest, context: object) -> operator_pb2.FleetReply:
        """What is known of the peers and of their links."""
        return self._desk.fleet()

    async def Stop(self, request: operator_pb2.StopRequest, context: object) -> operator_pb2.StopReply:
        """End the run after the step that is running."""
        self._desk.stop(request.reason or "stopped by the operator")
        return operator_pb2.StopReply()

    async def Export(
        self,
        request: operator_pb2.ExportRequest,
        context: grpc.aio.ServicerContext[operator_pb2.ExportRequest, operator_pb2.ExportReply],
    ) -> operator_pb2.ExportReply:
        """Write the weights of the last committed step to a file."""
        try:
            return await self._desk.export()
        except AtollError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def Replan(
        self,
        request: operator_pb2.ReplanRequest,
        context: grpc.aio.ServicerContext[operator_pb2.ReplanRequest, operator_pb2.ReplanReply],
    ) -> operator_pb2.ReplanReply:
        """Look for a better plan, and change to it where that pays."""
        try:
            return await self._desk.replan()
        except AtollError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def RemovePeer(self, request: operator_pb2.RemovePeerRequest, context: object) -> operator_pb2.RemovePeerReply:
        """End a peer's session and bar its name."""
        return operator_pb2.RemovePeerReply(was_here=self._desk.remove_peer(request.name, request.hand_over_seconds))

    async def AllowPeer(self, request: operator_pb2.AllowPeerRequest, context: object) -> operator_pb2.AllowPeerReply:
        """Let a barred name join again."""
        return operator_pb2.AllowPeerReply(was_barred=self._desk.allow_peer(request.name))
