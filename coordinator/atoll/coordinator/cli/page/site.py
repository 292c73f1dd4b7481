"""The page's web server: one page, a stream of what happens, the run's status as JSON, and metrics.

Everybody who reaches the address may look; who has the token of the run's folder may stop the run and ask for a better plan."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from atoll.coordinator.cli.page.metrics import RunMetrics
from atoll.coordinator.cli.page.story import Course
from atoll.coordinator.cli.status import status_dict
from atoll.coordinator.events import Event
from atoll.coordinator.reading import Told
from atoll.coordinator.run_files import PAGE_TOKEN, disk_error
from atoll.protocol.errors import AtollError
from atoll.protocol.exposition import CONTENT_TYPE
from atoll.protocol.v1 import operator_pb2
from atoll.protocol.web import listen

News = dict[str, Any]
Queue = asyncio.Queue[News | None]

STATUS_SECONDS = 1.0
READERS = 64
"""Pages that are open at once; each costs a connection and a queue."""
BEHIND = 1000
"""Events that a reader may be behind; one that does not read is left."""
STATIC = {"page.css": "text/css", "page.js": "text/javascript", "drawing.js": "text/javascript"}
POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


class Desk(Protocol):
    """What the page may ask of a coordinator."""

    def status(self, *, timelines: bool = False) -> operator_pb2.StatusReply: ...

    def stop(self, reason: str) -> None: ...

    async def replan(self) -> operator_pb2.ReplanReply: ...


class Site:
    """A view of a run (``event``, ``refresh``) that browsers look at. ``before`` are the events of a run that goes on."""

    def __init__(self, *, listen: str, state: Path, steps: int, before: Iterable[Told] = ()) -> None:
        self._listen = listen
        self._state = state
        self._course = Course(steps)
        self._metrics = RunMetrics()
        for told in before:
            self._course.event(told.event, told.time)
            self._metrics.event(told.event)
        self._desk: Desk | None = None
        self._token = ""
        self._readers: set[Queue] = set()
        self._runner: web.AppRunner | None = None
        self._status_told = 0.0

    async def start(self, desk: Desk) -> str:
        """Listens; the URL. Raises ResourceError when the address cannot be had."""
        self._desk = desk
        self._token = _token_in(self._state)
        self._runner, url = await listen(self._app(), self._listen, flag="--page", what="the page")
        return url

    async def stop(self) -> None:
        """Ends every reader's stream, then listens no more."""
        for reader in self._readers:
            _end(reader)
        if self._runner is not None:
            await self._runner.cleanup()

    def event(self, event: Event) -> None:
        """Takes note of what happened."""
        self._metrics.event(event)
        if (news := self._course.event(event, time.time())) is not None:
            self._tell(news)

    def refresh(self, status: operator_pb2.StatusReply) -> None:
        """Takes note of how things stand; readers are told once a second."""
        self._metrics.refresh(status)
        now = time.monotonic()
        if self._readers and now - self._status_told >= STATUS_SECONDS:
            self._status_told = now
            self._tell({"kind": "status", "status": status_dict(status)})

    def _tell(self, news: News) -> None:
        for reader in tuple(self._readers):
            _put(reader, news)

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[_guarded], client_max_size=4096)
        app.router.add_get("/", self._page)
        app.router.add_get("/static/{name}", self._static)
        app.router.add_get("/favicon.ico", self._icon)
        app.router.add_get("/api/status", self._status)
        app.router.add_get("/api/stream", self._stream)
        app.router.add_get("/metrics", self._numbers)
        app.router.add_post("/api/stop", self._end)
        app.router.add_post("/api/replan", self._replan)
        return app

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=_file("page.html"), content_type="text/html")

    async def _icon(self, request: web.Request) -> web.Response:
        """There is none, and a browser that asks is not told of an error."""
        return web.Response(status=204)

    async def _static(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in STATIC:
            raise web.HTTPNotFound
        return web.Response(text=_file(name), content_type=STATIC[name])

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(status_dict(self._present.status(timelines=True)))

    async def _numbers(self, request: web.Request) -> web.Response:
        self._metrics.refresh(self._present.status(timelines=True))
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: the course so far, then what happens."""
        if len(self._readers) >= READERS:
            raise web.HTTPServiceUnavailable(text=f"{READERS} pages are open already")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        async with self._reading() as queue:
            _put(queue, self._course.so_far())
            _put(queue, {"kind": "status", "status": status_dict(self._present.status(timelines=True))})
            with contextlib.suppress(ConnectionResetError):  # the reader has left
                await response.prepare(request)
                while (news := await queue.get()) is not None:
                    await response.write(f"data: {json.dumps(news)}\n\n".encode())
        return response

    @contextlib.asynccontextmanager
    async def _reading(self) -> AsyncIterator[Queue]:
        queue: Queue = asyncio.Queue(BEHIND)
        self._readers.add(queue)
        try:
            yield queue
        finally:
            self._readers.discard(queue)

    async def _end(self, request: web.Request) -> web.Response:
        self._authorise(request)
        self._present.stop("stopped from the page")
        return web.json_response({"event": "stop"})

    async def _replan(self, request: web.Request) -> web.Response:
        self._authorise(request)
        try:
            reply = await self._present.replan()
        except AtollError as error:
            raise web.HTTPConflict(text=str(error)) from error
        return web.json_response({"event": "replan", "moved": reply.moved, "reason": reply.reason})

    def _authorise(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            raise web.HTTPForbidden(text=f"this needs the token in {PAGE_TOKEN} of the run's folder")

    @property
    def _present(self) -> Desk:
        assert self._desk is not None, "asked before it was started"
        return self._desk


@web.middleware
async def _guarded(request: web.Request, handler: Any) -> web.StreamResponse:
    """Nothing is loaded from elsewhere, and no other site shows the page as its own."""
    response: web.StreamResponse = await handler(request)
    if not response.prepared:
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
    return response


def _put(queue: Queue, news: News) -> None:
    """A reader that is too far behind loses all that it has not read, and its stream ends: its page begins again."""
    if queue.full():
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)
    else:
        queue.put_nowait(news)


def _end(queue: Queue) -> None:
    """The stream ends after what is on its way; one that has ended already stays so."""
    if not queue.full():
        queue.put_nowait(None)


def _token_in(state: Path) -> str:
    """The token kept in the run's folder, made when there is none; for its owner's eyes only."""
    path = state / PAGE_TOKEN
    try:
        if path.exists():
            return path.read_text(encoding="ascii").strip()
        token = secrets.token_urlsafe(24)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token + "\n")
    except OSError as error:
        raise disk_error(error, state) from error
    return token


def _file(name: str) -> str:
    return (files("atoll.coordinator.cli.page") / "static" / name).read_text(encoding="utf-8")
