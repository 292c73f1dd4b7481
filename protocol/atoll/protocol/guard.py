"""Stands before every RPC of a server: who calls, whether the RPC is for them, and how often and how much at once they may.

Servicers find out who calls from :func:`caller` and :func:`not_own_name`. In plain text, which exists on loopback alone,
nobody has shown anything, and names are taken as they are said.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio

from atoll.protocol.access import is_allowed, refusal
from atoll.protocol.call_limits import CallLimits
from atoll.protocol.errors import IdentityRefused
from atoll.protocol.handshakes import HandshakeWatch
from atoll.protocol.identity import Caller, Role, Verifier
from atoll.protocol.ids import COORDINATOR

_log = logging.getLogger(__name__)
_CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Awaitable[Any]]


def caller() -> Caller | None:
    """Who calls the RPC that is being served; None in plain text."""
    return _CALLER.get()


def not_own_name(name: str) -> str | None:
    """Why the caller must not speak for ``name``; None when that is its own, or nobody has shown theirs."""
    found = _CALLER.get()
    if found is None or found.name == name or (found.role is Role.COORDINATOR and name == COORDINATOR):
        return None
    return f"the certificate is that of {found}, the message says it comes from {name[:80]!r}"


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """``verifier`` None: plain text."""

    def __init__(self, verifier: Verifier | None, limits: CallLimits | None = None) -> None:
        self._verifier = verifier
        self._limits = limits or CallLimits()
        self._open: dict[asyncio.Task[Any], str] = {}
        self._revoked: set[asyncio.Task[Any]] = set()
        self.handshakes = HandshakeWatch()

    def end_calls_of(self, serials: Iterable[str]) -> None:
        """Ends what those with these certificates have open."""
        gone = frozenset(serials)
        for task, serial in self._open.items():
            if serial in gone:
                self._revoked.add(task)
                task.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Puts this guard before whatever serves the method; for one that nobody serves, gRPC says so itself."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        makers = (
            (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
            (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
            (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
            (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
        )
        behaviour, make = next((behaviour, make) for behaviour, make in makers if behaviour is not None)
        return make(
            self._guarded(method, behaviour),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _guarded(self, method: str, behaviour: Any) -> Behaviour:
        async def serve(request: Any, context: Context) -> Any:
            found = await self._admit(method, context)
            account = str(found) if found is not None else _without_port(context.peer())
            too_much = self._limits.begin(account, time.monotonic())
            if too_much is not None:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, too_much)
            _CALLER.set(found)
            task = asyncio.current_task()
            assert task is not None
            self._open[task] = found.serial if found is not None else ""
            try:
                return await behaviour(request, context)
            except asyncio.CancelledError:
                if task not in self._revoked:
                    raise
                task.uncancel()
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{found} was removed from the run by the operator")
            finally:
                self._revoked.discard(task)
                del self._open[task]
                self._limits.end(account)

        return serve

    async def _admit(self, method: str, context: Context) -> Caller | None:
        """Who calls; ends the call of whoever may not."""
        self.handshakes.spoke(context.peer(), time.monotonic())
        if method.endswith("/Enrol"):
            # Whoever enrols has looked at the authority before, over a connection on which nothing was said.
            self.handshakes.spoke(f"{context.peer()} before", time.monotonic())
        if self._verifier is None:
            return None
        try:
            found = self._verifier.identify(_certificate(context), datetime.datetime.now(datetime.UTC))
        except IdentityRefused as error:
            _log.warning("refused %s from %s: %s", method, context.peer(), error)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        if not is_allowed(method, found.role):
            reason = refusal(method, found.role)
            _log.warning("refused %s to %s at %s: %s", method, found, context.peer(), reason)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
        return found


def _certificate(context: Context) -> bytes:
    """The certificate that TLS has checked. Raises IdentityRefused when there is none."""
    values = context.auth_context().get("x509_pem_cert", ())
    for value in values:
        return bytes(value)
    raise IdentityRefused("no certificate was shown: join with an invitation, `atoll invite` prints one")


def _without_port(address: str) -> str:
    """The host of ``ipv4:1.2.3.4:5``: who opens many connections is one caller."""
    return address.rpartition(":")[0] or address
