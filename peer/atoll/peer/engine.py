"""What computes and talks to neighbours, without the session: the compute thread, the links and the server they listen on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import grpc.aio

from atoll.peer.averaging.group import ReplicaGroup
from atoll.peer.averaging.hive_holder import HiveHolder
from atoll.peer.averaging.over_links import LinksAverager
from atoll.peer.computing.compute_thread import ComputeThread
from atoll.peer.computing.pipeline import Pipeline, PipelineSurroundings
from atoll.peer.faults import Fault, FaultKind
from atoll.peer.links.links import Links, LinkSettings
from atoll.peer.links.tunnels import Tunnels
from atoll.peer.measuring.measurement_cache import MeasurementCache
from atoll.peer.measuring.profile import Profile
from atoll.peer.settings import PeerSettings
from atoll.peer.stage.boundaries import Boundaries
from atoll.peer.stage.events import (
    Arrived,
    Command,
    CommitStep,
    ComputeProgress,
    Consumed,
    Delivered,
    Faulted,
    GradientsReady,
    Notice,
    Summed,
)
from atoll.peer.stage.senders import BETWEEN_REPLICAS, refusal_of_sender
from atoll.peer.state.lending import Lending
from atoll.peer.state.permits import Permits
from atoll.peer.state.snapshots import Snapshots
from atoll.protocol.assignment import Assignment
from atoll.protocol.channel import start_server
from atoll.protocol.dialling_back import ReachServicer
from atoll.protocol.errors import LinkError
from atoll.protocol.framing import DEFAULT_MAX_MESSAGE_BYTES
from atoll.protocol.ids import Generation, PeerId
from atoll.protocol.messages import Kind, Message, MessageHeader
from atoll.protocol.pacing import Pacer
from atoll.protocol.probe_server import ProbesServicer
from atoll.protocol.security import MutualTls, Security
from atoll.protocol.v1 import session_pb2

CREDIT = 16  # messages of a kind that a neighbour may have unused: enough to fill a link of 100 ms, bounded for a slow stage
CLOSE_SECONDS = 2.0  # how long a peer that ends waits for the operator that is being executed


class Engine:
    """Create it on the event loop. ``on_notice`` and ``on_fault`` are called on the loop; ``tunnels`` lead to those whom this
    peer cannot dial, and are closed with it; ``pacers`` bound what is sent. Without ``security`` in plain text."""

    def __init__(
        self,
        settings: PeerSettings,
        profile: Profile,
        on_notice: Callable[[Notice], None],
        on_fault: Callable[[LinkError], None],
        tunnels: Tunnels,
        pacers: Sequence[Pacer] = (),
        security: Security | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_notice = on_notice
        self._memory_bytes = profile.memory_bytes
        own = PeerId(settings.name)
        self._security = security
        self.tunnels = tunnels
        self.permits = Permits(required=isinstance(security, MutualTls))
        self.links = Links(
            own, on_message=self._arrived, on_fault=on_fault, pacers=pacers, chaos=settings.chaos, security=security
        )
        self._chaos = settings.chaos
        self._bound = ""
        self._group: ReplicaGroup | None = None
        self._hive = HiveHolder(lambda: settings.hive_place(self._bound), settings.chaos)
        self.snapshots = Snapshots(settings, self._notify, security)
        background = (*pacers, self.links.courtesy)
        self.lending = Lending(own, background, settings.chaos, disk=self.snapshots.stored, permits=self.permits)
        self._probes = ProbesServicer(
            settings.name,
            pacers=pacers,
            max_download=settings.max_download,
            chaos=settings.chaos,
            refusal=lambda name: self.permits.refusal(name, session_pb2.Permit.PERMIT_PROBE),
        )
        self._reach = ReachServicer(settings.name)
        self._pipeline = Pipeline(
            PipelineSurroundings(
                device=profile.device,
                memory_bytes=profile.memory_bytes,
                send=self._send,
                notify=self._notify,
                cache=MeasurementCache(settings.cache),
                declared_speed=settings.flops_per_second is not None,
                chaos=settings.chaos,
                snapshots=self.snapshots.writer,
            )
        )
        self._thread: ComputeThread | None = None
        self._server: grpc.aio.Server | None = None

    async def start(self, listen: str, num_threads: int | None) -> str:
        """Listens and starts computing; the address it is bound to. Raises ResourceError when it cannot listen there."""
        servicers = [self.links.register, self.lending.register, self._probes.register, self._reach.register]
        self._server, self._bound = await start_server(servicers, listen, security=self._security)
        self.tunnels.bound = self._bound
        self._thread = ComputeThread(self._pipeline, num_threads=num_threads, on_death=self._died)
        self._thread.start()
        if self.snapshots.writer is not None:
            self.snapshots.writer.start()
        return self._bound

    def enter(self, run_id: str) -> None:
        """The run that this peer works for from now on."""
        self.snapshots.enter(run_id)
        self.lending.run_id = run_id

    @property
    def progress(self) -> ComputeProgress:
        """What the compute thread is at."""
        return self._pipeline.progress

    @property
    def num_commands(self) -> int:
        """What the compute thread has not taken up yet."""
        return 0 if self._thread is None else self._thread.num_queued

    def post(self, command: Command) -> None:
        """Hands a command to the compute thread; ignored when there is none."""
        if isinstance(command, CommitStep) and self._group is not None:
            self._group.committed()
        if self._thread is not None:
            self._thread.post(command)

    def uses(self) -> tuple[session_pb2.LinkUse, ...]:
        """What each link has carried."""
        return self.links.uses()

    def use_codecs(self, codecs: Mapping[PeerId, str]) -> None:
        """What is sent to these peers from now on is encoded so."""
        self.links.use_codecs(codecs)

    def advance(self, generation: Generation) -> None:
        """The links drop what is older."""
        if self._group is not None:
            self._group.advance(generation)
        self.links.advance(generation)

    async def connect(self, assignment: Assignment, boundaries: Boundaries) -> None:
        """Opens the links of an assignment; raises LinkError when a neighbour cannot be reached."""
        if self._group is not None:
            await self._group.close()
        averager = LinksAverager(
            assignment.graph.stage, assignment.generation, self.links.send, self.links.silent_seconds, self._chaos
        )
        group = self._group = ReplicaGroup(assignment, averager, self._hive.get)

        def accept(peer: PeerId, header: MessageHeader) -> str | None:
            if (refusal := refusal_of_sender(assignment, peer, header.key)) is not None:
                return refusal
            if header.key.kind in BETWEEN_REPLICAS:
                return averager.refusal(peer, header)
            return boundaries.refusal(header.key, [tensor.name for tensor in header.tensors])

        passable = await self.tunnels.passable(assignment)
        await self.links.configure(
            generation=assignment.generation,
            neighbours=passable.neighbours,
            settings=LinkSettings(
                credit={Kind.ACTIVATION: CREDIT, Kind.GRADIENT: CREDIT},
                run_seed=assignment.run_seed,
                silence_seconds=assignment.link_seconds,
                connect_seconds=assignment.link_seconds,
                max_message_bytes=min(DEFAULT_MAX_MESSAGE_BYTES, self._memory_bytes),
            ),
            accept=accept,
        )
        await group.meet()

    async def sum_up(self, ready: GradientsReady) -> Summed:
        """The gradients of all replicas of this peer's stage, summed. Raises RoundFailed."""
        assert self._group is not None, "gradients of no stage"
        summed = await self._group.sum_up(ready.generation, ready.step, ready.gradients)
        return Summed(generation=ready.generation, step=ready.step, gradients=tuple(summed))

    def disconnect(self) -> Coroutine[Any, Any, None]:
        """Leaves the links of a plan that is over; what is returned ends them."""
        return self.links.disconnect()

    def stop_computing(self) -> None:
        """Ends the compute thread after the operator that is being executed; does not wait for it."""
        if self._thread is not None:
            self._thread.stop()
        if self.snapshots.writer is not None:
            self.snapshots.writer.stop()

    async def close(self) -> None:
        """Ends everything within a few seconds, even when an operator is still being executed then."""
        self.stop_computing()
        await self._hive.close()
        await self.links.close()
        await self.tunnels.close()
        if self._server is not None:
            await self._server.stop(grace=None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)
        await self.snapshots.close(CLOSE_SECONDS)

    def _arrived(self, peer: PeerId, message: Message) -> None:
        if message.key.kind in BETWEEN_REPLICAS:
            if self._group is not None:
                self._group.links.arrived(peer, message)
            return
        self.post(Arrived(sender=peer, message=message))

    def _send(self, peer: PeerId, message: Message) -> None:
        """Called by the compute thread."""
        done = self.links.send(peer, message)
        if message.key.evaluation and message.key.kind is Kind.ACTIVATION:
            done.add_done_callback(lambda future: None if future.cancelled() else self.post(Delivered(key=message.key)))

    def _notify(self, notice: Notice) -> None:
        """Called by the compute thread."""
        if isinstance(notice, Consumed):
            self.links.consumed(notice.key, notice.sender)
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: the peer ended while an operator was being executed
            self._loop.call_soon_threadsafe(self._on_notice, notice)

    def _died(self, error: BaseException) -> None:
        """Called by the compute thread as its last act: a bug in this program."""
        progress = self._pipeline.progress
        fault = Fault(kind=FaultKind.INTERNAL, reason=f"computing ended while {progress.phase}: {error!r}")
        self._notify(Faulted(generation=progress.generation, step=progress.step, fault=fault, fatal=True))
