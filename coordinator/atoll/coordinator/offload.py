"""Blocking work off the event loop, on threads that end with their owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_log = logging.getLogger(__name__)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

CLOSE_SECONDS = 5.0
"""How long a running call may take to end. A trace of a huge model may take longer; nothing waits for it then."""


class Offload:
    """A few threads of one owner."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix=name)
        self._running: set[asyncio.Future[object]] = set()

    async def run(self, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """The result of the call. When the caller is cancelled the call still runs to its end."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args, **kwargs))
        self._running.add(future)  # type: ignore[arg-type]  # a set of futures of anything
        future.add_done_callback(self._running.discard)
        return await asyncio.shield(future)

    async def close(self) -> None:
        """No more calls; waits for the running ones, within limits."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._running:
            await asyncio.wait(self._running, timeout=CLOSE_SECONDS)
        if any(not future.done() for future in self._running):
            _log.warning("left behind a call that did not end within %g s", CLOSE_SECONDS)
        else:
            # The threads have nothing to do any more and end at once.
            self._executor.shutdown(wait=True)
