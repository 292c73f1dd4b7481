"""The link to one neighbour, for the life of one plan; it outlives the streams that carry it.

One side dials, the other waits to be dialled; from then on both are alike. While a stream is up three tasks run it: one reads,
one writes, one watches for silence and shows the other end that this one is alive. When a stream ends, that is reported at
once; then the dialling side dials anew, so a step that is run again after a passing fault finds the link up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import grpc.aio

from atoll.peer.links.usage import UsageTable
from atoll.protocol.channel import PROTOCOL_VERSION, open_channel
from atoll.protocol.errors import IdentityRefused, LinkError
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.framing import DEFAULT_MAX_MESSAGE_BYTES, Accept, Arrived, CorruptSender, GaveUp, MessageStream
from atoll.protocol.ids import Generation, PeerId
from atoll.protocol.messages import EncodedMessage, Kind, MessageKey
from atoll.protocol.outbox import Dispatch, Outbox
from atoll.protocol.pacing import Pacer, paced_chunk_bytes, pacers_with
from atoll.protocol.pump import STREAM_ERRORS, Duplex, FramePump, describe
from atoll.protocol.security import Security
from atoll.protocol.v1 import frames_pb2, frames_pb2_grpc

_logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0
_RETRY_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How the links of one plan behave; equal on all of its peers.

    ``credit`` is how many messages of a kind may be unconsumed on the far side, for each generation; kinds that it does not
    name are not limited. A neighbour from which nothing is heard for ``silence_seconds`` is reported, and so is one to which
    there is no connection for ``connect_seconds``. Codecs make their random numbers from ``run_seed``.
    """

    credit: Mapping[Kind, int] = field(default_factory=dict)
    run_seed: int = 0
    silence_seconds: float = 30.0
    connect_seconds: float = 30.0
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES


class LinkEvents(Protocol):
    """What a link tells its owner, on the event loop."""

    def arrived(self, peer: PeerId, message: EncodedMessage) -> None: ...

    def failed(self, error: LinkError) -> None: ...


class Link:
    """``generation`` is the plan's; ``address`` is None on the side that waits to be dialled. All of ``pacers`` bound what is
    sent, and so does ``max_bytes_per_second``, which is what the neighbour's owner lets it receive from here."""

    def __init__(
        self,
        *,
        own: PeerId,
        peer: PeerId,
        address: str | None,
        generation: Generation,
        settings: LinkSettings,
        accept: Accept,
        events: LinkEvents,
        usage: UsageTable,
        pacers: Sequence[Pacer] = (),
        max_bytes_per_second: float | None = None,
        chaos: FaultPoints | None = None,
        security: Security | None = None,
    ) -> None:
        self.peer = peer
        self._security = security
        self._own = own
        self._address = address
        self._plan = self._generation = generation
        self._settings = settings
        self._accept = accept
        self._events = events
        self._usage = usage
        self._pacers = pacers_with(pacers, max_bytes_per_second)
        self._chaos = chaos or FaultPoints()
        self._outbox: Outbox[frames_pb2.Frame] | None = None
        self._queue: list[tuple[EncodedMessage, Future[None]]] = []
        self._connected = asyncio.Event()  # or hopeless: then _fatal says why
        self._fatal: LinkError | None = None
        self._unsettled: set[MessageKey] = set()
        self._closed = False
        self._superseded = asyncio.Event()
        self._pump: FramePump | None = None
        self._lost = time.monotonic()
        self._problem = "it has not dialled yet" if address is None else "it was not reached yet"
        self._tasks: set[asyncio.Task[None]] = set()
        self._patience: asyncio.TimerHandle | None = None

    @property
    def silent_seconds(self) -> float:
        """How long nothing has been heard from the other end."""
        return time.monotonic() - self._lost if self._outbox is None or self._pump is None else self._pump.silent_seconds

    @property
    def num_unacknowledged(self) -> int:
        """Messages that the neighbour does not have yet."""
        return len(self._queue) + (self._outbox.num_unacknowledged if self._outbox else 0)

    def open(self) -> None:
        """Starts dialling, on the side that dials."""
        self._await_connection()
        if self._address is not None:
            task = asyncio.get_running_loop().create_task(self._dial(self._address))
            self._tasks.add(task)
            task.add_done_callback(self._stopped_dialling)

    async def wait_connected(self, seconds: float) -> None:
        """Returns when a stream is up; raises LinkError when there cannot be one, or is none after ``seconds``."""
        try:
            await asyncio.wait_for(self._connected.wait(), seconds)
        except TimeoutError:
            raise self._unreachable() from None
        if self._fatal is not None:
            raise self._fatal

    def check_connected(self) -> None:
        """Raises LinkError when no stream is up."""
        if self._outbox is None:
            raise self._fatal or LinkError(self.peer, f"lost again at once: {self._problem}")

    def submit(self, message: EncodedMessage, done: Future[None]) -> None:
        """Sends a message, as soon as a stream is up; ``done`` tells when the neighbour has it."""
        if self._closed:
            done.cancel()
        elif self._fatal is not None:
            _fail(done, self._fatal)
        elif self._outbox is None:
            self._queue.append((message, done))
        else:
            self._hand_over(self._outbox, message, done)

    def consumed(self, key: MessageKey) -> None:
        """Lets the neighbour send one more message of this kind and generation."""
        if self._outbox is not None:
            self._outbox.grant(key.generation, key.kind)

    def advance(self, generation: Generation) -> None:
        """Drops what belongs to older generations."""
        self._generation = max(self._generation, generation)
        for message, done in self._queue:
            if message.key.generation < generation:
                done.cancel()
        self._queue = [(message, done) for message, done in self._queue if not done.cancelled()]
        if self._outbox is not None:
            self._outbox.advance(generation)

    async def close(self) -> None:
        """Ends the stream and stops dialling."""
        self._closed = True
        self._superseded.set()
        if self._patience is not None:
            self._patience.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _, done in self._queue:
            done.cancel()
        self._queue.clear()

    async def passable(self) -> None:
        """Returns once the network carries something to the neighbour; at once but for a fault plan."""
        await self._chaos.passable(self.peer)

    async def serve(self, duplex: Duplex) -> None:
        """Runs a stream on which both ends have said hello, until it ends; then reports that, unless it was closed here."""
        if self._closed:
            return
        self._superseded.set()
        superseded = self._superseded = asyncio.Event()
        outbox = self._begin()
        self._pump = pump = FramePump(
            other=self.peer,
            duplex=duplex,
            outbox=outbox,
            silence_seconds=self._settings.silence_seconds,
            on_event=lambda event: self._report(outbox, event),
            on_written=self._account,
            on_read=lambda frame: self._usage.reception(self.peer).heard(
                len(frame.chunk), time.monotonic(), unfinished=outbox.num_unfinished > 0
            ),
            on_round_trip=self._usage.traffic(self.peer).echoed,
            chaos=self._chaos,
        )
        error = LinkError(self.peer, "it ended the stream")
        try:
            await pump.run(until=superseded)
        except LinkError as broken:
            error = broken
        finally:
            if self._pump is pump:
                self._pump = None  # it holds the call, and that the connection: both would last until garbage is collected
            self._end(outbox, error)

    def _begin(self) -> Outbox[frames_pb2.Frame]:
        stream = MessageStream(
            self._accept,
            credit=self._settings.credit,
            generation=self._generation,
            max_message_bytes=self._settings.max_message_bytes,
            chunk_bytes=paced_chunk_bytes(self._pacers, self._usage.traffic(self.peer).bytes_per_second),
        )
        self._outbox = outbox = Outbox(
            own=self._own, other=self.peer, stream=stream, wrap=lambda frame: frame, pacers=self._pacers
        )
        if self._patience is not None:
            self._patience.cancel()
        for message, done in self._queue:
            self._hand_over(outbox, message, done)
        self._queue.clear()
        self._connected.set()
        return outbox

    def _end(self, outbox: Outbox[frames_pb2.Frame], error: LinkError) -> None:
        outbox.fail(error)
        self._usage.reception(self.peer).broke()
        if self._outbox is not outbox:  # a newer stream has taken over
            return
        self._outbox = None
        self._lost = time.monotonic()
        self._connected.clear()
        if not self._closed:
            self._problem = str(error)
            self._await_connection()
            self._events.failed(error)

    def _stopped_dialling(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # our own mistake
            _logger.error("the link to %s stopped", self.peer, exc_info=error)
            self._give_up(LinkError(self._own, f"internal error: {error!r}"))

    def _await_connection(self) -> None:
        self._patience = asyncio.get_running_loop().call_later(self._settings.connect_seconds, self._lose_patience)

    def _lose_patience(self) -> None:
        self._fail_queue(self._unreachable())

    def _give_up(self, error: LinkError) -> None:
        self._fatal = error
        if self._patience is not None:
            self._patience.cancel()
        self._connected.set()
        self._fail_queue(error)

    def _fail_queue(self, error: LinkError) -> None:
        waiting, self._queue = self._queue, []
        for _, done in waiting:
            _fail(done, error)
        self._events.failed(error)

    def _unreachable(self) -> LinkError:
        seconds = self._settings.connect_seconds
        where = "" if self._address is None else f" at {self._address}"
        return LinkError(self.peer, f"no connection{where} within {seconds:g} s: {self._problem}")

    def _report(self, outbox: Outbox[frames_pb2.Frame], event: Arrived | GaveUp | CorruptSender) -> None:
        if isinstance(event, Arrived):
            self._events.arrived(self.peer, event.message)
        else:
            self._events.failed(outbox.error_of(event))

    def _account(self, dispatch: Dispatch[frames_pb2.Frame], seconds: float) -> None:
        if dispatch.message is not None:
            key = dispatch.message.key
            self._usage.of(self.peer, key.kind).num_bytes += len(dispatch.item.chunk)
            if key in self._unsettled:  # an acknowledgement may be read before the last write returns
                self._usage.began(self.peer, dispatch.message, time.monotonic() - seconds)

    def _hand_over(self, outbox: Outbox[frames_pb2.Frame], message: EncodedMessage, done: Future[None]) -> None:
        self._unsettled.add(message.key)
        submitted = outbox.submit(message)
        submitted.add_done_callback(lambda future: self._settled(message.key, future))
        _chain(submitted, done)

    def _settled(self, key: MessageKey, submitted: asyncio.Future[None]) -> None:
        self._unsettled.discard(key)
        arrived = not submitted.cancelled() and submitted.exception() is None
        self._usage.settled(self.peer, key, time.monotonic(), arrived=arrived)

    async def _dial(self, address: str) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            await self._chaos.passable(self.peer)
            try:
                # A channel each time: it shows the certificate that is valid now.
                async with open_channel(address, self._security, self.peer) as channel:
                    call = frames_pb2_grpc.LinksStub(channel).Link()
                    try:
                        await self._say_hello(call)
                        pause = _FIRST_PAUSE_SECONDS
                        await self.serve(call)
                    finally:
                        call.cancel()
            except LinkError as error:
                return self._give_up(error)
            except IdentityRefused as error:
                return self._give_up(LinkError(self.peer, str(error)))
            except (*STREAM_ERRORS, TimeoutError) as error:
                self._problem = describe(error)
                if isinstance(error, grpc.aio.AioRpcError) and error.code() not in _RETRY_CODES:
                    return self._give_up(LinkError(self.peer, f"it refuses: {self._problem}"))
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _say_hello(self, call: grpc.aio.StreamStreamCall[frames_pb2.Frame, frames_pb2.Frame]) -> None:
        hello = frames_pb2.Hello(peer=self._own, generation=self._plan, protocol_version=PROTOCOL_VERSION)
        await call.write(frames_pb2.Frame(hello=hello))
        answer = await asyncio.wait_for(call.read(), self._settings.connect_seconds)
        if not isinstance(answer, frames_pb2.Frame):
            raise asyncio.InvalidStateError("the stream ended before the neighbour's hello")
        if answer.hello.peer != self.peer:
            raise LinkError(self.peer, f"{self._address} is {answer.hello.peer!r}, not the peer that the plan names")


def _chain(source: asyncio.Future[None], target: Future[None]) -> None:
    def settle(finished: asyncio.Future[None]) -> None:
        if finished.cancelled():
            target.cancel()
        elif (error := finished.exception()) is not None:
            _fail(target, error)
        elif not target.done() and target.set_running_or_notify_cancel():
            target.set_result(None)

    source.add_done_callback(settle)


def _fail(target: Future[None], error: BaseException) -> None:
    if not target.done() and target.set_running_or_notify_cancel():
        target.set_exception(error)
