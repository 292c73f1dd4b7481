"""The directory of runs: hivemind's DHT, in which a run is found by its name without knowing where its coordinator is.

A node of it may begin with any other (``initial``). Statements end after a while, so that whoever announces says it again
and again, and a run that has ended is forgotten. Nodes of Atoll keep nothing but signed announcements; what is read is
verified again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from atoll.protocol.announcement import Announcement, chosen
from atoll.protocol.errors import ResourceError
from atoll.protocol.hive import Hive, HivePlace

if TYPE_CHECKING:
    from hivemind.dht.node import DHTNode

EXPIRY_SECONDS = 600.0
"""How long a statement is kept: the clocks of machines may differ by minutes."""
_REPLY_SECONDS = 3.0
_OPEN_SECONDS = 60.0
_SEARCH_SECONDS = 20.0

_logger = logging.getLogger(__name__)


class Directory:
    """One node of the DHT, on one event loop. Made by :meth:`open`."""

    def __init__(self, hive: Hive, node: DHTNode) -> None:
        self._hive = hive
        self._node = node

    @classmethod
    async def open(cls, place: HivePlace, *, keeps: bool = True) -> Directory:
        """Joins the DHT, or begins one where ``place`` names no initial peers. One that ``keeps`` nothing only asks.

        Raises ResourceError where hivemind is missing, its daemon does not start, or none of the initial peers answers.
        """
        hive = await Hive.start(place, "finding runs by their names")
        try:
            return cls(hive, await asyncio.wait_for(_node(hive, place, keeps=keeps), _OPEN_SECONDS))
        except TimeoutError:
            await hive.close()
            raise ResourceError(f"the DHT could not be joined within {_OPEN_SECONDS:g} s: {_unanswered(place)}") from None
        except BaseException:
            await hive.close()
            raise

    @property
    def address(self) -> str:
        """What others name as an initial peer."""
        return self._hive.address

    async def announce(self, key: str, fingerprint: bytes, statement: bytes) -> bool:
        """Keeps a signed statement about the run ``key`` for a while; whether somebody took it."""
        from atoll.protocol.directory_records import key_of

        store = self._node.store(key_of(key), statement, time.time() + EXPIRY_SECONDS, subkey=fingerprint.hex())
        try:
            return bool(await asyncio.wait_for(store, _SEARCH_SECONDS))
        except TimeoutError:
            return False

    async def find(self, run: str, wanted: bytes | None) -> Announcement:
        """The newest statement about ``run``, of the authority with the fingerprint ``wanted`` or of the only one there is.
        Raises AtollError where there is none, or several."""
        from atoll.protocol.directory_records import key_of

        try:
            found = await asyncio.wait_for(self._node.get(key_of(run), latest=True), _SEARCH_SECONDS)
        except TimeoutError:
            found = None
        kept = found.value if found is not None and isinstance(found.value, dict) else {}
        return chosen(run, [entry.value for entry in kept.values() if isinstance(entry.value, bytes)], wanted)

    async def close(self) -> None:
        """Leaves the DHT; what this node kept is on others."""
        await self._node.shutdown()
        await self._hive.close()


async def _node(hive: Hive, place: HivePlace, *, keeps: bool) -> DHTNode:
    from hivemind.dht.node import DHTNode

    from atoll.protocol.directory_records import AnnouncementsOnly

    node = await DHTNode.create(
        p2p=hive.p2p,
        initial_peers=list(place.initial) or None,
        client_mode=not keeps,
        record_validator=AnnouncementsOnly(),
        wait_timeout=_REPLY_SECONDS,
        cache_locally=keeps,
        ensure_bootstrap_success=False,  # it would also refuse machines whose clocks differ by more than three seconds
        strict=False,
    )
    if place.initial and not node.protocol.routing_table.peer_id_to_uid:
        await node.shutdown()
        raise ResourceError(f"the DHT could not be joined: {_unanswered(place)}")
    return node


def _unanswered(place: HivePlace) -> str:
    return (
        f"none of the initial peers answers ({', '.join(place.initial)}): check that one of them is running and can be reached"
    )
