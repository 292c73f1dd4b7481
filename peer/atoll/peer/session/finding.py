"""Finds the coordinator of a run by the run's name, in hivemind's DHT; again whenever it is gone from where it was."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from atoll.protocol.addresses import Address
from atoll.protocol.directory import Directory
from atoll.protocol.errors import AtollError, IdentityRefused, JobError
from atoll.protocol.hive import HivePlace, identity_of

_DIAL_SECONDS = 3.0
_PAUSE_SECONDS = 2.0
_logger = logging.getLogger("atoll.peer")


class Finding:
    """Of the run called ``run``, of the authority with the fingerprint ``wanted`` (of the only one there is, where None). Made
    by :meth:`open`."""

    def __init__(self, directory: Directory, run: str, wanted: bytes | None) -> None:
        self._directory = directory
        self._run = run
        self._wanted = wanted

    @classmethod
    async def open(cls, run: str, initial: Sequence[str], wanted: bytes | None) -> Finding:
        """Raises JobError for a bad address, ResourceError where no node of the DHT answers or hivemind is missing."""
        for address in initial:
            try:
                identity_of(address)
            except ValueError as error:
                raise JobError("--initial-peers", str(error)) from error
        place = HivePlace(host="0.0.0.0", finds=True, initial=tuple(initial))
        return cls(await Directory.open(place, keeps=False), run, wanted)

    async def first(self, within_seconds: float) -> Address:
        """Where the coordinator is; waits for the run to be announced. Raises AtollError."""
        deadline = asyncio.get_running_loop().time() + within_seconds
        while True:
            try:
                return await self.now()
            except IdentityRefused:
                raise
            except AtollError as error:
                if asyncio.get_running_loop().time() + _PAUSE_SECONDS > deadline:
                    raise
                _logger.info("%s", error)
            await asyncio.sleep(_PAUSE_SECONDS)

    async def now(self) -> Address:
        """Where the coordinator says that it is: of several addresses the first one that answers. Raises AtollError."""
        statement = await self._directory.find(self._run, self._wanted)
        self._wanted = statement.fingerprint  # who it was, it must be from now on
        for address in statement.addresses:
            if len(statement.addresses) == 1 or await _answers(address):
                return address
        raise AtollError(
            f"the run {self._run} is announced at {', '.join(map(str, statement.addresses))}, where nothing answers"
        )

    async def close(self) -> None:
        """Leaves the DHT."""
        await self._directory.close()


async def _answers(address: Address) -> bool:
    try:
        async with asyncio.timeout(_DIAL_SECONDS):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
