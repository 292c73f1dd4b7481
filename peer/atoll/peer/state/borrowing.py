"""Fetches state for a stage from those that an assignment names as donors: from all of them at once, each name from the first
that has it.

When a donor is gone, or what it has is damaged, the next one that the assignment names for the same names takes over; what had
arrived stays. A donor that is this peer itself is its own disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from atoll.compression.registry import decode_message
from atoll.peer.state.snapshot_folder import StoredState
from atoll.protocol.assignment import Assignment, Donor
from atoll.protocol.errors import DamagedSnapshot, LinkError
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.fetching import Fetching, Inquiry, Intake
from atoll.protocol.framing import Incoming
from atoll.protocol.ids import PeerId, StepNumber
from atoll.protocol.messages import EncodedMessage
from atoll.protocol.security import Security
from atoll.protocol.state import state_judge

OnBytes = Callable[[int], None]
OwnDisk = Callable[[StepNumber], StoredState]

_log = logging.getLogger("atoll.peer")


async def borrow_state(
    own: PeerId,
    assignment: Assignment,
    on_bytes: OnBytes,
    max_download: float | None = None,
    *,
    run_id: str = "",
    own_disk: OwnDisk | None = None,
    chaos: FaultPoints | None = None,
    security: Security | None = None,
) -> dict[str, Tensor]:
    """The state of all names that have a donor, by the names of ``atoll.protocol.state``. All donors together are asked to send
    no more than ``max_download`` bytes a second.

    ``on_bytes`` hears of what arrives from other peers, piece by piece. ``own_disk`` opens what lies on the own disk of a step.
    Raises LinkError, which names the donor, when the last one that was named for a name is gone, silent, refuses, or sends what
    is damaged or not declared.
    """
    share = None if max_download is None else max_download / max(1, len({donor.peer for donor in assignment.donors}))
    inquiry = Inquiry(
        own=own,
        run_id=run_id,
        generation=assignment.generation,
        step=assignment.committed_step,
        max_bytes_per_second=share,
        security=security,
    )
    return await _Borrowing(inquiry, assignment, on_bytes, own_disk, chaos or FaultPoints()).run()


class _Borrowing:
    """What all donors together are to give."""

    def __init__(
        self,
        inquiry: Inquiry,
        assignment: Assignment,
        on_bytes: OnBytes,
        own_disk: OwnDisk | None,
        chaos: FaultPoints,
    ) -> None:
        self._inquiry = inquiry
        self._chaos = chaos
        self._own_disk = own_disk
        self._donors = assignment.donors
        self._intake = Intake(
            judge=state_judge(assignment.graph, assignment.optimizer.name), take=self._take, on_bytes=on_bytes
        )
        self._missing = {name for donor in assignment.donors for name in donor.names}
        self._found: dict[str, Tensor] = {}
        self._failed: dict[PeerId, LinkError] = {}
        self._rests: dict[str, Incoming] = {}

    async def run(self) -> dict[str, Tensor]:
        tasks = self._begin(self._missing)
        try:
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    donor, names = tasks.pop(task)
                    self._look_at(task, donor)
                    tasks |= self._begin(names & self._missing)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self._found

    def _look_at(self, task: asyncio.Task[None], donor: Donor) -> None:
        """A donor has given all, or it has failed and is asked no more."""
        error = task.exception()
        if isinstance(error, LinkError):
            _log.warning("%s", error)
            self._failed[donor.peer] = error
        elif error is not None:
            raise error

    def _begin(self, names: Iterable[str]) -> dict[asyncio.Task[None], tuple[Donor, set[str]]]:
        """Asks the first donor of each name that has not failed. Raises the LinkError of the last one where none is left."""
        shares: dict[int, set[str]] = {}
        for name in names:
            shares.setdefault(self._first_donor(name), set()).add(name)
        return {
            asyncio.create_task(self._fetch(self._donors[index], share)): (self._donors[index], share)
            for index, share in shares.items()
        }

    def _first_donor(self, name: str) -> int:
        failed: LinkError | None = None
        for index, donor in enumerate(self._donors):
            if name in donor.names:
                failed = self._failed.get(donor.peer)
                if failed is None:
                    return index
        assert failed is not None, "only names that have a donor are asked for"
        raise failed

    async def _fetch(self, donor: Donor, names: set[str]) -> None:
        ordered = [name for name in donor.names if name in names]
        if donor.peer == self._inquiry.own:
            await self._read(ordered)
        else:
            intake = replace(self._intake, turn=partial(self._chaos.passable, donor.peer))
            await Fetching(self._inquiry, donor.peer, donor.address, intake, self._rests).run(ordered)

    async def _read(self, names: Iterable[str]) -> None:
        """From the own disk."""
        own = self._inquiry.own
        if self._own_disk is None:
            raise LinkError(own, "it keeps nothing on a disk")
        stored = await asyncio.to_thread(self._own_disk, self._inquiry.step)
        for name in names:
            try:
                self._keep(name, await asyncio.to_thread(stored.read, name))
            except DamagedSnapshot as error:
                raise LinkError(own, f"its own snapshot of step {self._inquiry.step} is of no use: {error}") from error

    async def _take(self, name: str, message: EncodedMessage) -> None:
        self._keep(name, dict(decode_message(message).tensors))

    def _keep(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self._found.update(tensors)
        self._missing.discard(name)
