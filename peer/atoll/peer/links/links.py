"""A peer's links to the neighbours that its plan names: tensors out, tensors in, faults at once.

:class:`Links` lives as long as the peer. :meth:`Links.configure` opens the links of a plan; :meth:`Links.send` may be called
from any thread and encodes on a worker thread; messages arrive on the event loop, decoded, those of older generations
dropped and those of newer ones kept until :meth:`Links.advance`. It does not know what the messages mean, except that the
plan's ``accept`` judges each header before anything is allocated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import grpc
import grpc.aio

from atoll.compression.codec import RawCodec
from atoll.compression.registry import MessageCoder, decode_message, is_raw
from atoll.peer.links.admission import LinksServicer, NotAdmitted
from atoll.peer.links.encoding import Task, UrgentWorker
from atoll.peer.links.link import Link, LinkSettings
from atoll.peer.links.loss_guard import LossGuard
from atoll.peer.links.usage import Reception, UsageTable
from atoll.protocol.assignment import Neighbour
from atoll.protocol.courtesy import Courtesy
from atoll.protocol.errors import AtollError, LinkError, MissingState, WireError
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.framing import urgency
from atoll.protocol.ids import Generation, PeerId
from atoll.protocol.messages import EncodedMessage, Kind, Message, MessageHeader, MessageKey
from atoll.protocol.pacing import Pacer
from atoll.protocol.security import Security
from atoll.protocol.v1 import frames_pb2_grpc, session_pb2

__all__ = ["LinkSettings", "Links"]

_PLAN_SECONDS = 5.0  # how long a dialler of a plan that is not known here yet is kept; then it dials anew
_MOST_GENERATIONS_AHEAD = 4  # a neighbour hears of a new generation earlier than this peer does, but not of many
# Only what is used on one side of a link may lose bits; gradients of shared parameters are summed on both.
_MAY_LOSE = (Kind.ACTIVATION, Kind.GRADIENT)


class Links:
    """Create it on the event loop; all methods belong to that loop, but for :meth:`send` and :meth:`consumed`.

    ``on_message(peer, message)`` and ``on_fault(error)`` are called on the loop. A fault names the peer to blame; after it
    the link comes back by itself if it can, but messages of the present generation may be lost. ``pacers`` bound what all links
    send together. Without ``security`` in plain text. ``courtesy`` is for whoever sends in the background beside them.
    """

    def __init__(
        self,
        own: PeerId,
        *,
        on_message: Callable[[PeerId, Message], None],
        on_fault: Callable[[LinkError], None],
        pacers: Sequence[Pacer] = (),
        chaos: FaultPoints | None = None,
        security: Security | None = None,
    ) -> None:
        self._own = own
        self._security = security
        self._on_message = on_message
        self._on_fault = on_fault
        self._loop = asyncio.get_running_loop()
        self._worker = UrgentWorker("atoll-encode")
        self.courtesy = Courtesy()
        self._usage = UsageTable(own, self.courtesy)
        self._pacers = tuple(pacers)
        self._chaos = chaos or FaultPoints()
        self._links: dict[PeerId, Link] = {}
        self._coders: dict[PeerId, MessageCoder] = {}
        self._overtook: dict[PeerId, list[EncodedMessage]] = {}  # used on the worker thread only
        self._codecs: dict[PeerId, str] = {}
        self._guard = LossGuard()
        self._settings = LinkSettings()
        self._plan: Generation | None = None
        self._generation = Generation(0)
        self._early: list[tuple[PeerId, Message]] = []
        self._changed = asyncio.Event()
        self._configured = False
        self._closed = False

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service that neighbours dial to a server, before it starts."""
        frames_pb2_grpc.add_LinksServicer_to_server(LinksServicer(self._own, self.link_for), server)

    async def configure(
        self,
        *,
        generation: Generation,
        neighbours: Sequence[Neighbour],
        settings: LinkSettings,
        accept: Callable[[PeerId, MessageHeader], str | None],
    ) -> None:
        """Replaces all links by those of a plan and returns when every one is up.

        ``accept`` gives None for a header that is expected, else the reason to refuse it. Raises LinkError for the first
        neighbour that is not connected within ``settings.connect_seconds``.
        """
        await self.disconnect()
        self._settings = settings
        self._plan = generation
        self.advance(generation)
        self._coders = {neighbour.peer: MessageCoder(settings.run_seed) for neighbour in neighbours}
        self._codecs = {neighbour.peer: neighbour.codec for neighbour in neighbours}
        for neighbour in neighbours:
            if neighbour.peer not in self._links:  # one stream a peer, whatever it holds
                self._links[neighbour.peer] = self._open(neighbour, accept)
        self._changed.set()
        self._changed = asyncio.Event()
        deadline = time.monotonic() + settings.connect_seconds
        links = list(self._links.values())
        for link in links:
            await link.wait_connected(max(0.0, deadline - time.monotonic()))
        for link in links:  # one that was lost while another was awaited
            link.check_connected()
        self._configured = True

    def disconnect(self) -> Coroutine[Any, Any, None]:
        """Leaves the links of a plan that is over, and returns what there is to await until they have ended. That neighbours
        leave them too is no fault from now on. Who dials for a later plan is kept waiting for :meth:`configure`."""
        self._configured = False
        links, self._links = list(self._links.values()), {}
        return _close(links)

    def send(self, peer: PeerId, message: Message) -> Future[None]:
        """Encodes and sends; from any thread, without waiting.

        The tensors must not change before the future is done: it is when ``peer`` has the message. It fails with the LinkError
        that prevented this (reported as a fault as well), and is cancelled when the message's generation is over. Nobody
        needs to wait for it.
        """
        done: Future[None] = Future()
        if self._closed:
            done.cancel()
            return done
        name = self._codecs.get(peer, RawCodec.name) if message.key.kind in _MAY_LOSE else RawCodec.name
        self._worker.submit(urgency(message.key.kind), Task.ENCODE, lambda: self._encode(peer, message, name, done))
        return done

    def use_codecs(self, codecs: Mapping[PeerId, str]) -> None:
        """What is given to :meth:`send` for these neighbours from now on is encoded so, as far as it may lose bits."""
        self._codecs |= {peer: name for peer, name in codecs.items() if peer in self._codecs}

    def consumed(self, key: MessageKey, peer: PeerId) -> None:
        """Says, from any thread, that a message from ``peer`` takes no memory any more, so another one may come."""
        self._call_soon(lambda: self._grant(key, peer))

    def advance(self, generation: Generation) -> None:
        """Drops everything of older generations, and hands out what came early for this one."""
        self._generation = max(self._generation, generation)
        for link in self._links.values():
            link.advance(self._generation)
        early, self._early = self._early, []
        for peer, message in early:
            self._deliver(peer, message)

    def silent_seconds(self, peer: PeerId) -> float:
        """How long nothing has been heard from ``peer``; 0 for one that is no neighbour."""
        link = self._links.get(peer)
        return 0.0 if link is None else link.silent_seconds

    def num_unacknowledged(self, peer: PeerId) -> int:
        """Messages encoded for ``peer`` that it does not have yet."""
        link = self._links.get(peer)
        return 0 if link is None else link.num_unacknowledged

    def uses(self) -> tuple[session_pb2.LinkUse, ...]:
        """What each link has carried from here since the peer started."""
        return self._usage.report()

    def receptions(self) -> Mapping[PeerId, Reception]:
        """What each neighbour of the present plan has sent."""
        return {peer: self._usage.reception(peer) for peer in self._links}

    @property
    def coding_seconds(self) -> Mapping[str, float]:
        """What encoding and decoding took, since the peer started; what is raw is not encoded."""
        return {task.value: seconds for task, seconds in self._worker.seconds.items()}

    @property
    def num_to_code(self) -> int:
        """Messages that wait to be encoded or decoded."""
        return self._worker.num_queued

    async def close(self) -> None:
        """Ends every link and the worker thread."""
        self._closed = True
        self._changed.set()
        await self.disconnect()
        await asyncio.to_thread(self._worker.close)

    async def link_for(self, peer: PeerId, generation: Generation) -> Link:
        """The link that a stream dialled by ``peer`` belongs to, waiting a little for the plan of that generation.

        Raises NotAdmitted.
        """
        await self._wait_for_plan(generation)
        if self._plan is None or self._closed or self._plan < generation:
            raise NotAdmitted(grpc.StatusCode.FAILED_PRECONDITION, f"{self._own} has not heard of plan {generation} yet")
        link = self._links.get(peer)
        if link is None or self._plan > generation:
            reason = f"{peer} with plan {generation} is no neighbour of {self._own} in plan {self._plan}"
            raise NotAdmitted(grpc.StatusCode.PERMISSION_DENIED, reason)
        return link

    def arrived(self, peer: PeerId, message: EncodedMessage) -> None:
        """A link has a whole message. Raises WireError where decoding it on the spot fails."""
        if is_raw(message) and not self._guard.awaits(peer, message.key):
            self._deliver(peer, decode_message(message))
        else:
            self._worker.submit(urgency(message.key.kind), Task.DECODE, lambda: self._decode(peer, message))

    def failed(self, error: LinkError) -> None:
        """A link has a fault. Before all links are up, ``configure`` reports it."""
        if self._configured:
            self._on_fault(error)

    def _open(self, neighbour: Neighbour, accept: Callable[[PeerId, MessageHeader], str | None]) -> Link:
        assert self._plan is not None
        link = Link(
            own=self._own,
            peer=neighbour.peer,
            address=neighbour.address if neighbour.dial else None,
            generation=self._plan,
            settings=self._settings,
            accept=lambda header: accept(neighbour.peer, header),
            events=self,
            usage=self._usage,
            pacers=self._pacers,
            max_bytes_per_second=neighbour.max_bytes_per_second,
            chaos=self._chaos,
            security=self._security,
        )
        link.open()
        return link

    async def _wait_for_plan(self, generation: Generation) -> None:
        deadline = time.monotonic() + _PLAN_SECONDS
        while (self._plan is None or self._plan < generation) and not self._closed:
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
            except TimeoutError:
                return

    def _coder(self, peer: PeerId) -> MessageCoder:
        """The codecs of the link to ``peer``, with their state; used on the worker thread only."""
        return self._coders.get(peer) or MessageCoder()

    def _encode(self, peer: PeerId, message: Message, name: str, done: Future[None]) -> None:
        if message.key.generation < self._generation:
            done.cancel()
            return
        try:
            coder = self._coder(peer)
            encoded = coder.encode(message, name)
            if message.key.kind in _MAY_LOSE:
                self._usage.of(peer, message.key.kind).encoded(name, message)
                self._guard.sent(peer, coder, message, encoded, self._usage.of(peer, message.key.kind))
        except (AtollError, RuntimeError) as error:  # torch raises RuntimeError, for lack of memory among other things
            failure = LinkError(self._own, f"{message.key} cannot be encoded as {name}: {error}")
            done.set_exception(failure)
            self._call_soon(lambda: self.failed(failure))
            return
        self._call_soon(lambda: self._submit(peer, encoded, done))

    def _submit(self, peer: PeerId, message: EncodedMessage, done: Future[None]) -> None:
        link = self._links.get(peer)
        if message.key.generation < self._generation:
            done.cancel()
        elif link is None:
            done.set_exception(LinkError(peer, f"{message.key}: it is no neighbour in this plan"))
        else:
            link.submit(message, done)

    def _decode(self, peer: PeerId, message: EncodedMessage) -> None:
        try:
            decoded = self._coder(peer).decode(message)
            self._guard.received(peer, decoded, self._usage)
        except MissingState:  # the message that it needs was damaged and is sent again
            self._overtook.setdefault(peer, []).append(message)
            return
        except (WireError, RuntimeError) as error:  # torch raises RuntimeError, for lack of memory among other things
            failure = LinkError(peer, f"{message.key} cannot be decoded: {error}")
            self._call_soon(lambda: self.failed(failure))
            return
        self._call_soon(lambda: self._deliver(peer, decoded))
        for waiting in self._overtook.pop(peer, []):
            if waiting.key.generation >= self._generation:
                self._decode(peer, waiting)

    def _deliver(self, peer: PeerId, message: Message) -> None:
        if message.key.generation > self._generation:
            self._early.append((peer, message))
            if len({early.key.generation for _, early in self._early}) > _MOST_GENERATIONS_AHEAD:
                self._early.clear()
                self.failed(LinkError(peer, f"it sends for generation {message.key.generation} in {self._generation}"))
        elif message.key.generation == self._generation:
            self._on_message(peer, message)

    def _grant(self, key: MessageKey, peer: PeerId) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.consumed(key)

    def _call_soon(self, callback: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)


async def _close(links: Iterable[Link]) -> None:
    await asyncio.gather(*(link.close() for link in links))
