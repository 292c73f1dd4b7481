"""Atoll's commands as real processes: a swarm on this machine, watched through its JSON lines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from support.leaks import describe

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = ("coordinator", "peer", "protocol", "compression")
SWARM_SECONDS = 100.0
"""For whatever a small swarm does, on a busy machine: importing torch in each process is most of it."""
CLOSE_SECONDS = 60.0
"""For a swarm to end in order; what is left then is killed."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that has ended."""

    status: int
    output: str
    errors: str


def environment(**extra: str) -> dict[str, str]:
    """The environment of a command, which finds the sources of this checkout whether or not they are installed."""
    roots = [str(ROOT / root) for root in SOURCE_ROOTS]
    path = [extra.pop("PYTHONPATH", ""), *roots, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "COLUMNS": "120", **extra}


def atoll(*words: str | Path) -> list[str]:
    """The words of an `atoll` command."""
    return [sys.executable, "-m", "atoll.coordinator", *map(str, words)]


async def run_command(*words: str | Path, within_seconds: float = SWARM_SECONDS) -> Finished:
    """Runs an `atoll` command to its end."""
    process = await asyncio.create_subprocess_exec(
        *atoll(*words), env=environment(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), within_seconds)
    except TimeoutError:
        process.kill()
        output, errors = await process.communicate()
        raise AssertionError(f"no end within {within_seconds} s: {output.decode()} {errors.decode()}") from None
    assert process.returncode is not None
    return Finished(process.returncode, output.decode(), errors.decode())


def write_job(folder: Path, **sections: Mapping[str, Any]) -> Path:
    """A job that trains a tiny GPT on a little text in a few steps; ``sections`` change some of its fields."""
    text = folder / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number * number}\n" for number in range(2000)))
    job: dict[str, dict[str, Any]] = {
        "model": {"builtin": "gpt", "options": {"layers": 4, "width": 32, "heads": 2, "context": 32}},
        "data": {"text": str(text), "sequence_length": 32, "validation": 0.1},
        "training": {"steps": 4, "batch": 4, "microbatch": 1, "evaluate_every": 2},
    }
    for name, fields in sections.items():
        job[name] = {**job.get(name, {}), **fields}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


class LocalSwarm:
    """A running `atoll swarm --json`; made by :func:`local_swarm`."""

    def __init__(self, process: asyncio.subprocess.Process, state: Path) -> None:
        self.state = state
        self.lines: list[str] = []
        self._process = process
        self._news = asyncio.Condition()
        self._reading = asyncio.ensure_future(self._read())
        self._family: set[psutil.Process] = set()

    @property
    def events(self) -> list[dict[str, Any]]:
        """All events so far."""
        return [json.loads(line) for line in self.lines]

    async def event(self, kind: str, *, within_seconds: float = SWARM_SECONDS, **fields: Any) -> dict[str, Any]:
        """The first event of a kind, with these fields, once it is there."""

        def matching() -> list[dict[str, Any]]:
            wanted = {"event": kind, **fields}
            return [event for event in self.events if wanted.items() <= event.items()]

        async with self._news, asyncio.timeout(within_seconds):
            await self._news.wait_for(lambda: bool(matching()) or self._reading.done())
        assert matching(), f"no event {kind} {fields} before the end: {self.lines}"
        return matching()[0]

    def processes(self) -> list[psutil.Process]:
        """The processes of the swarm: itself, the coordinator and the peers; none once it has ended."""
        try:
            itself = psutil.Process(self._process.pid)
            family = [itself, *itself.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        self._family.update(family)
        return family

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the swarm's own process alone, remembering the others."""
        self.processes()
        self._process.send_signal(number)

    async def ended(self, *, within_seconds: float = SWARM_SECONDS) -> int:
        """The exit status of the swarm."""
        await asyncio.wait_for(self._reading, within_seconds)
        return await asyncio.wait_for(self._process.wait(), within_seconds)

    def left(self) -> list[str]:
        """Which of the processes ever seen still run."""
        return [text for process in self._family if (text := describe(process))]

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            async with self._news:
                self.lines.append(line.decode())
                self._news.notify_all()
        async with self._news:
            self._news.notify_all()

    async def close(self) -> None:
        """Ends whatever is left. Never fails because it has ended meanwhile: that would hide why the test did."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
        for process in self._family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        await self._process.wait()
        await self._reading


@asynccontextmanager
async def local_swarm(
    job: Path, state: Path, *, peers: int, variables: Mapping[str, str] | None = None
) -> AsyncIterator[LocalSwarm]:
    """A swarm that trains ``job`` in as many stages as ``peers``; its standard error goes to ``swarm.log`` beside ``state``."""
    words = (job, "--peers", str(peers), "--set", f"plan.stages={peers}")
    async with started_swarm(*words, state=state, variables=variables) as swarm:
        yield swarm


@asynccontextmanager
async def started_swarm(
    *words: str | Path, state: Path, variables: Mapping[str, str] | None = None
) -> AsyncIterator[LocalSwarm]:
    """`atoll swarm --json` with these words; its standard error goes to ``swarm.log`` beside ``state``."""
    with (state.parent / "swarm.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *atoll("swarm", *words, "--state", state, "--json"),
            env=environment(**(variables or {})),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            limit=2**20,
        )
    swarm = LocalSwarm(process, state)
    try:
        yield swarm
    finally:
        await swarm.close()
