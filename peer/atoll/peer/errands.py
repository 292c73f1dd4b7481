"""What a peer does beside computing because its session says so: fetching and storing state, copying snapshots, measuring
links, saying how far it is. Each is a task of the peer; what comes of it is fed to the session or told the coordinator."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from atoll.peer.engine import Engine
from atoll.peer.faults import fault_of
from atoll.peer.measuring.probing import answer_probe
from atoll.peer.session.line import Line
from atoll.peer.session.values import Fetch, SessionEvent, ShellFault, StateFetched, Upload, Uploaded, UploadFailed
from atoll.peer.settings import PeerSettings
from atoll.peer.stage.events import GradientsReady
from atoll.peer.stage.memory_use import MemoryUse
from atoll.peer.state.borrowing import borrow_state
from atoll.peer.state.transfer import fetch_state, store_state
from atoll.protocol.errors import AtollError, Implausible, LinkError, RoundFailed
from atoll.protocol.ids import MicrobatchIndex, PeerId
from atoll.protocol.messages import Kind, MessageKey
from atoll.protocol.pacing import Pacer
from atoll.protocol.state import state_judge
from atoll.protocol.v1 import session_pb2

PROGRESS_SECONDS = 2.0  # the coordinator's lease is several times this

_log = logging.getLogger("atoll.peer")


class Errands:
    """``feed`` takes what the session is to hear; ``pacers`` bound what is sent."""

    def __init__(
        self,
        settings: PeerSettings,
        line: Line,
        engine: Engine,
        memory: MemoryUse,
        feed: Callable[[SessionEvent], None],
        pacers: Sequence[Pacer],
    ) -> None:
        self._settings = settings
        self._own = PeerId(settings.name)
        self._line = line
        self._engine = engine
        self._memory = memory
        self._feed = feed
        self._pacers = pacers
        self._fetched_bytes = 0
        self._fetching_from: tuple[PeerId, ...] = ()

    @property
    def fetched_bytes(self) -> int:
        """State that has come from other peers."""
        return self._fetched_bytes

    async def fetch(self, instruction: Fetch, run_id: str) -> None:
        """The state that an assignment names, from the coordinator and from other peers."""
        assignment, generation = instruction.assignment, instruction.assignment.generation
        judge = state_judge(assignment.graph, assignment.optimizer.name)
        doing, chaos = "fetching state from the coordinator", self._settings.chaos
        try:
            cap = self._settings.max_download
            async with self._line.beside() as stub:
                given = await fetch_state(stub, self._own, generation, assignment.fetch, judge, max_download=cap, chaos=chaos)
            doing = "fetching state from other peers"
            began, bytes_before = time.monotonic(), self._fetched_bytes
            self._fetching_from = tuple(donor.peer for donor in assignment.donors)

            def count(num_bytes: int) -> None:
                chaos.reached("transferring", step=assignment.committed_step + 1)
                self._fetched_bytes += num_bytes

            given |= await borrow_state(
                self._own,
                await self._engine.tunnels.passable(assignment),
                count,
                self._settings.max_download,
                run_id=run_id,
                own_disk=self._engine.snapshots.stored,
                chaos=chaos,
                security=self._line.security,
            )
        except AtollError as error:
            self._feed(ShellFault(generation=generation, fault=fault_of(error, doing=doing)))
            return
        finally:
            self._fetching_from = ()
        num_bytes, seconds = self._fetched_bytes - bytes_before, time.monotonic() - began
        if num_bytes:
            _log.info("fetched %.1f MiB of state from %d peers in %.2f s", num_bytes / 2**20, len(assignment.donors), seconds)
        self._feed(StateFetched(generation=generation, given=given, num_bytes=num_bytes, seconds=seconds))

    async def sum_up(self, ready: GradientsReady) -> None:
        """This peer's gradients, with those of the other replicas of its stage."""
        try:
            self._engine.post(await self._engine.sum_up(ready))
        except (RoundFailed, Implausible) as error:
            suspects = error.suspects if isinstance(error, RoundFailed) else ()
            accused = LinkError(suspects[0], str(error)) if suspects else error
            fault = fault_of(accused, doing="summing gradients with other replicas")
            self._feed(ShellFault(generation=ready.generation, fault=fault))

    async def upload(self, instruction: Upload) -> None:
        """State, to the coordinator."""
        generation, step = instruction.generation, instruction.step
        try:
            key = self._state_key(instruction)
            async with self._line.beside() as stub:
                await store_state(stub, self._own, key, instruction.items, pacers=self._pacers, chaos=self._settings.chaos)
            self._feed(Uploaded(generation=generation, step=step))
        except AtollError as error:
            fault = fault_of(error, doing="storing state at the coordinator")
            self._feed(UploadFailed(generation=generation, step=step, fault=fault))

    async def copy(self, request: session_pb2.CopySnapshot) -> None:
        """A part of a snapshot, from another peer's disk to this one's."""
        source = PeerId(request.source)
        request.address = await self._engine.tunnels.address(source, request.address, relayed=request.relayed)
        copied = await self._engine.snapshots.copy(request)
        if copied.failure:
            _log.warning("the snapshot of step %d is not copied from %s: %s", request.step, request.source, copied.failure)
        self._line.tell(session_pb2.PeerMessage(snapshot_copied=copied))

    async def probe(self, probe: session_pb2.Probe) -> None:
        """How fast a link is."""
        self._settings.chaos.reached("probing")
        probed = await answer_probe(
            probe,
            own=self._own,
            coordinator=str(self._line.address),
            tunnels=self._engine.tunnels,
            pacers=self._pacers,
            max_download=self._settings.max_download,
            chaos=self._settings.chaos,
            security=self._line.security,
        )
        self._line.tell(session_pb2.PeerMessage(probed=probed))

    def _state_key(self, instruction: Upload) -> MessageKey:
        stage = self._engine.progress.stage
        assert stage is not None
        return MessageKey(
            generation=instruction.generation,
            step=instruction.step,
            microbatch=MicrobatchIndex(0),
            kind=Kind.STATE,
            source=stage,
            target=stage,
        )

    async def report_progress(self) -> None:
        """Tells the coordinator, until it is cancelled, how far this peer is."""
        while True:
            progress = self._engine.progress
            message = session_pb2.Progress(
                generation=progress.generation,
                step=progress.step,
                phase="fetching state" if self._fetching_from else progress.phase,
                waiting_for=next(iter(self._fetching_from), progress.waiting_for) or "",
                resident_bytes=self._memory.now_bytes(),
                count=progress.count,
                fetched_bytes=self._fetched_bytes,
            )
            self._line.tell(session_pb2.PeerMessage(progress=message))
            await asyncio.sleep(PROGRESS_SECONDS)
