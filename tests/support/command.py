"""One command of Atoll as a real process, watched through its JSON lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.swarm import SWARM_SECONDS, environment


class Command:
    """A running command; made by :func:`started`. ``lines`` is what it has written so far, on either output."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.lines: list[str] = []
        self._process = process
        self._news = asyncio.Condition()
        self._reading = asyncio.ensure_future(self._read())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def event(self, kind: str, *, within_seconds: float = SWARM_SECONDS, **fields: Any) -> dict[str, Any]:
        """The first event of a kind, with these fields, once it is there."""
        wanted = {"event": kind, **fields}

        def matching() -> list[dict[str, Any]]:
            events = [json.loads(line) for line in self.lines if line.startswith("{")]
            return [event for event in events if wanted.items() <= event.items()]

        await self._until(lambda: bool(matching()), within_seconds, f"no event {kind} {fields}")
        return matching()[0]

    def forget(self) -> None:
        """What was written so far is of no interest any more."""
        self.lines.clear()

    async def says(self, words: str, *, within_seconds: float = SWARM_SECONDS) -> str:
        """The first line with these words, once it is there."""
        await self._until(lambda: any(words in line for line in self.lines), within_seconds, f"{words!r} was not said")
        return next(line for line in self.lines if words in line)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless it has ended."""
        if self._process.returncode is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL."""
        self.signal(signal.SIGKILL)

    async def ended(self, *, within_seconds: float = SWARM_SECONDS) -> int:
        """The exit status; all output is read by then."""
        try:
            await asyncio.wait_for(asyncio.shield(self._reading), within_seconds)
        except TimeoutError:
            raise AssertionError(f"no end within {within_seconds} s: {self.lines[-20:]}") from None
        return await self._process.wait()

    async def close(self) -> None:
        """Ends it, if it has not ended."""
        self.signal(signal.SIGCONT)
        self.kill()
        await self._process.wait()
        await self._reading

    async def _until(self, check: Any, within_seconds: float, what: str) -> None:
        async with self._news:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait_for(lambda: check() or self._reading.done()), within_seconds)
        assert check(), f"{what}: {self.lines[-20:]}"

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            async with self._news:
                self.lines.append(line.decode().rstrip("\n"))
                self._news.notify_all()
        async with self._news:
            self._news.notify_all()


@asynccontextmanager
async def started(module: str, *words: str | Path, variables: Mapping[str, str] | None = None) -> AsyncIterator[Command]:
    """`python -m MODULE` with these words; it is killed at the end if need be."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *map(str, words),
        env=environment(**(variables or {})),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=2**20,
    )
    command = Command(process)
    try:
        yield command
    finally:
        await command.close()
