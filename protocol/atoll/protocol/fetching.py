"""State by name from a peer that has it: for a stage, for a copy on another disk, for a store.

What has arrived with the right digest is the asker's, whatever becomes of the stream. A message that broke off is kept as far
as it came, and goes on from there, with the same peer or with another that holds the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from atoll.protocol.channel import open_channel
from atoll.protocol.errors import LinkError
from atoll.protocol.framing import MAX_ATTEMPTS, Arrived, Incoming, MessageStream
from atoll.protocol.ids import Generation, PeerId, StepNumber
from atoll.protocol.messages import EncodedMessage, MessageHeader
from atoll.protocol.pump import STREAM_ERRORS, describe
from atoll.protocol.security import Security
from atoll.protocol.state import split_name, state_digest
from atoll.protocol.transfer import TRANSFER_SILENCE_SECONDS
from atoll.protocol.v1 import state_pb2, state_pb2_grpc

FetchCall = grpc.aio.UnaryStreamCall[state_pb2.StateRequest, state_pb2.StatePart]
Judge = Callable[[MessageHeader], str | None]

PAUSE_SECONDS = 0.5  # before a peer that is not ready, or was not reached, is asked again
_RETRY_CODES = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """Who asks, and for state of which moment; ``snapshot``: for what is on the disk, whatever the plan. Without
    ``security`` in plain text."""

    own: PeerId
    run_id: str
    generation: Generation
    step: StepNumber
    snapshot: bool = False
    max_bytes_per_second: float | None = None
    security: Security | None = None


async def _at_once() -> None:
    """Nothing to wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """What becomes of what arrives: ``judge`` sees each header before anything is allocated, ``take`` each whole and digested
    message of one name; ``on_bytes`` counts; ``turn`` is awaited before more is read."""

    judge: Judge
    take: Callable[[str, EncodedMessage], Awaitable[None]]
    on_bytes: Callable[[int], None] = lambda num_bytes: None
    turn: Callable[[], Awaitable[None]] = _at_once


class Fetching:
    """From the peer at ``address``. ``rests`` are messages that broke off, by name; several transfers may share them."""

    def __init__(self, inquiry: Inquiry, peer: PeerId, address: str, intake: Intake, rests: dict[str, Incoming]) -> None:
        self._inquiry = inquiry
        self._peer = peer
        self._address = address
        self._intake = intake
        self._rests = rests
        self._missing: list[str] = []
        self._offered: Incoming | None = None
        self._offered_bytes = 0
        self._continued = False
        self._moved = False
        self._problem = ""
        self._damaged = False

    async def run(self, names: Sequence[str]) -> None:
        """Returns when all ``names`` have been taken. Raises LinkError, which names the peer, when it is gone, silent, refuses,
        or sends what is damaged or not wanted; it is asked again as long as something more arrives each time."""
        # One that broke off comes first: that is the only one that can go on.
        self._missing = sorted(names, key=lambda name: name not in self._rests)
        async with open_channel(self._address, self._inquiry.security, self._peer) as channel:
            stub = state_pb2_grpc.StateStub(channel)
            vain = 0
            while self._missing and vain < MAX_ATTEMPTS:
                self._moved, self._damaged, self._problem = False, False, ""
                await self._ask(stub.Fetch(self._request()))
                vain = 0 if self._moved else vain + 1
        if self._missing:
            reason = f"it did not send {', '.join(self._missing[:3])}: {self._problem or 'unknown'}"
            raise self._error(reason, corrupt=self._damaged)

    def _request(self) -> state_pb2.StateRequest:
        inquiry, rest = self._inquiry, self._rests.pop(self._missing[0], None)
        self._offered, self._offered_bytes, self._continued = rest, 0 if rest is None else rest.received, False
        return state_pb2.StateRequest(
            peer=inquiry.own,
            run_id=inquiry.run_id,
            generation=inquiry.generation,
            step=inquiry.step,
            names=self._missing,
            max_bytes_per_second=inquiry.max_bytes_per_second or 0.0,
            snapshot=inquiry.snapshot,
            have_bytes=self._offered_bytes,
            have_checksum=0 if rest is None else rest.header.checksum,
        )

    async def _ask(self, call: FetchCall) -> None:
        """Reads one answer to its end. What was wrong with it, where asking again may help, becomes ``_problem``;
        ``_damaged`` says that it was a checksum."""
        refused: list[str] = []

        def judge(header: MessageHeader) -> str | None:
            reason = self._refusal(header)
            if reason is not None:
                refused.append(reason)
            return reason

        stream = MessageStream(judge, generation=self._inquiry.generation)
        try:
            await self._read(call, stream, refused)
        except TimeoutError:
            raise self._error(f"nothing was heard from it for {TRANSFER_SILENCE_SECONDS:g} s") from None
        except STREAM_ERRORS as error:
            if isinstance(error, grpc.aio.AioRpcError) and error.code() in _RETRY_CODES:
                self._problem = describe(error)
                await asyncio.sleep(PAUSE_SECONDS)
                return
            raise self._error(f"the stream broke: {describe(error)}") from error
        finally:
            call.cancel()
            self._keep_rests(stream)

    async def _read(self, call: FetchCall, stream: MessageStream, refused: Sequence[str]) -> None:
        digest = b""
        while isinstance(part := await asyncio.wait_for(call.read(), TRANSFER_SILENCE_SECONDS), state_pb2.StatePart):
            await self._intake.turn()
            match part.WhichOneof("content"):
                case "goes_on_at":
                    self._go_on(stream, part.goes_on_at)
                case "frame":
                    message = self._receive(stream, part, refused)
                    if message is not None:
                        await self._settle(message, digest)
                case "digest":
                    digest = part.digest
        if self._missing and not self._problem:
            self._problem = "it ended the stream early"

    def _go_on(self, stream: MessageStream, begin: int) -> None:
        if self._offered is None or begin != self._offered_bytes:
            raise self._error(f"it goes on at byte {begin} of a message that is not here")
        self._continued = True
        stream.go_on_with(self._offered)

    def _receive(self, stream: MessageStream, part: state_pb2.StatePart, refused: Sequence[str]) -> EncodedMessage | None:
        """Takes one frame in; the message that it completes."""
        found: EncodedMessage | None = None
        for event in stream.handle(part.frame):
            if isinstance(event, Arrived):
                found = event.message
        self._intake.on_bytes(len(part.frame.chunk))
        if refused:
            raise self._error(f"it sent state that is refused: {refused[0]}")
        while (answer := stream.next_frame()) is not None:  # nothing goes back on this stream
            if answer.refused.reason:
                self._problem, self._damaged = answer.refused.reason, True
        return found

    async def _settle(self, message: EncodedMessage, digest: bytes) -> None:
        """Takes a message, if it has the digest that was announced."""
        if await asyncio.to_thread(state_digest, message) != digest:
            self._problem, self._damaged = "a digest is another one than announced", True
            return
        name = _owner(message.tensors[0].name)
        await self._intake.take(name, message)
        self._missing.remove(name)
        self._moved = True

    def _keep_rests(self, stream: MessageStream) -> None:
        """What broke off, and what was offered in vain, is kept for the next request."""
        for broken in stream.take_unfinished():
            name = _owner(broken.header.tensors[0].name)
            self._moved = self._moved or broken is not self._offered or broken.received > self._offered_bytes
            self._rests[name] = broken
        offered, self._offered = self._offered, None
        if offered is not None and not self._continued:
            name = _owner(offered.header.tensors[0].name)
            if name in self._missing:
                self._rests.setdefault(name, offered)

    def _refusal(self, header: MessageHeader) -> str | None:
        inquiry = self._inquiry
        names = {_owner(tensor.name) for tensor in header.tensors}
        if (header.key.generation, header.key.step) != (inquiry.generation, inquiry.step):
            return f"it is of step {header.key.step} and generation {header.key.generation}"
        if len(names) != 1:
            return f"a message of {len(names)} names where each has one of its own"
        if not names <= set(self._missing):
            return f"{', '.join(sorted(names))} was not asked for"
        return self._intake.judge(header)

    def _error(self, message: str, *, corrupt: bool = False) -> LinkError:
        return LinkError(self._peer, message, corrupt=corrupt)


def _owner(tensor: str) -> str:
    return split_name(tensor)[0]
