"""Waiting for something to become true, with a deadline and without guessing how long it takes."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.02


async def assert_eventually(check: Callable[[], T | Awaitable[T]], *, within_seconds: float = 10.0, what: str = "") -> T:
    """Calls ``check`` until it neither raises AssertionError nor returns False; returns what it returned.

    After ``within_seconds`` the last AssertionError goes to the caller.
    """
    deadline = time.monotonic() + within_seconds
    while True:
        try:
            result = check()
            value = await result if inspect.isawaitable(result) else result
            assert value is not False, what or f"{getattr(check, '__name__', 'the condition')} stayed false"
        except AssertionError:
            if time.monotonic() >= deadline:
                raise
            await asyncio.sleep(POLL_SECONDS)
        else:
            return value
