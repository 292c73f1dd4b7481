"""Fetches state from the peers that an assignment names as donors, from all of them at once.

What a donor sent counts when every message has passed its checksum and all of them together the donor's digest; names that
are missing then are asked for again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio
from torch import Tensor

from atoll.compression.registry import decode_message
from atoll.protocol.assignment import Assignment, Donor
from atoll.protocol.channel import open_channel
from atoll.protocol.errors import LinkError
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.framing import MAX_ATTEMPTS, Arrived, MessageStream
from atoll.protocol.ids import Generation, PeerId, StepNumber
from atoll.protocol.messages import EncodedMessage, MessageHeader
from atoll.protocol.pump import STREAM_ERRORS, describe
from atoll.protocol.state import StateDigest, split_name, state_judge
from atoll.protocol.transfer import TRANSFER_SILENCE_SECONDS
from atoll.protocol.v1 import state_pb2, state_pb2_grpc

FetchCall = grpc.aio.UnaryStreamCall[state_pb2.StateRequest, state_pb2.StatePart]
OnBytes = Callable[[int], None]

_PAUSE_SECONDS = 0.5  # before a donor that is not ready, or was not reached, is asked again
_RETRY_CODES = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE)


async def borrow_state(
    own: PeerId,
    assignment: Assignment,
    on_bytes: OnBytes,
    max_download: float | None = None,
    chaos: FaultPoints | None = None,
) -> dict[str, Tensor]:
    """The state of all names that have a donor, by the names of ``atoll.protocol.state``. All donors together are asked to send
    no more than ``max_download`` bytes a second.

    ``on_bytes`` hears of each message's size as it arrives. Raises LinkError, which names the donor, when one is gone, silent,
    refuses, or sends what is damaged or not declared.
    """
    judge = state_judge(assignment.graph, assignment.optimizer.name)
    share = None if max_download is None else max_download / max(1, len(assignment.donors))
    borrowers = [
        _Borrower(own, assignment.generation, assignment.committed_step, donor, judge, share, chaos or FaultPoints())
        for donor in assignment.donors
    ]
    tasks = [asyncio.create_task(borrower.run(on_bytes)) for borrower in borrowers]
    try:
        found = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {name: tensor for part in found for name, tensor in part.items()}


class _Borrower:
    """What one donor is to give."""

    def __init__(
        self,
        own: PeerId,
        generation: Generation,
        step: StepNumber,
        donor: Donor,
        judge: Callable[[MessageHeader], str | None],
        max_download: float | None,
        chaos: FaultPoints,
    ) -> None:
        self._own = own
        self._chaos = chaos
        self._max_download = max_download
        self._generation = generation
        self._step = step
        self._donor = donor
        self._judge = judge
        self._found: dict[str, Tensor] = {}
        self._problem = ""
        self._damaged = False

    async def run(self, on_bytes: OnBytes) -> dict[str, Tensor]:
        async with open_channel(self._donor.address) as channel:
            stub = state_pb2_grpc.StateStub(channel)
            for _ in range(MAX_ATTEMPTS):
                missing = [name for name in self._donor.names if name not in self._found]
                if not missing:
                    return self._found
                request = state_pb2.StateRequest(
                    peer=self._own,
                    generation=self._generation,
                    step=self._step,
                    names=missing,
                    max_bytes_per_second=self._max_download or 0.0,
                )
                self._problem, self._damaged = "", False
                await self._ask(stub.Fetch(request), frozenset(missing), on_bytes)
        missing = [name for name in self._donor.names if name not in self._found]
        if missing:
            reason = f"it did not send {', '.join(missing[:3])}: {self._problem or 'unknown'}"
            raise self._error(reason, corrupt=self._damaged)
        return self._found

    async def _ask(self, call: FetchCall, wanted: frozenset[str], on_bytes: OnBytes) -> None:
        """Reads one answer to its end. What was wrong with it, where asking again may help, becomes ``_problem``;
        ``_damaged`` says that it was a checksum."""
        try:
            answer = await self._read(call, wanted, on_bytes)
        except TimeoutError:
            raise self._error(f"nothing was heard from it for {TRANSFER_SILENCE_SECONDS:g} s") from None
        except STREAM_ERRORS as error:
            if isinstance(error, grpc.aio.AioRpcError) and error.code() in _RETRY_CODES:
                self._problem = describe(error)
                await asyncio.sleep(_PAUSE_SECONDS)
                return
            raise self._error(f"the stream broke: {describe(error)}") from error
        finally:
            call.cancel()
        self._found.update(answer)

    async def _read(self, call: FetchCall, wanted: frozenset[str], on_bytes: OnBytes) -> dict[str, Tensor]:
        """What an answer holds, nothing of it when its digest is another one than announced."""
        refused: list[str] = []

        def judge(header: MessageHeader) -> str | None:
            reason = self._refusal(header, wanted)
            if reason is not None:
                refused.append(reason)
            return reason

        stream, digest, arrived = MessageStream(judge, generation=self._generation), StateDigest(), list[EncodedMessage]()
        while isinstance(part := await asyncio.wait_for(call.read(), TRANSFER_SILENCE_SECONDS), state_pb2.StatePart):
            await self._chaos.passable(self._donor.peer)
            if part.WhichOneof("content") == "digest":
                if part.digest == digest.digest():
                    return {name: tensor for message in arrived for name, tensor in decode_message(message).tensors}
                self._problem = self._problem or "the digest over all of it is another one than announced"
                self._damaged = True
                return {}
            for event in stream.handle(part.frame):
                if isinstance(event, Arrived):
                    await asyncio.to_thread(digest.add, event.message)
                    arrived.append(event.message)
                    on_bytes(event.message.num_bytes)
            if refused:
                raise self._error(f"it sent state that is refused: {refused[0]}")
            while (answer := stream.next_frame()) is not None:  # nothing goes back on this stream
                if answer.refused.reason:
                    self._problem, self._damaged = answer.refused.reason, True
        self._problem = self._problem or "it ended the stream early"
        return {}

    def _refusal(self, header: MessageHeader, wanted: frozenset[str]) -> str | None:
        names = {split_name(tensor.name)[0] for tensor in header.tensors}
        if (header.key.generation, header.key.step) != (self._generation, self._step):
            return f"it is of step {header.key.step} and generation {header.key.generation}"
        if not names <= wanted:
            return f"{', '.join(sorted(names - wanted))} was not asked for"
        return self._judge(header)

    def _error(self, message: str, *, corrupt: bool = False) -> LinkError:
        return LinkError(self._donor.peer, message, corrupt=corrupt)
