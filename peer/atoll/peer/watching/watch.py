"""Shows a peer's numbers to Prometheus: one address that answers ``GET /metrics``. What they are is in ``samples``."""

from __future__ import annotations

import logging
import time

from aiohttp import web

from atoll.peer.engine import Engine
from atoll.peer.errands import Errands
from atoll.peer.session.line import Line
from atoll.peer.session.session import Session
from atoll.peer.session.values import SessionState
from atoll.peer.settings import PeerSettings
from atoll.peer.stage.events import Notice
from atoll.peer.stage.memory_use import MemoryUse
from atoll.peer.watching.doings import Doings
from atoll.peer.watching.samples import Standing
from atoll.protocol.exposition import CONTENT_TYPE, text_of
from atoll.protocol.ids import PeerId
from atoll.protocol.web import listen

_log = logging.getLogger("atoll.peer")

STATES = tuple(state.value for state in SessionState)


class Watch:
    """On the event loop, like all that it looks at."""

    def __init__(
        self, settings: PeerSettings, session: Session, line: Line, engine: Engine, errands: Errands, memory: MemoryUse
    ) -> None:
        self._settings = settings
        self._session = session
        self._line = line
        self._engine = engine
        self._errands = errands
        self._memory = memory
        self._before_bytes = memory.now_bytes()
        self._doings = Doings(time.monotonic())
        self._runner: web.AppRunner | None = None

    async def start(self, where: str) -> None:
        """Listens. Raises JobError for what is no address, and ResourceError when it cannot be had."""
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        self._runner, url = await listen(app, where, flag="--metrics", what="the peer's numbers")
        _log.info("this peer's numbers are at %smetrics", url)

    async def close(self) -> None:
        """Listens no more."""
        if self._runner is not None:
            await self._runner.cleanup()

    def noticed(self, notice: Notice) -> None:
        """Takes note of what computing says."""
        self._doings.noticed(notice, time.monotonic())

    async def _answer(self, request: web.Request) -> web.Response:
        return web.Response(body=text_of(self._standing()), headers={"Content-Type": CONTENT_TYPE})

    def _standing(self) -> Standing:
        progress, links = self._engine.progress, self._engine.links
        neighbours = links.receptions()
        return Standing(
            now=time.monotonic(),
            peer=PeerId(self._settings.name),
            run=self._session.run,
            device=self._settings.device,
            session=self._session.state,
            states=STATES,
            stage=-1 if progress.stage is None else progress.stage,
            generation=progress.generation,
            step=progress.step,
            memory_bytes=self._memory.now_bytes(),
            grown_memory_bytes=max(0, self._memory.peak_bytes() - self._before_bytes),
            queued_commands=self._engine.num_commands,
            queued_codings=links.num_to_code,
            lease_age_seconds=self._line.unspoken_seconds,
            fetched_bytes=self._errands.fetched_bytes,
            doings=self._doings,
            coding_seconds=links.coding_seconds,
            links=links.uses(),
            receptions=neighbours,
            unacknowledged={peer: links.num_unacknowledged(peer) for peer in neighbours},
        )
