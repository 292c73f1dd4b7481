"""Real hosts, or what passes for them: a run whose coordinator and peers are on several, and cuts of the network between two.

``ATOLL_TEST_HOSTS`` names them: a JSON list of ``{"name", "address", "exec"}``, where ``exec`` are the words before a command
that run it there. They share this machine's files, and have ``ip`` with the right to change routes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.coordinator.cli.invite import invite_for_swarm
from atoll.coordinator.cli.state import read_address
from support.swarm import SWARM_SECONDS, LocalSwarm, atoll, environment
from support.waiting import assert_eventually

HOSTS_VARIABLE = "ATOLL_TEST_HOSTS"

_SILENT = 3
_DIAL = f"""
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=3.0).close()
except TimeoutError:
    sys.exit({_SILENT})
except OSError:
    pass
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where a command is run."""

    name: str
    address: str
    exec: tuple[str, ...]

    async def run(self, *words: str) -> None:
        """Runs a command there to its end; it must succeed."""
        process = await asyncio.create_subprocess_exec(*self.exec, *words, stderr=asyncio.subprocess.PIPE)
        _, errors = await asyncio.wait_for(process.communicate(), 20.0)
        assert process.returncode == 0, f"{' '.join(words)} on {self.name}: {errors.decode()}"

    async def hears_nothing_of(self, other: Host) -> bool:
        """Whether a connection from here to there is neither accepted nor refused."""
        process = await asyncio.create_subprocess_exec(*self.exec, sys.executable, "-c", _DIAL, other.address)
        return await asyncio.wait_for(process.wait(), 20.0) == _SILENT


def hosts_for_test(count: int) -> list[Host]:
    """So many hosts; skips the test, with the reason, where there are fewer."""
    hosts = _hosts()
    if len(hosts) < count:
        pytest.skip(f"it wants {count} hosts in {HOSTS_VARIABLE}, there are {len(hosts)}")
    return hosts[:count]


async def closed_hosts_for_test(count: int) -> list[Host]:
    """One host, and so many to which it cannot connect; skips the test, with the reason, where there are fewer."""
    first, *others = hosts_for_test(1 + count)[:1] + _hosts()[1:]
    answers = await asyncio.gather(*(first.hears_nothing_of(other) for other in others))
    closed = [host for host, silent in zip(others, answers, strict=True) if silent]
    if len(closed) < count:
        pytest.skip(f"it wants {count} hosts in {HOSTS_VARIABLE} that accept no connection, there are {len(closed)}")
    return [first, *closed[:count]]


def _hosts() -> list[Host]:
    entries = json.loads(os.environ.get(HOSTS_VARIABLE, "[]"))
    return [Host(name=item["name"], address=item["address"], exec=tuple(item["exec"])) for item in entries]


@asynccontextmanager
async def cut(one: Host, other: Host) -> AsyncIterator[None]:
    """While it lasts, nothing gets from one host to the other, either way: what is sent is dropped without a word."""
    ends = ((one, other.address), (other, one.address))
    async with contextlib.AsyncExitStack() as stack:
        for host, address in ends:
            await host.run("ip", "route", "add", f"{address}/32", "dev", "lo")
            stack.push_async_callback(host.run, "ip", "route", "del", f"{address}/32", "dev", "lo")
        yield


class HostedRun(LocalSwarm):
    """`atoll run --json` on one host and peers on others; ``address`` is where the coordinator is to listen."""

    def __init__(self, process: asyncio.subprocess.Process, state: Path, address: str) -> None:
        super().__init__(process, state)
        self._address = address
        self._peers: dict[str, asyncio.subprocess.Process] = {}

    async def join(self, host: Host) -> None:
        """A peer on ``host``, of its name; again as who it was, where there was one."""
        name, log = host.name, self.state.parent / f"{host.name}.log"
        words = [sys.executable, "-m", "atoll.peer", "join", self._address, "--name", name, "--threads", "1"]
        words += ["--cache", str(self.state.parent / f"cache-{name}")]
        token = invite_for_swarm(self.state)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *host.exec, *words, env=environment(ATOLL_TOKEN=token), stdout=output, stderr=output, start_new_session=True
            )
        self._peers[name] = process

    async def kill(self, name: str) -> None:
        """SIGKILL for a peer and whatever it has started."""
        process = self._peers.pop(name)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    async def close(self) -> None:
        for name in tuple(self._peers):
            await self.kill(name)
        await super().close()


@asynccontextmanager
async def hosted_run(job: Path, state: Path, coordinator: Host, peers: Sequence[Host]) -> AsyncIterator[HostedRun]:
    """A run of ``job`` whose coordinator is on one host, with a peer on each of others, named as these."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        address = f"{coordinator.address}:{probe.getsockname()[1]}"
    words = atoll("run", job, "--listen", address, "--state", state, "--min-peers", str(len(peers)), "--json")
    with (state.parent / "coordinator.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *coordinator.exec, *words, env=environment(), stdout=asyncio.subprocess.PIPE, stderr=log, limit=2**20
        )
    run = HostedRun(process, state, address)
    try:
        await assert_eventually(lambda: read_address(state) is not None, within_seconds=SWARM_SECONDS)
        for host in peers:
            await run.join(host)
        yield run
    finally:
        await run.close()
