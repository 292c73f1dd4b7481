"""Connections of those who do not belong, from a process of their own.

``python -m support.strangers SILENT NOISY ADDRESS...`` opens so many that say nothing and so many that send garbage as fast as
they can, shared out among the addresses, again and again until it is ended. Each line of its output is the number of
connections made so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from atoll.protocol.open_files import allow_many_connections

_PIECE = os.urandom(16 * 1024)
_TESTS = Path(__file__).parents[1]
LEAST_NICE = 19
"""The least claim to the processor there is: strangers have machines of their own, and take none of the run's by sending."""


class Strangers:
    """Counts the connections that they have made."""

    def __init__(self) -> None:
        self.made = 0

    async def silent(self, host: str, port: int) -> None:
        """Connects, says nothing, and connects again whenever it is thrown out."""
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, port)
                self.made += 1
                try:
                    await reader.read()
                finally:
                    writer.close()
            await asyncio.sleep(0.05)

    async def noisy(self, host: str, port: int) -> None:
        """Sends garbage until it is thrown out, and again."""
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(host, port)
                self.made += 1
                try:
                    while True:
                        writer.write(_PIECE)
                        await writer.drain()
                finally:
                    writer.close()
            await asyncio.sleep(0.01)


async def come(num_silent: int, num_noisy: int, addresses: list[str]) -> None:
    """Never returns."""
    os.nice(LEAST_NICE)
    allow_many_connections()
    strangers = Strangers()
    parts = [text.rpartition(":") for text in addresses]
    where = [(host.strip("[]"), int(port)) for host, _, port in parts]
    tasks = [asyncio.create_task(strangers.silent(*where[number % len(where)])) for number in range(num_silent)]
    tasks += [asyncio.create_task(strangers.noisy(*where[number % len(where)])) for number in range(num_noisy)]
    while True:
        await asyncio.wait(tasks, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
        assert not [task for task in tasks if task.done()], "a stranger gave up: they show nothing"
        print(strangers.made, flush=True)


@contextlib.asynccontextmanager
async def strangers_at(addresses: list[str], *, silent: int, noisy: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """So many in all, which are there once they have said how many connections they made."""
    from support.swarm import environment  # not in the strangers' process, which is to begin at once

    words = ["-m", "support.strangers", str(silent), str(noisy), *addresses]
    surroundings = environment(PYTHONPATH=str(_TESTS))
    process = await asyncio.create_subprocess_exec(sys.executable, *words, env=surroundings, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        while int(await process.stdout.readline() or -1) < silent + noisy:
            assert process.returncode is None, "the strangers have ended"
        reading = asyncio.create_task(_read_on(process.stdout))
        yield process
        assert process.returncode is None, "the strangers have ended"
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _read_on(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass


if __name__ == "__main__":
    asyncio.run(come(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
