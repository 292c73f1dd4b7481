"""Fills a store while training goes on: pulls what peers have of a complete snapshot from their disks, and writes it there.

One snapshot at a time, one peer at a time, no faster than is needed: the peers let their steps go first, and nobody waits for
it. What one peer does not give, the next that has it is asked for. A store that cannot be written costs no run: it is told, and
tried again with the next snapshot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from atoll.compression.codec import RawCodec
from atoll.compression.registry import decode_message
from atoll.coordinator.store.store import Store, StoreWriter
from atoll.coordinator.store.store_calls import CALL_SECONDS, StoreCalls
from atoll.protocol.errors import AtollError, IdentityRefused, LinkError, ResourceError
from atoll.protocol.fetching import Fetching, Inquiry, Intake
from atoll.protocol.framing import Incoming
from atoll.protocol.ids import Generation, PeerId, StepNumber
from atoll.protocol.messages import EncodedMessage, MessageHeader
from atoll.protocol.security import Security
from atoll.protocol.transfer import COORDINATOR
from atoll.protocol.wording import listed

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A complete snapshot: for each name who has it on its disk, and where these peers are reached."""

    step: StepNumber
    holders: Mapping[str, Sequence[PeerId]]
    addresses: Mapping[PeerId, str]


class StoreKeeping:
    """On the coordinator's event loop. Peers are asked to send no more than ``max_bytes_per_second`` (None: as their owners and
    their steps allow); ``clock`` is the wall clock, by which people tell snapshots apart."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        job: str,
        calls: StoreCalls,
        max_bytes_per_second: float | None = None,
        clock: Callable[[], float] = time.time,
        security: Security | None = None,
    ) -> None:
        self._security = security
        self._store = store
        self._run_id = run_id
        self._job = job
        self._calls = calls
        self._max_bytes_per_second = max_bytes_per_second
        self._clock = clock

    async def keep(self, wanted: Wanted) -> bool:
        """Writes one snapshot into the store, and removes older ones; whether it is there now."""
        began = time.monotonic()
        try:
            writer = await self._calls.run(CALL_SECONDS, self._store.writer, self._run_id, wanted.step, self._job)
            missing = await self._pull(wanted, writer)
            if missing:
                raise ResourceError(f"nobody gave {listed(missing, 3)}")
            await self._calls.run(CALL_SECONDS, writer.complete, self._clock())
            await self._calls.run(CALL_SECONDS, self._store.rotate, self._run_id)
        except AtollError as error:
            _log.warning("the snapshot of step %d is not in the store %s: %s", wanted.step, self._store.url, error)
            return False
        seconds = time.monotonic() - began
        _log.info("the snapshot of step %d is in the store %s, after %.1f s", wanted.step, self._store.url, seconds)
        return True

    async def _pull(self, wanted: Wanted, writer: StoreWriter) -> list[str]:
        """What nobody gave."""
        missing = dict.fromkeys(wanted.holders)
        rests: dict[str, Incoming] = {}

        async def take(name: str, message: EncodedMessage) -> None:
            await self._calls.run(CALL_SECONDS, writer.add, decode_message(message).tensors)
            missing.pop(name, None)

        for peer in sorted({peer for peers in wanted.holders.values() for peer in peers} & wanted.addresses.keys()):
            names = [name for name in missing if peer in wanted.holders[name]]
            if not names:
                continue
            fetching = Fetching(self._inquiry(wanted), peer, wanted.addresses[peer], Intake(judge=_judge, take=take), rests)
            try:
                await fetching.run(names)
            except (LinkError, IdentityRefused) as error:
                _log.info("for the store: %s", error)
        return list(missing)

    def _inquiry(self, wanted: Wanted) -> Inquiry:
        return Inquiry(
            own=COORDINATOR,
            run_id=self._run_id,
            generation=Generation(0),
            step=wanted.step,
            snapshot=True,
            max_bytes_per_second=self._max_bytes_per_second,
            security=self._security,
        )


def _judge(header: MessageHeader) -> str | None:
    coded = [tensor.name for tensor in header.tensors if tensor.codec != RawCodec.name]
    return f"{coded[0]} is not sent as it is" if coded else None
