"""A peer's snapshots: its own, written while training goes on, those it copies from others, and what it gives of them.

:class:`Snapshots` belongs to the event loop; the disk is touched by worker threads and by the writer's thread alone. A peer
whose owner gave it no cache folder keeps nothing, and says so when it is asked to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from atoll.peer.settings import PeerSettings
from atoll.peer.stage.events import SnapshotWritten
from atoll.peer.state.copying import Copier, Copying
from atoll.peer.state.lending import nothing_stored
from atoll.peer.state.snapshot_folder import Held, SnapshotFolder, StoredState, wall_clock
from atoll.peer.state.snapshot_writer import SnapshotWriter
from atoll.protocol.ids import PeerId, StepNumber
from atoll.protocol.security import Security
from atoll.protocol.v1 import session_pb2


class Snapshots:
    """``notify`` may be called by any thread."""

    def __init__(
        self, settings: PeerSettings, notify: Callable[[SnapshotWritten], None], security: Security | None = None
    ) -> None:
        own, where = PeerId(settings.name), settings.snapshots or settings.cache
        self.run_id = ""
        self._own = own
        self._notify = notify
        self._security = security
        self._max_download = settings.max_download
        self._copying = Copying()
        self._removing: set[asyncio.Task[None]] = set()
        self._folder = None if where is None else SnapshotFolder(where, self._damaged)
        self.writer = None if self._folder is None else SnapshotWriter(self._folder, own, notify, settings.chaos)

    async def open(self) -> None:
        """Clears up what is of no use any more."""
        if self._folder is not None:
            await asyncio.to_thread(self._folder.clean, wall_clock())

    async def held(self) -> list[Held]:
        """What is there, of any run."""
        return [] if self._folder is None else await asyncio.to_thread(self._folder.held)

    @property
    def where(self) -> str:
        """The folder of this run, for people; empty where nothing is kept."""
        return "" if self._folder is None else str(self._folder.path / self.run_id)

    def enter(self, run_id: str) -> None:
        """From now on all is about this run."""
        self.run_id = run_id
        if self.writer is not None:
            self.writer.run_id = run_id

    def stored(self, step: StepNumber) -> StoredState:
        """What is on the disk of a step of this run; blocking. Nothing where nothing is kept."""
        if self._folder is None or not self.run_id:
            return nothing_stored(step)
        return self._folder.open(self.run_id, step)

    async def copy(self, request: session_pb2.CopySnapshot) -> session_pb2.SnapshotCopied:
        """Carries out a request to copy; the answer says how it went."""
        if self._folder is None:
            failure = "its owner gave this peer no folder to keep anything in: start it with --cache DIR"
            return session_pb2.SnapshotCopied(step=request.step, source=request.source, failure=failure)
        copier = Copier(
            own=self._own,
            run_id=self.run_id,
            folder=self._folder,
            max_download=self._max_download,
            security=self._security,
        )
        return await self._copying.copy(copier, request)

    async def keep_only(self, steps: Collection[StepNumber]) -> None:
        """Removes the run's snapshots of all other steps, and stops copying them."""
        self._copying.keep_only(steps)
        if self._folder is not None and self.run_id:
            removing = asyncio.create_task(asyncio.to_thread(self._folder.keep_only, self.run_id, steps))
            self._removing.add(removing)
            removing.add_done_callback(self._removing.discard)
            await asyncio.shield(removing)

    async def close(self, within_seconds: float) -> None:
        """Ends writing, and waits a while for what is being removed, which the end of a run begins."""
        if self.writer is not None:
            self.writer.stop()
            await asyncio.to_thread(self.writer.join, within_seconds)
        if self._removing:
            await asyncio.wait(self._removing, timeout=within_seconds)

    def _damaged(self, run_id: str, step: StepNumber, why: str) -> None:
        """On whatever thread found it: what this peer said that it has, it has no more."""
        if run_id == self.run_id:
            self._notify(SnapshotWritten(step=step, failure=why))


def held_message(held: Held) -> session_pb2.HeldSnapshot:
    """As Join tells it."""
    return session_pb2.HeldSnapshot(run_id=held.run_id, step=held.step, names=held.names, num_bytes=held.num_bytes)
