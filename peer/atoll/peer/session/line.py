"""The way to the coordinator: one connection after another, as each breaks and the next is found. Owns the present connection
and looks for the next one; what is said on it is the session's matter."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from atoll.peer.session.connection import Connection, Received
from atoll.peer.session.returning import Returning
from atoll.peer.session.values import GoBack
from atoll.peer.settings import PeerSettings
from atoll.protocol.channel import open_channel
from atoll.protocol.errors import AtollError, SessionError
from atoll.protocol.ids import Generation, PeerId
from atoll.protocol.pacing import Pacer
from atoll.protocol.security import Security
from atoll.protocol.v1 import session_pb2, session_pb2_grpc

ATTEMPT_SECONDS = 5.0
"""For one attempt to reach a coordinator that may not be there."""

_log = logging.getLogger("atoll.peer")


class Line:
    """``on_received`` gets what the coordinator says, ``on_lost`` a sentence when the present connection breaks."""

    def __init__(
        self,
        settings: PeerSettings,
        on_received: Callable[[Received], None],
        on_lost: Callable[[str], None],
        pacers: Sequence[Pacer] = (),
    ) -> None:
        self._settings = settings
        self._on_received = on_received
        self._on_lost = on_lost
        self._pacers = pacers
        self.security: Security | None = None  # plain text, until this peer is somebody
        self.address = settings.coordinator
        """Where the coordinator is, as far as is known."""
        self._connection: Connection | None = None
        self._returning = Returning(settings.patience)
        self._was_welcomed = False
        self._closing: set[asyncio.Task[None]] = set()
        self._random = random.Random()

    @property
    def connection(self) -> Connection | None:
        """The present one."""
        return self._connection

    @property
    def unspoken_seconds(self) -> float:
        """For how long this peer has said nothing to the coordinator; 0 while there is no connection."""
        return 0.0 if self._connection is None else self._connection.unspoken_seconds

    @contextlib.asynccontextmanager
    async def beside(self) -> AsyncIterator[session_pb2_grpc.CoordinatorStub]:
        """For calls beside the session, over a connection of their own: it shows the certificate that is valid now, the
        session's the one that was when it began. Raises SessionError while there is no session."""
        if self._connection is None:
            raise SessionError("the connection to the coordinator is lost")
        async with open_channel(str(self.address), self.security) as channel:
            yield session_pb2_grpc.CoordinatorStub(channel)

    @property
    def is_patient(self) -> bool:
        """Whether it may still be looked for a coordinator that has not answered."""
        return not self._returning.is_over(time.monotonic())

    async def open(self, introduce: Callable[[], Awaitable[session_pb2.Join]]) -> None:
        """Connects and joins, as soon as a coordinator is there; says whom it waits for. Raises SessionError when nothing
        listens there for as long as this peer is patient."""
        self._returning.lost(time.monotonic())
        while True:
            connection = self._new_connection()
            try:
                await connection.open(min(ATTEMPT_SECONDS, self._settings.patience.end))
                join = await introduce()
            except SessionError as error:
                await connection.close()
                if not self.is_patient:
                    raise
                if self._returning.is_to_log(time.monotonic()):
                    _log.info("%s", self._settings.patience.words(self.address, error))
            except BaseException:
                await connection.close()
                raise
            else:
                self._settings.chaos.joining()
                self._connection = connection
                connection.tell(session_pb2.PeerMessage(join=join))
                return
            await asyncio.sleep(self._returning.pause_seconds(self._random.random()))
            await self._look_up()

    def tell(self, message: session_pb2.PeerMessage) -> None:
        """Queues a control message; without a connection there is nobody to hear it."""
        if self._connection is not None:
            self._connection.tell(message)

    def advance(self, generation: Generation) -> None:
        """Drops what is under way for older generations."""
        if self._connection is not None:
            self._connection.advance(generation)

    def welcomed(self) -> None:
        """The coordinator has taken this peer in."""
        if self._was_welcomed and (away := self._returning.away_seconds(time.monotonic())):
            _log.info("back in the run after %.1f s", away)
        self._was_welcomed = True
        self._returning.welcomed(time.monotonic())

    def hang_up(self) -> None:
        """Ends the present connection, whoever lost it; nothing more is heard on it."""
        connection, self._connection = self._connection, None
        self._returning.lost(time.monotonic())
        if connection is not None:
            task = asyncio.create_task(connection.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def go_back(
        self,
        wish: GoBack,
        introduce: Callable[[], Awaitable[session_pb2.Join]],
        on_long_alone: Callable[[], None],
        disk: str,
    ) -> str | None:
        """Joins again as soon as there is a coordinator; a sentence when that took too long. After a while ``on_long_alone`` is
        called, whereupon state goes to ``disk``."""
        self.hang_up()
        while True:
            now = time.monotonic()
            if self._returning.is_over(now):
                return self._give_up(wish, disk)
            if self._returning.is_to_keep(now):
                on_long_alone()
            if self._returning.is_to_log(now):
                _log.warning("%s; looking for the coordinator at %s%s", wish.reason, self.address, _what(wish))
            await asyncio.sleep(self._returning.pause_seconds(self._random.random()))
            await self._look_up()
            connection = self._new_connection()
            try:
                await connection.open(ATTEMPT_SECONDS)
                join = await introduce()
            except SessionError:
                await connection.close()
                continue
            except BaseException:
                await connection.close()
                raise
            self._settings.chaos.reached("rejoining")
            self._connection = connection
            connection.tell(session_pb2.PeerMessage(join=join))
            return None

    async def close(self) -> None:
        """Writes what is queued, within a second, and closes everything."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._closing, return_exceptions=True)

    def _new_connection(self) -> Connection:
        address, own = str(self.address), PeerId(self._settings.name)
        connection: Connection

        def received(message: Received) -> None:
            if connection is self._connection:
                self._on_received(message)

        def lost(reason: str) -> None:
            if connection is self._connection:
                self._on_lost(reason)

        connection = Connection(own, address, received, lost, self._pacers, self._settings.chaos, self.security)
        return connection

    async def _look_up(self) -> None:
        """Where the coordinator is by now, if somebody knows."""
        if self._settings.whereabouts is None:
            return
        try:
            self.address = await self._settings.whereabouts()
        except AtollError as error:
            _log.info("%s", error)

    def _give_up(self, wish: GoBack, disk: str) -> str:
        seconds = self._returning.away_seconds(time.monotonic())
        kept = f"; the state of step {wish.held.step} is kept in {disk}" if disk and _holds_anything(wish) else ""
        return (
            f"{wish.reason}; no coordinator was there for {seconds:.0f} s{kept}: "
            "start `atoll run` again with the same --state and --listen, then this peer"
        )


def _what(wish: GoBack) -> str:
    return f", with the state of step {wish.held.step} in memory" if _holds_anything(wish) else ""


def _holds_anything(wish: GoBack) -> bool:
    return wish.held.step > 0 and bool(wish.held.names)
