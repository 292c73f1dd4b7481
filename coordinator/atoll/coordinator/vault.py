"""What a run has in stores: its own snapshots in the job's, and the one that it began from, if it was resumed.

The store is one more holder in the run's registry of snapshots, called ``THE_STORE``. What nobody else has of the step that a
plan begins at is given to peers by the coordinator, as first values are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from atoll.coordinator.offload import Offload
from atoll.coordinator.origin import Origin
from atoll.coordinator.run.events import RunEvent, StoreHolds
from atoll.coordinator.run.instructions import Assign, FillStore
from atoll.coordinator.run.snapshots import THE_STORE, HeldPart
from atoll.coordinator.store import Store, StoredState
from atoll.coordinator.store_keeping import CALL_SECONDS, StoreKeeping, Wanted
from atoll.protocol.errors import DamagedSnapshot, ResourceError
from atoll.protocol.ids import PeerId, StepNumber

FIELD = "durability.store"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class VaultSettings:
    """``url`` is the job's store, None without one; ``origin`` is what the run began from, if that was a snapshot."""

    url: str | None
    run_id: str
    job: str
    origin: Origin | None = None


class Vault:
    """On the coordinator's event loop, but for :meth:`tensor`, which any thread may call."""

    def __init__(self, settings: VaultSettings, offload: Offload, post: Callable[[RunEvent], None]) -> None:
        self._settings = settings
        self._offload = offload
        self._post = post
        self._filling = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._store = None if settings.url is None else Store(settings.url, FIELD)
        self._keeping = None
        if self._store is not None:
            self._keeping = StoreKeeping(self._store, settings.run_id, settings.job, offload)
        self._states: dict[StepNumber, StoredState] = {}
        self._damaged: set[StepNumber] = set()
        self._current: StoredState | None = None
        if settings.origin is not None:
            self._states[settings.origin.step] = settings.origin.state

    @property
    def url(self) -> str | None:
        """Where this run's snapshots are put."""
        return None if self._store is None else self._store.url_of_run(self._settings.run_id)

    async def open(self) -> None:
        """Looks what there is, and tells the run. Raises ResourceError when the store cannot be read."""
        try:
            await asyncio.wait_for(self._offload.run(self._look), CALL_SECONDS)
        except TimeoutError:
            raise ResourceError(f"{FIELD}: {self.url} did not answer within {CALL_SECONDS:g} s") from None
        self._tell()

    async def fill(self, instruction: FillStore, addresses: Mapping[PeerId, str]) -> None:
        """Puts a snapshot into the store, and tells the run what there is then."""
        assert self._keeping is not None, "only a job with a store has it filled"
        wanted = Wanted(
            step=instruction.step,
            holders=instruction.holders,
            addresses=addresses,
        )
        async with self._filling:
            if await self._keeping.keep(wanted):
                self._damaged.discard(instruction.step)
                try:
                    await asyncio.wait_for(self._offload.run(self._look), CALL_SECONDS)
                except (ResourceError, TimeoutError) as error:
                    _log.warning("what the store %s has cannot be read: %s", self.url, error or "no answer in time")
        self._tell()

    def lend(self, instruction: Assign) -> dict[str, tuple[str, ...]]:
        """For each name whose state the store alone has, the tensors that it stands for; :meth:`tensor` gives these now."""
        alone = [
            name
            for name, holders in instruction.on_disks.items()
            if tuple(holders) == (THE_STORE,) and not instruction.holders.get(name)
        ]
        self._current = self._states.get(instruction.committed) if alone else None
        if self._current is None:
            return {}
        state = self._current
        return {name: state.tensor_names([name]) for name in alone}

    def tensor(self, name: str) -> Tensor | None:
        """A tensor of what is lent, None where it is not among it. Raises DamagedSnapshot, and the run hears of it."""
        state = self._current
        if state is None or not state.has(name):
            return None
        try:
            return state.tensor(name)
        except DamagedSnapshot:
            self._damaged.add(state.snapshot.step)
            self._loop.call_soon_threadsafe(self._tell)
            raise

    def _look(self) -> None:
        """Opens this run's snapshots that are new; blocking."""
        if self._store is None:
            return
        found = [one for one in self._store.snapshots() if one.run_id == self._settings.run_id]
        for snapshot in found:
            if snapshot.step in self._damaged:
                continue
            try:
                self._states[snapshot.step] = StoredState(self._store, snapshot)
            except DamagedSnapshot:
                self._damaged.add(snapshot.step)
        kept = {snapshot.step for snapshot in found}
        origin = self._settings.origin
        for step in list(self._states):
            if step not in kept and (origin is None or step != origin.step):
                del self._states[step]

    def _tell(self) -> None:
        parts = tuple(
            HeldPart(step=step, names=state.names, num_bytes=state.snapshot.num_bytes)
            for step, state in sorted(self._states.items())
            if step not in self._damaged
        )
        self._post(StoreHolds(parts=parts))
