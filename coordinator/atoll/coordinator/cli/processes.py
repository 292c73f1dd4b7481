"""Processes that `atoll swarm` starts: each in a group of its own, its output in a log, and none outlives the swarm."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

POLITE_SECONDS = 4.0
"""Between SIGTERM and SIGKILL: a peer needs a moment to tell its neighbours."""


class Child:
    """One process. Signals of the terminal do not reach it, so the swarm alone decides when it hears of them."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path | None) -> None:
        self.name = name
        self.log = log
        self._process = process

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        log: Path | None = None,
        hold: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> Child:
        """Starts ``command``, with ``variables`` added to our environment. Output goes to the end of ``log``, or where ours
        goes; ``hold`` keeps a pipe open to its standard input, so that it notices when this process dies.
        """
        with contextlib.ExitStack() as files:
            output = files.enter_context(log.open("ab")) if log else None
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.PIPE if hold else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if log else None,
                process_group=0,
                env={**os.environ, **(variables or {})},
            )
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status; negative where a signal ended it, None while it runs."""
        return self._process.returncode

    async def ended(self) -> int:
        """Waits for the process's end."""
        return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless the process has ended."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def release(self) -> None:
        """Closes the pipe of a held process, as our death would."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def describe_end(self) -> str:
        """Why the process ended: its status and the last line that it logged."""
        how = f"signal {-self.status}" if self.status is not None and self.status < 0 else f"exit status {self.status}"
        last = last_line(self.log) if self.log else ""
        return f"{self.name} ended with {how}" + (f": {last}" if last else "") + (f" (see {self.log})" if self.log else "")


async def end_all(children: Sequence[Child], *, patience_seconds: float) -> None:
    """Gives ``children`` time to end by themselves, then asks, then forces them. Returns when none is left."""
    await _wait(children, patience_seconds)
    for child in children:
        child.signal(signal.SIGTERM)
    await _wait(children, POLITE_SECONDS)
    for child in children:
        child.signal(signal.SIGKILL)
    await _wait(children, None)


async def _wait(children: Sequence[Child], seconds: float | None) -> None:
    running = [asyncio.ensure_future(child.ended()) for child in children if child.status is None]
    if running:
        _, pending = await asyncio.wait(running, timeout=seconds)
        for task in pending:
            task.cancel()


def last_line(log: Path) -> str:
    """The last line with something on it, of at most the last 4 KiB."""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 4096))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")
