"""Has a run found by its name: says again and again, in hivemind's DHT, where its coordinator is.

The statement is signed with the key of the run's authority, so a coordinator that comes back on another address, with the run's
folder, takes its own place and nobody else's. Peers that look for the run then find the new address.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from atoll.coordinator.identity.authority import FOLDER, Authority
from atoll.protocol.addresses import Address, parse_address
from atoll.protocol.announcement import Announcement, signed
from atoll.protocol.certificates import certificate_pem
from atoll.protocol.directory import Directory
from atoll.protocol.errors import JobError
from atoll.protocol.hive import HivePlace, identity_of, numeric, require_hivemind

AGAIN_SECONDS = 60.0
RETRY_SECONDS = 5.0
"""Where nobody took it."""
IDENTITY = "hive.key"
"""In the folder of the run's identity: its node in the DHT is the same one when the coordinator comes back."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnouncingOptions:
    """Where the node of the DHT listens, and with whom it begins; with nobody it is the first."""

    listen: Address
    initial: tuple[str, ...] = ()


def announcing_options(listen: str, dht_listen: str | None, initial: Sequence[str]) -> AnnouncingOptions:
    """What the flags say. Raises JobError, and ResourceError where hivemind is missing."""
    require_hivemind("finding a run by its name (--dht)")
    for address in initial:
        try:
            identity_of(address)
        except ValueError as error:
            raise JobError("--initial-peers", str(error)) from error
    own = parse_address(listen, "--listen")
    where = Address(own.host, 0) if dht_listen is None else parse_address(dht_listen, "--dht-listen")
    return AnnouncingOptions(listen=where, initial=tuple(initial))


def place_of(listen: Address, identity: Path | None, initial: tuple[str, ...]) -> HivePlace:
    """Where a node of the DHT listens."""
    return HivePlace(
        host=numeric(listen.host),
        port=listen.port,
        advertised=_reachable(listen)[0].host,
        identity=identity,
        finds=True,
        initial=initial,
    )


class Announcing:
    """Made by :meth:`start`, ends with :meth:`close`."""

    def __init__(self, directory: Directory, authority: Authority, run: str, addresses: tuple[Address, ...]) -> None:
        self._directory = directory
        self._authority = authority
        self._run = run
        self._addresses = addresses
        self._task = asyncio.get_running_loop().create_task(self._announce())

    @classmethod
    async def start(cls, options: AnnouncingOptions, run: str, run_id: str, state: Path, address: str) -> Announcing:
        """Opens a node of the DHT, and announces ``run`` at the coordinator's ``address`` from then on. Raises
        ResourceError."""
        now = datetime.datetime.now(datetime.UTC)
        authority = await asyncio.to_thread(Authority.open, state / FOLDER, run_id, now)
        place = place_of(options.listen, state / FOLDER / IDENTITY, options.initial)
        return cls(await Directory.open(place), authority, run, _reachable(parse_address(address)))

    @property
    def initial(self) -> str:
        """What a peer may name as an initial peer."""
        return self._directory.address

    async def close(self) -> None:
        """Says no more, and leaves the DHT."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._directory.close()

    async def _announce(self) -> None:
        told = True
        while True:
            statement = Announcement(
                run=self._run,
                addresses=self._addresses,
                authority=certificate_pem(self._authority.certificate),
                number=time.time_ns(),
            )
            data = signed(statement, self._authority.sign)
            taken = await self._directory.announce(self._run, statement.fingerprint, data)
            if taken is not told:
                _logger.info("the DHT %s where this run is", "knows" if taken else "does not take")
            told = taken
            await asyncio.sleep(AGAIN_SECONDS if taken else RETRY_SECONDS)


def _reachable(listening: Address) -> tuple[Address, ...]:
    """Where others may reach what listens there: all addresses of this machine, those of others' networks first, where it
    listens on all."""
    if not listening.is_unspecified:
        return (listening,)
    kinds = (socket.AF_INET, socket.AF_INET6) if ":" in listening.host else (socket.AF_INET,)
    own = [
        Address(item.address, listening.port)
        for items in psutil.net_if_addrs().values()
        for item in items
        if item.family in kinds and "%" not in item.address
    ]
    return tuple(sorted(own, key=lambda address: (address.is_loopback, ":" in address.host))[:16])
