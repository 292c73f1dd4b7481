"""The service through which other peers fetch state that this one keeps.

A borrower may ask before this peer has heard of the change of plan, or while its compute thread ends an operator: it is kept
waiting for a while. Whom the coordinator did not name, or who asks under another generation or for another step, is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from functools import partial

import grpc
import grpc.aio
import torch

from atoll.compression.registry import encode_message
from atoll.peer.events import StateKept
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.framing import frames_of
from atoll.protocol.ids import Generation, MicrobatchIndex, PeerId, StageIndex
from atoll.protocol.messages import EncodedMessage, Kind, Message, MessageKey
from atoll.protocol.pacing import Pacer, paced_chunk_bytes, pacers_with, take_turns
from atoll.protocol.sending import urgency
from atoll.protocol.state import StateDigest, split_name
from atoll.protocol.transfer import TRANSFER_SILENCE_SECONDS
from atoll.protocol.v1 import state_pb2, state_pb2_grpc

Context = grpc.aio.ServicerContext[state_pb2.StateRequest, state_pb2.StatePart]

PATIENCE_SECONDS = TRANSFER_SILENCE_SECONDS / 2
"""How long a borrower may be early; then it is told to ask again."""


class Loan:
    """What is lent at the moment: the kept tensors, by the name that they belong to."""

    def __init__(self, kept: StateKept) -> None:
        self.kept = kept
        self._groups: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in kept.state.items():
            self._groups.setdefault(split_name(name)[0], []).append((name, tensor))

    def refusal(self, request: state_pb2.StateRequest) -> str | None:
        """Why a request is not served; None when it is."""
        kept = self.kept
        if (request.generation, request.step) != (kept.generation, kept.step):
            return f"state of step {kept.step} is lent under generation {kept.generation}, not of {request.step}"
        if request.peer not in kept.borrowers:
            return f"{request.peer} is no peer of the plan of generation {kept.generation}"
        missing = [name for name in request.names if name not in self._groups]
        return f"it has no {', '.join(missing[:3])}" if missing else None

    def encoded(self, name: str) -> EncodedMessage:
        """The STATE message of one name, with its checksum: reads every byte."""
        key = MessageKey(
            generation=self.kept.generation,
            step=self.kept.step,
            microbatch=MicrobatchIndex(0),
            kind=Kind.STATE,
            source=StageIndex(0),
            target=StageIndex(0),
        )
        return encode_message(Message(key=key, tensors=tuple(self._groups[name]))).sealed()


class Lending(state_pb2_grpc.StateServicer):
    """Create it on the event loop; all methods belong to it. ``pacers`` bound what is sent."""

    def __init__(self, own: PeerId, pacers: Sequence[Pacer] = (), chaos: FaultPoints | None = None) -> None:
        self._own = own
        self._pacers = tuple(pacers)
        self._chaos = chaos or FaultPoints()
        self._loan: Loan | None = None
        self._changed = asyncio.Event()

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server, before it starts."""
        state_pb2_grpc.add_StateServicer_to_server(self, server)

    def lend(self, kept: StateKept) -> None:
        """From now on this is lent, and nothing else."""
        self._loan = Loan(kept)
        self._changed.set()
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Nothing is lent any more; a transfer that is under way ends with a refusal."""
        self._loan = None

    async def Fetch(self, request: state_pb2.StateRequest, context: Context) -> None:
        """Gives state to one borrower."""
        await self._chaos.passable(request.peer)
        loan = await self._loan_for(Generation(request.generation))
        reason = f"{self._own} lends nothing" if loan is None else loan.refusal(request)
        if loan is None or reason is not None:
            early = loan is None or loan.kept.generation < request.generation
            code = grpc.StatusCode.FAILED_PRECONDITION if early else grpc.StatusCode.PERMISSION_DENIED
            await context.abort(code, reason or "")
        digest, pacers = StateDigest(), pacers_with(self._pacers, request.max_bytes_per_second)
        chunk_bytes = paced_chunk_bytes(pacers)
        for number, name in enumerate(request.names, start=1):
            encoded = await asyncio.to_thread(_prepared, loan, name, digest)
            self._chaos.reached("transferring", step=loan.kept.step + 1)
            spoil = partial(self._chaos.outgoing, key=encoded.key, other=request.peer)
            parts = (state_pb2.StatePart(frame=spoil(frame)) for frame in frames_of(encoded, number, chunk_bytes))
            await self._chaos.passable(request.peer)
            await self._write(context, loan, parts, pacers)
        await self._write(context, loan, (state_pb2.StatePart(digest=digest.digest()),), pacers)

    async def _write(self, context: Context, loan: Loan, parts: Iterable[state_pb2.StatePart], pacers: Sequence[Pacer]) -> None:
        for part in parts:
            if self._loan is not loan:
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


def _prepared(loan: Loan, name: str, digest: StateDigest) -> EncodedMessage:
    encoded = loan.encoded(name)
    digest.add(encoded)
    return encoded
