"""Calls of a store, which may be anywhere, and may never answer. Each has a thread of its own that nobody waits for: one that
hangs costs neither the threads that the run's journal is written by, nor the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

from atoll.protocol.errors import ResourceError

CALL_SECONDS = 300.0
"""How long a store may take for one part of a snapshot."""
LOOK_SECONDS = 120.0
"""How long it may take to say what it has, at the beginning of a run."""
MOST_HUNG = 3
"""So many calls may have been given up and not have ended; each keeps a thread and what it was to write."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class StoreCalls:
    """Of the store at ``url``, which was given with ``field``; on one event loop."""

    def __init__(self, url: str, field: str) -> None:
        self._url = url
        self._field = field
        self._num_hung = 0

    async def run(
        self, within_seconds: float, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """The result of the call. Raises ResourceError when it is not there in time, or when too many before it hang."""
        if self._num_hung >= MOST_HUNG:
            raise ResourceError(f"{self._field}: {self._url} has not answered {self._num_hung} calls: it has to first")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def work() -> None:
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                _settle(loop, future, partial(future.set_exception, error))
            else:
                _settle(loop, future, partial(future.set_result, result))

        threading.Thread(target=work, name="atoll-store", daemon=True).start()
        done, _ = await asyncio.wait((future,), timeout=within_seconds)
        if done:
            return future.result()
        self._num_hung += 1
        future.add_done_callback(self._ended)
        raise ResourceError(
            f"{self._field}: {self._url} did not answer within {within_seconds:g} s: see whether it can be reached from here"
        )

    def _ended(self, future: asyncio.Future[Result]) -> None:
        """A call that was given up has ended after all; what came of it is of no use."""
        self._num_hung -= 1
        if not future.cancelled():
            future.exception()


def _settle(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Result], give: Callable[[], None]) -> None:
    """Called by the thread of a call."""

    def on_loop() -> None:
        if not future.done():
            give()

    with contextlib.suppress(RuntimeError):  # the loop is closed: the run has ended meanwhile
        loop.call_soon_threadsafe(on_loop)
