"""Copies of other peers' snapshots, fetched in the background onto the own disk.

One is fetched at a time. What has arrived when a source is lost is a part of its own, complete and with hashes, so another
source is asked only for the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass

from atoll.compression.codec import RawCodec
from atoll.compression.registry import decode_message
from atoll.peer.state.snapshot_folder import SnapshotFolder
from atoll.peer.state.snapshot_part import PartWriter
from atoll.protocol.errors import AtollError
from atoll.protocol.fetching import Fetching, Inquiry, Intake
from atoll.protocol.framing import Incoming
from atoll.protocol.ids import Generation, PeerId, StepNumber
from atoll.protocol.messages import EncodedMessage, MessageHeader
from atoll.protocol.security import Security
from atoll.protocol.v1 import session_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Copier:
    """Who copies, of which run, and how fast others may send to it."""

    own: PeerId
    run_id: str
    folder: SnapshotFolder
    max_download: float | None = None
    security: Security | None = None


class Copying:
    """All copies of one peer; on its event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._running: dict[asyncio.Task[session_pb2.SnapshotCopied], StepNumber] = {}

    async def copy(self, copier: Copier, request: session_pb2.CopySnapshot) -> session_pb2.SnapshotCopied:
        """Carries out one request; the answer tells how it went, whatever happens."""
        task = asyncio.create_task(self._in_turn(copier, request))
        self._running[task] = StepNumber(request.step)
        try:
            await asyncio.wait((task,))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            del self._running[task]
        if task.cancelled():
            return _answer(request, failure=f"the snapshot of step {request.step} is not needed any more")
        return task.result()

    def keep_only(self, steps: Collection[StepNumber]) -> None:
        """Ends what is copied of all other steps."""
        for task, step in self._running.items():
            if step not in steps:
                task.cancel()

    async def _in_turn(self, copier: Copier, request: session_pb2.CopySnapshot) -> session_pb2.SnapshotCopied:
        async with self._turn:
            return await _copy(copier, request)


async def _copy(copier: Copier, request: session_pb2.CopySnapshot) -> session_pb2.SnapshotCopied:
    began, step, failure = time.monotonic(), StepNumber(request.step), ""
    stored = await asyncio.to_thread(copier.folder.open, copier.run_id, step)
    here = set(stored.names)
    missing = [name for name in request.names if name not in here]
    num_bytes = 0
    try:
        if missing:
            arrival = await asyncio.to_thread(_Arrival, copier, request, missing)
            failure = await arrival.fetch(missing)
            here |= set(arrival.names)
            num_bytes = arrival.num_bytes
    except (AtollError, OSError) as error:
        failure = str(error)
    names = [name for name in request.names if name in here]
    return _answer(request, failure=failure, num_bytes=num_bytes, seconds=time.monotonic() - began, names=names)


class _Arrival:
    """A part that grows as state arrives."""

    def __init__(self, copier: Copier, request: session_pb2.CopySnapshot, names: Collection[str]) -> None:
        self._copier = copier
        self._request = request
        self._step = StepNumber(request.step)
        self._part: PartWriter = copier.folder.new_part(copier.run_id, self._step, copier.own, names, 0, source=request.source)
        self.names: tuple[str, ...] = ()
        self.num_bytes = 0

    async def fetch(self, names: list[str]) -> str:
        """Why not all of it is here; empty when it is."""
        failure = ""
        try:
            try:
                await self._fetching().run(names)
            except AtollError as error:
                failure = str(error)
            await asyncio.to_thread(self._complete)
        except BaseException:
            self._part.abandon()
            raise
        return failure

    def _fetching(self) -> Fetching:
        copier = self._copier
        inquiry = Inquiry(
            own=copier.own,
            run_id=copier.run_id,
            generation=Generation(0),
            step=self._step,
            snapshot=True,
            max_bytes_per_second=copier.max_download,
            security=copier.security,
        )
        intake = Intake(judge=_judge, take=self._take)
        rests: dict[str, Incoming] = {}
        return Fetching(inquiry, PeerId(self._request.source), self._request.address, intake, rests)

    async def _take(self, name: str, message: EncodedMessage) -> None:
        await asyncio.to_thread(self._write, message)

    def _write(self, message: EncodedMessage) -> None:
        self._copier.folder.check_room(message.num_bytes)
        self._part.add_group(decode_message(message).tensors)

    def _complete(self) -> None:
        if not self._part.names:
            self._part.abandon()
            return
        self.names, self.num_bytes = self._part.names, self._part.num_bytes
        self._part.complete()


def _judge(header: MessageHeader) -> str | None:
    coded = [tensor.name for tensor in header.tensors if tensor.codec != RawCodec.name]
    return f"{coded[0]} is not sent as it is" if coded else None


def _answer(
    request: session_pb2.CopySnapshot,
    *,
    failure: str = "",
    num_bytes: int = 0,
    seconds: float = 0.0,
    names: Collection[str] = (),
) -> session_pb2.SnapshotCopied:
    return session_pb2.SnapshotCopied(
        step=request.step, source=request.source, failure=failure, num_bytes=num_bytes, seconds=seconds, names=names
    )
