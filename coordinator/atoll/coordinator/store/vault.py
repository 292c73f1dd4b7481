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
from atoll.coordinator.run.events import RunEvent, StoreHolds
from atoll.coordinator.run.instructions import Assign, FillStore
from atoll.coordinator.run.journal import Journal
from atoll.coordinator.run.snapshots import THE_STORE, HeldPart
from atoll.coordinator.store.origin import FLAG, Origin, begins_at, begins_with, find_origin
from atoll.coordinator.store.store import Store, StoredState
from atoll.coordinator.store.store_calls import CALL_SECONDS, LOOK_SECONDS, StoreCalls
from atoll.coordinator.store.store_keeping import StoreKeeping, Wanted
from atoll.protocol.errors import DamagedSnapshot, ResourceError
from atoll.protocol.ids import PeerId, StepNumber
from atoll.protocol.security import Security

FIELD = "durability.store"
FAR_BYTES_PER_SECOND = 16.0 * 2**20
"""What peers are asked to send at most for a store that is not on this machine, where nothing else is said: what they send
leaves again over the coordinator's line, on which batches and control messages travel."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class VaultSettings:
    """``url`` is the job's store, None without one, filled no faster than ``max_bytes_per_second`` (None: by what kind of store
    it is); ``origin`` is what the run began from, if that was a snapshot; ``security`` protects connections to peers."""

    url: str | None
    max_bytes_per_second: float | None = None
    run_id: str
    job: str
    origin: Origin | None = None
    security: Security | None = None


class Vault:
    """On the coordinator's event loop, but for :meth:`tensor`, which any other thread may call."""

    def __init__(self, settings: VaultSettings, post: Callable[[RunEvent], None]) -> None:
        self._settings = settings
        self._calls = StoreCalls(settings.url or "", FIELD)
        self._post = post
        self._filling = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._store = None if settings.url is None else Store(settings.url, FIELD)
        self._keeping = None
        if self._store is not None:
            rate = _rate(settings.max_bytes_per_second, self._store)
            self._keeping = StoreKeeping(
                self._store, settings.run_id, settings.job, self._calls, rate, security=settings.security
            )
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
        await self._calls.run(LOOK_SECONDS, self._look)
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
                    await self._calls.run(CALL_SECONDS, self._look)
                except ResourceError as error:
                    _log.warning("what the store %s has cannot be read: %s", self.url, error)
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
        """A tensor of what is lent, None where it is not among it. Raises DamagedSnapshot, and the run hears of it, or
        ResourceError when the store does not answer."""
        state = self._current
        if state is None or not state.has(name):
            return None
        reading = asyncio.run_coroutine_threadsafe(self._calls.run(CALL_SECONDS, state.tensor, name), self._loop)
        try:
            return reading.result()
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


async def find_begin(journal: Journal, resume: str | None, offload: Offload) -> Origin | None:
    """The snapshot that a run goes on from: the one that its journal names, or at first the one to be found at ``resume``; None
    for a run that begins with first values. Raises JobError when there is none, ResourceError when the store that should have
    it does not answer."""
    where = await offload.run(begins_at, journal, resume)
    if where is None:
        return None
    origin = await StoreCalls(where, FLAG).run(LOOK_SECONDS, find_origin, where)
    await offload.run(begins_with, journal, origin)
    return origin


def _rate(said: float | None, store: Store) -> float | None:
    """How fast peers are asked to send; None: as their owners and their steps allow, which is limit enough for a folder."""
    if said is not None:
        return said
    return None if store.is_local else FAR_BYTES_PER_SECOND
