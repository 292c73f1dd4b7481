"""The service through which other peers fetch state: what this one keeps for a change of plan, and what is on its disk.

A borrower may ask before this peer has heard of the change of plan, or while its compute thread ends an operator: it is kept
waiting for a while. Whom the coordinator did not name, or who asks under another generation or for another step, is refused.
A snapshot on the disk is given to whom the coordinator has permitted that, and to the coordinator itself.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NoReturn, Protocol

import grpc
import grpc.aio
import torch

from atoll.compression.registry import encode_message
from atoll.peer.stage.events import StateKept
from atoll.peer.state.permits import Permits
from atoll.peer.state.snapshot_folder import StoredState
from atoll.protocol.errors import DamagedSnapshot
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.framing import frames_of
from atoll.protocol.guard import not_own_name
from atoll.protocol.ids import COORDINATOR, Generation, MicrobatchIndex, PeerId, StageIndex, StepNumber
from atoll.protocol.messages import EncodedMessage, Kind, Message, MessageKey
from atoll.protocol.pacing import Pacer, paced_chunk_bytes, pacers_with, take_turns
from atoll.protocol.sending import urgency
from atoll.protocol.state import grouped, state_digest
from atoll.protocol.transfer import TRANSFER_SILENCE_SECONDS
from atoll.protocol.v1 import frames_pb2, session_pb2, state_pb2, state_pb2_grpc

Context = grpc.aio.ServicerContext[state_pb2.StateRequest, state_pb2.StatePart]
Disk = Callable[[StepNumber], StoredState]

PATIENCE_SECONDS = TRANSFER_SILENCE_SECONDS / 2
"""How long a borrower may be early; then it is told to ask again."""


def nothing_stored(step: StepNumber) -> StoredState:
    """The disk of a peer that keeps nothing there."""
    return StoredState({}, lambda path, why: None)


class Source(Protocol):
    """What one request is answered from; blocking."""

    def refusal(self, request: state_pb2.StateRequest) -> str | None:
        """Why a request is not served; None when it is."""

    def tensors(self, name: str) -> Sequence[tuple[str, torch.Tensor]]:
        """All that a name stands for; raises DamagedSnapshot."""


class Loan:
    """What is lent at the moment: the kept tensors, and what the disk has of the same step."""

    def __init__(self, kept: StateKept, disk: Disk) -> None:
        self.kept = kept
        self._groups = grouped(kept.state)
        self._disk = disk
        self._stored: StoredState | None = None
        self._opening = threading.Lock()

    def refusal(self, request: state_pb2.StateRequest) -> str | None:
        kept = self.kept
        if (request.generation, request.step) != (kept.generation, kept.step):
            return f"state of step {kept.step} is lent under generation {kept.generation}, not of {request.step}"
        if request.peer not in kept.borrowers:
            return f"{request.peer} is no peer of the plan of generation {kept.generation}"
        lacking = [name for name in request.names if name not in self._groups]
        return _lacks(lacking, self._on_disk()) if lacking else None

    def tensors(self, name: str) -> Sequence[tuple[str, torch.Tensor]]:
        if name in self._groups:
            return self._groups[name]
        return tuple(self._on_disk().read(name).items())

    def _on_disk(self) -> StoredState:
        with self._opening:
            if self._stored is None:
                self._stored = self._disk(self.kept.step)
        return self._stored


class Snapshot:
    """What the disk has of one step."""

    def __init__(self, disk: Disk, step: StepNumber) -> None:
        self._stored = disk(step)

    def refusal(self, request: state_pb2.StateRequest) -> str | None:
        return _lacks(request.names, self._stored)

    def tensors(self, name: str) -> Sequence[tuple[str, torch.Tensor]]:
        return tuple(self._stored.read(name).items())


class Lending(state_pb2_grpc.StateServicer):
    """Create it on the event loop; all methods belong to it. ``pacers`` bound what is sent. ``disk`` opens what is on the
    disk of a step of the run called ``run_id``."""

    def __init__(
        self,
        own: PeerId,
        pacers: Sequence[Pacer] = (),
        chaos: FaultPoints | None = None,
        *,
        disk: Disk = nothing_stored,
        permits: Permits | None = None,
    ) -> None:
        self.run_id = ""
        self._own = own
        self._disk = disk
        self._permits = permits or Permits(required=False)
        self._pacers = tuple(pacers)
        self._chaos = chaos or FaultPoints()
        self._loan: Loan | None = None
        self._changed = asyncio.Event()

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server, before it starts."""
        state_pb2_grpc.add_StateServicer_to_server(self, server)

    def lend(self, kept: StateKept) -> None:
        """From now on this is lent, and nothing else."""
        self._loan = Loan(kept, self._disk)
        self._changed.set()
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Nothing is lent any more; a transfer that is under way ends with a refusal."""
        self._loan = None

    async def Fetch(self, request: state_pb2.StateRequest, context: Context) -> None:
        """Gives state to one borrower."""
        await self._chaos.passable(request.peer)
        if (foreign := not_own_name(request.peer)) is not None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, foreign)
        if request.run_id and self.run_id and request.run_id != self.run_id:
            reason = f"{self._own} is in the run {self.run_id}, not in {request.run_id}"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
        source = await (self._snapshot(request, context) if request.snapshot else self._lent(request, context))
        pacers = pacers_with(self._pacers, request.max_bytes_per_second)
        for number, name in enumerate(request.names, start=1):
            try:
                encoded, digest = await asyncio.to_thread(_prepared, request, source, name)
            except DamagedSnapshot as error:
                await self._refuse(context, grpc.StatusCode.DATA_LOSS, str(error))
            self._chaos.reached("transferring", step=request.step + 1)
            await self._chaos.passable(request.peer)
            chunk_bytes = paced_chunk_bytes(pacers)  # what the line carries may have been found out meanwhile
            parts = _parts(encoded, number, chunk_bytes, _begin(request, number, encoded), digest)
            spoil = partial(self._chaos.outgoing, key=encoded.key, other=request.peer)
            await self._write(context, source, _spoilt(parts, spoil), pacers)

    async def _lent(self, request: state_pb2.StateRequest, context: Context) -> Loan:
        loan = await self._loan_for(Generation(request.generation))
        reason = f"{self._own} lends nothing" if loan is None else await asyncio.to_thread(loan.refusal, request)
        if loan is None or reason is not None:
            early = loan is None or loan.kept.generation < request.generation
            code = grpc.StatusCode.FAILED_PRECONDITION if early else grpc.StatusCode.PERMISSION_DENIED
            await self._refuse(context, code, reason or "")
        return loan

    async def _snapshot(self, request: state_pb2.StateRequest, context: Context) -> Snapshot:
        if request.peer != COORDINATOR:
            reason = await self._permits.refusal(request.peer, session_pb2.Permit.PERMIT_COPY, request.step)
            if reason is not None:
                await self._refuse(context, grpc.StatusCode.PERMISSION_DENIED, reason)
        snapshot = await asyncio.to_thread(Snapshot, self._disk, StepNumber(request.step))
        reason = snapshot.refusal(request)
        if reason is not None:
            await self._refuse(context, grpc.StatusCode.NOT_FOUND, f"{reason} of step {request.step} on its disk")
        return snapshot

    async def _refuse(self, context: Context, code: grpc.StatusCode, reason: str) -> NoReturn:
        await context.abort(code, reason)
        raise AssertionError("a stream that is aborted goes on")

    async def _write(
        self, context: Context, source: Loan | Snapshot, parts: Iterable[state_pb2.StatePart], pacers: Sequence[Pacer]
    ) -> None:
        for part in parts:
            if isinstance(source, Loan) and self._loan is not source:
                await context.abort(grpc.StatusCode.ABORTED, f"{self._own} lends this no more")
            try:
                await take_turns(pacers, part.ByteSize(), urgency(Kind.STATE), TRANSFER_SILENCE_SECONDS)
                await asyncio.wait_for(context.write(part), TRANSFER_SILENCE_SECONDS)
            except TimeoutError:
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the borrower does not read")

    async def _loan_for(self, generation: Generation) -> Loan | None:
        """What is lent, once it is of ``generation``, or after a while."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._loan is None or self._loan.kept.generation < generation:
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
            except TimeoutError:
                break
        return self._loan


def _lacks(names: Sequence[str], stored: StoredState) -> str | None:
    there = frozenset(stored.names)
    missing = [name for name in names if name not in there]
    return f"it has no {', '.join(missing[:3])}" if missing else None


def _prepared(request: state_pb2.StateRequest, source: Source, name: str) -> tuple[EncodedMessage, bytes]:
    """The STATE message of one name, with its checksum, and its digest: reads every byte."""
    key = MessageKey(
        generation=Generation(request.generation),
        step=StepNumber(request.step),
        microbatch=MicrobatchIndex(0),
        kind=Kind.STATE,
        source=StageIndex(0),
        target=StageIndex(0),
    )
    encoded = encode_message(Message(key=key, tensors=tuple(source.tensors(name)))).sealed()
    return encoded, state_digest(encoded)


def _begin(request: state_pb2.StateRequest, number: int, encoded: EncodedMessage) -> int:
    """How much of a message the borrower has already."""
    same = number == 1 and request.have_bytes <= encoded.num_bytes and request.have_checksum == encoded.checksum
    return request.have_bytes if same else 0


def _spoilt(
    parts: Iterable[state_pb2.StatePart], spoil: Callable[[frames_pb2.Frame], frames_pb2.Frame]
) -> Iterator[state_pb2.StatePart]:
    """The parts as a fault plan would have them."""
    for part in parts:
        yield state_pb2.StatePart(frame=spoil(part.frame)) if part.HasField("frame") else part


def _parts(encoded: EncodedMessage, number: int, chunk_bytes: int, begin: int, digest: bytes) -> Iterator[state_pb2.StatePart]:
    yield state_pb2.StatePart(digest=digest)
    if begin:
        yield state_pb2.StatePart(goes_on_at=begin)
    for frame in frames_of(encoded, number, chunk_bytes, begin):
        yield state_pb2.StatePart(frame=frame)
