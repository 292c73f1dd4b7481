"""Connections that say nothing, and ones that send garbage as fast as they can, while a run trains over TLS."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.coordinator.events import PeerEvent, StepEvent, VoidEvent
from atoll.protocol.channel import parse_address
from atoll.protocol.open_files import allow_many_connections
from support.coordinated import Coordinated, coordinated, tiny_job

PIECE = os.urandom(16 * 1024)


async def silent(address: str) -> None:
    """Connects, says nothing, and connects again whenever it is thrown out."""
    where = parse_address(address)
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(where.host, where.port)
            try:
                await reader.read()
            finally:
                writer.close()
        await asyncio.sleep(0.05)


async def noisy(address: str) -> None:
    """Sends garbage until it is thrown out, and again."""
    where = parse_address(address)
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(where.host, where.port)
            try:
                for _ in range(64):
                    writer.write(PIECE)
                    await writer.drain()
            finally:
                writer.close()
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def strangers(addresses: list[str], num_silent: int, num_noisy: int) -> AsyncIterator[list[asyncio.Task[None]]]:
    """So many at each address."""
    tasks = [
        asyncio.create_task(kind(address))
        for address in addresses
        for kind, count in ((silent, num_silent), (noisy, num_noisy))
        for _ in range(count)
    ]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("num_silent", "num_noisy"),
    [(20, 2), pytest.param(1000, 100, marks=[pytest.mark.release, pytest.mark.timeout(600)])],
)
async def test_who_belongs_is_not_disturbed(tmp_path: Path, num_silent: int, num_noisy: int) -> None:
    allow_many_connections()
    job = tiny_job(tmp_path, steps=10, plan={"stages": 2})
    async with coordinated(job, tmp_path / "state", peers=2, insecure=False) as run:
        await run.until_told(StepEvent, step=1)
        addresses = [run.address, *addresses_of(run)]
        async with strangers(addresses, num_silent // len(addresses) + 1, num_noisy // len(addresses) + 1) as tasks:
            assert (await run.ended()).finished
            assert not [task for task in tasks if task.done()], "a stranger gave up: the test shows nothing"
        assert run.told(VoidEvent) == []
        assert [event.name for event in run.told(PeerEvent) if event.state == "lost"] == []


def addresses_of(run: Coordinated) -> list[str]:
    """Where the run's peers listen."""
    return [member.introduction.address for member in run.coordinator._sessions.membership]
