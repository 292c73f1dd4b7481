"""Where a peer joins: at an address, or wherever the run of a name is."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from atoll.peer.settings import PeerSettings
from atoll.protocol.addresses import Address, parse_address
from atoll.protocol.errors import JobError
from atoll.protocol.invitation import parse_token

NOWHERE = Address("0.0.0.0", 0)
"""What stands for the coordinator's address until it is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Either the coordinator's address, or the name of a run and nodes of the DHT in which it is announced."""

    address: Address = NOWHERE
    run: str = ""
    initial: tuple[str, ...] = ()

    @classmethod
    def of_flags(cls, coordinator: str | None, run: str | None, initial: Sequence[str]) -> Where:
        """Raises JobError where they are neither one nor the other."""
        if coordinator is not None:
            if run is not None or initial:
                raise JobError("HOST:PORT", "give either the coordinator's address, or --run and --initial-peers, not both")
            return cls(address=parse_address(coordinator, "HOST:PORT"))
        if run is None:
            raise JobError("HOST:PORT", "where is the coordinator? Give its address, or --run NAME and --initial-peers")
        if not initial:
            raise JobError("--initial-peers", f"it is missing: `atoll run --dht` prints one by which {run} is found")
        return cls(run=run, initial=tuple(initial))

    @contextlib.asynccontextmanager
    async def found(self, settings: PeerSettings) -> AsyncIterator[PeerSettings]:
        """The settings with the coordinator's address, and with the way to ask for it again, for as long as this lasts. Raises
        AtollError where the run is not found in time."""
        if not self.run:
            yield settings
            return
        from atoll.peer.session.finding import Finding

        wanted = None if settings.token is None else parse_token(settings.token).fingerprint
        finding = await Finding.open(self.run, self.initial, wanted)
        try:
            address = await finding.first(settings.patience.end)
            yield replace(settings, coordinator=address, whereabouts=finding.now)
        finally:
            await finding.close()
