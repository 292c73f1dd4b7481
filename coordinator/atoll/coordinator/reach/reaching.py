"""Dials each peer back, where it says that others reach it, and so finds out who can be dialled at all.

A peer that cannot is outbound-only: it is in the run like any other, but dials its neighbours itself. It is dialled again now
and then, for its owner may have opened a port. Nobody waits for this but whoever makes a plan, and only for a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from atoll.coordinator.sessions.membership import Member, Reach
from atoll.coordinator.sessions.sessions import Sessions
from atoll.protocol.dialling_back import DIAL_SECONDS, why_not_dialled
from atoll.protocol.ids import PeerId
from atoll.protocol.security import Security
from atoll.protocol.v1 import session_pb2

AGAIN_SECONDS = 60.0
_SLACK_SECONDS = 1.0

_log = logging.getLogger(__name__)


class Reaching:
    """On the event loop; ``spawn`` runs work in the background."""

    def __init__(self, sessions: Sessions, security: Security, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._sessions = sessions
        self._security = security
        self._spawn = spawn
        self._changed = asyncio.Event()

    def joined(self, member: Member) -> None:
        """A peer is here."""
        if not member.introduction.address:
            self._note(member, Reach.OUTBOUND_ONLY, "it accepts no connection, as its owner wants it")
        else:
            self._spawn(self._dial(member))

    async def settled(self, names: Iterable[PeerId]) -> None:
        """Returns when it is known of all of these whether they can be dialled, or has taken too long to find out."""
        wanted, deadline = tuple(names), time.monotonic() + DIAL_SECONDS + _SLACK_SECONDS
        while any(member.reach is Reach.UNKNOWN for member in map(self._sessions.membership.find, wanted) if member):
            self._changed.clear()
            left = deadline - time.monotonic()
            if left <= 0.0:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)

    async def _dial(self, member: Member) -> None:
        """Until the peer was reached, or is gone."""
        while self._is_here(member):
            reason = await why_not_dialled(member.introduction.address, member.name, self._security)
            if not self._is_here(member):
                return
            self._note(member, Reach.OUTBOUND_ONLY if reason else Reach.REACHABLE, reason)
            if not reason:
                return
            await asyncio.sleep(AGAIN_SECONDS)

    def _is_here(self, member: Member) -> bool:
        return self._sessions.membership.find(member.name) is member

    def _note(self, member: Member, reach: Reach, reason: str) -> None:
        before, member.reach, member.unreached = member.reach, reach, reason
        self._changed.set()
        if before is reach:
            return
        address = member.introduction.address
        if reach is Reach.REACHABLE:
            _log.info("%s can be dialled at %s", member.name, address)
        elif address:
            _log.warning("%s is outbound-only: it cannot be dialled at %s: %s", member.name, address, reason)
        else:
            _log.info("%s is outbound-only: %s", member.name, reason)
            return
        told = session_pb2.Reached(reachable=reach is Reach.REACHABLE, reason=f"not at {address}: {reason}" if reason else "")
        self._sessions.tell([member.name], session_pb2.CoordinatorMessage(reached=told))
