"""The coordinator of one run as an object: start it, let it run, look at it, stop it.

It owns the event loop's side of everything: the queue of events, the one task that feeds them to the state machine and has its
instructions carried out, the clock, background work, and the order in which all of it ends.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc.aio

from atoll.coordinator.chaos import CoordinatorChaos
from atoll.coordinator.conductor import Conductor
from atoll.coordinator.events import Event
from atoll.coordinator.fleet_report import fleet_reply
from atoll.coordinator.identity.run_identity import RunIdentity
from atoll.coordinator.measurements import Measurements
from atoll.coordinator.offload import Offload
from atoll.coordinator.reach.reaching import Reaching
from atoll.coordinator.reach.relay import Relay
from atoll.coordinator.run.events import (
    ExportAsked,
    GraphReady,
    MoveJudged,
    PeerLeaving,
    ReplanAsked,
    RunEvent,
    StopAsked,
    Tick,
    WeightsWritten,
    WorkFailed,
)
from atoll.coordinator.run.instructions import EndRun
from atoll.coordinator.run.machine import RunMachine
from atoll.coordinator.run.states import RunState
from atoll.coordinator.run_files import CACHE
from atoll.coordinator.sessions import translation
from atoll.coordinator.sessions.examining import ExaminationServicer
from atoll.coordinator.sessions.membership import Member
from atoll.coordinator.sessions.servicer import CoordinatorServicer, OperatorServicer
from atoll.coordinator.sessions.session import LAST_WORD_SECONDS
from atoll.coordinator.sessions.sessions import Sessions
from atoll.coordinator.settings import CoordinatorSettings
from atoll.coordinator.sizing import open_sizing
from atoll.coordinator.state_folder import StateFolder
from atoll.coordinator.state_keeper import StateKeeper
from atoll.coordinator.status import Sources, status_reply
from atoll.coordinator.store.origin import Origin, check_origin
from atoll.coordinator.store.vault import Vault, VaultSettings, find_begin
from atoll.coordinator.survey.probe_schedule import LATENCIES_AT_ONCE
from atoll.coordinator.survey.survey import Surveyor
from atoll.protocol.channel import Address, parse_address, start_server
from atoll.protocol.errors import AtollError, JobError, ResourceError, RunFailed
from atoll.protocol.ids import PeerId
from atoll.protocol.job import Job
from atoll.protocol.probe_server import ProbesServicer
from atoll.protocol.security import PlainText, Security
from atoll.protocol.transfer import COORDINATOR
from atoll.protocol.v1 import operator_pb2, operator_pb2_grpc, session_pb2_grpc

_log = logging.getLogger(__name__)

Reply = TypeVar("Reply")

TICK_SECONDS = 0.25
OPERATOR_SECONDS = 540.0
"""How long an operator waits for weights or a plan; the commands themselves give up a little later."""
END_SECONDS = 3.0
"""How long peers may take to hear that the run is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the run ended; ``reason`` is a sentence. ``stopped``: its operator ended it before its last step."""

    finished: bool
    stopped: bool
    reason: str


class Coordinator:
    """Runs once: ``await start()``, then ``await run()``. Several may live in one process and on one loop."""

    def __init__(self, settings: CoordinatorSettings, on_event: Callable[[Event], None] = lambda event: None) -> None:
        self._settings = settings
        self._on_event = on_event
        self._chaos = CoordinatorChaos(settings.chaos)
        self._events: asyncio.Queue[RunEvent] = asyncio.Queue()
        self._machine = RunMachine(settings.run_settings(), time.monotonic())
        self._measurements = Measurements(settings.job.network.compression)
        self._offload = Offload("atoll-coordinator", num_threads=4)
        self._tasks: set[asyncio.Task[None]] = set()
        self._exports: list[asyncio.Future[operator_pb2.ExportReply]] = []
        self._replans: list[asyncio.Future[operator_pb2.ReplanReply]] = []
        self._job_error: JobError | None = None
        self._bug: BaseException | None = None
        self._sessions = Sessions(
            run=settings.job.name,
            version=_version(),
            lease_seconds=settings.lease_seconds,
            post=self._post,
            on_measured=self._measurements.reported,
            on_answer=lambda peer, message: self._surveyor.answered(peer, message),
            on_joined=self._on_joined,
            on_gone=self._on_gone,
            on_removed=self._revoke,
            is_vouched=lambda peer: self._identity is not None and peer in self._identity.register.trusted(),
        )
        self._surveyor = Surveyor(
            sessions=self._sessions,
            offload=self._offload,
            observed=self._measurements.observed,
            limits=settings.survey,
            spawn=self._spawn,
        )
        self._relay = Relay(self._sessions)
        self._state = StateKeeper(self._offload, self._post)
        self._folder: StateFolder | None = None
        self._identity: RunIdentity | None = None
        self._security: Security = PlainText()
        self._examination: ExaminationServicer | None = None
        self._reaching: Reaching | None = None
        self._origin: Origin | None = None
        self._conductor: Conductor | None = None
        self._server: grpc.aio.Server | None = None

    async def start(self) -> str:
        """Claim the state folder and listen; returns the address. Raises JobError or ResourceError, with nothing left
        behind."""
        try:
            return await self._start()
        except BaseException:
            await self.close()
            raise

    @property
    def run_id(self) -> str:
        """Of the run in the state folder, once that is claimed."""
        return self._sessions.run_id

    async def run(self) -> Outcome:
        """Take the run to its end and clean up. Raises JobError when it turns out that the job cannot be run."""
        try:
            await self._drive()
            assert self._conductor is not None
            ended = self._conductor.ended
            assert ended is not None
            outcome = Outcome(finished=ended.finished, stopped=ended.stopped, reason=ended.reason)
            assert self._folder is not None
            await self._note_outcome(self._folder, outcome)
        finally:
            await self.close()
        if self._bug is not None:
            raise self._bug
        if self._job_error is not None:
            raise self._job_error
        return outcome

    def request_stop(self, reason: str) -> None:
        """End the run now, whatever it does; on the loop, at any moment."""
        self._post(StopAsked(reason=reason))

    def stop(self, reason: str) -> None:
        """End the run after the step that is running, with the weights written; at once where there are none yet."""
        self._post(StopAsked(reason=reason, keep_weights=True))

    def status(self, *, timelines: bool = False) -> operator_pb2.StatusReply:
        """How the run stands, and whom it waits for; with ``timelines`` also what each stage did in its last step."""
        sources = Sources(
            run=self._settings.job.name,
            machine=self._machine,
            membership=self._sessions.membership,
            summaries=self._conductor.summaries if self._conductor is not None else (),
            measurements=self._measurements,
            findings=self._surveyor.findings,
        )
        return status_reply(sources, time.monotonic(), timelines=timelines)

    def fleet(self) -> operator_pb2.FleetReply:
        """What is known of the peers that are here and of their links, as a plan would take it."""
        members = tuple(self._sessions.membership)
        findings = self._surveyor.findings
        measured = {member.name: findings.kinds(member.name) for member in members}
        round_trips = {member.name: findings.coordinator_round_trip_seconds(member.name) for member in members}
        trusted = frozenset() if self._identity is None else frozenset(map(PeerId, self._identity.register.trusted()))
        return fleet_reply(members, measured, self._surveyor.network(), round_trips, trusted)

    async def export(self) -> operator_pb2.ExportReply:
        """Write the weights of the last committed step to a file. Raises RunFailed when there are none."""
        context = self._machine.context
        begun = context.state in (RunState.TRAINING, RunState.FINISHING) or context.committed > 0
        if context.state.final or not begun:
            raise RunFailed(f"the run {self._machine.waiting()}: there are no trained weights to export")
        future: asyncio.Future[operator_pb2.ExportReply] = asyncio.get_running_loop().create_future()
        self._exports.append(future)
        self._post(ExportAsked())
        return await self._answer(future, "the weights were not written")

    async def replan(self) -> operator_pb2.ReplanReply:
        """Look for a plan that is worth a move, and move if there is one. Raises RunFailed when there is none to leave."""
        if self._machine.context.state is not RunState.TRAINING:
            raise RunFailed(f"the run {self._machine.waiting()}: there is no plan to change")
        future: asyncio.Future[operator_pb2.ReplanReply] = asyncio.get_running_loop().create_future()
        self._replans.append(future)
        self._post(ReplanAsked())
        return await self._answer(future, "no plan was found or refused")

    async def _answer(self, future: asyncio.Future[Reply], otherwise: str) -> Reply:
        """What the run answers to the operator, who does not wait for ever. Raises RunFailed."""
        try:
            return await asyncio.wait_for(future, OPERATOR_SECONDS)
        except TimeoutError:
            raise RunFailed(f"{otherwise} within {OPERATOR_SECONDS:g} s: the run {self._machine.waiting()}") from None

    def remove_peer(self, name: str, hand_over_seconds: float) -> bool:
        """Bar the name and, where a peer of that name is here, end its session once others have what it holds; False when
        none is here."""
        peer = PeerId(name)
        here = self._sessions.find(peer) is not None
        self._sessions.membership.bar(name)
        if not here:
            self._revoke(peer)
        seconds = min(max(0.0, hand_over_seconds), translation.MAX_HAND_OVER_SECONDS)
        self._post(PeerLeaving(peer=peer, reason="removed by the operator", hand_over_seconds=seconds, removed=True))
        return here

    def allow_peer(self, name: str) -> bool:
        """Let a name that was removed join again; False when it was not barred."""
        was_barred = self._sessions.membership.allow(name)
        if self._identity is not None:
            was_barred = self._identity.register.allow(name) or was_barred
        return was_barred

    def _revoke(self, peer: PeerId) -> None:
        """The peer must go, and comes in no more: it is known to everybody by what it shows."""
        if self._identity is not None:
            self._identity.register.remove(peer)
            self._look_at_identity(self._identity)

    def _look_at_identity(self, identity: RunIdentity) -> None:
        """Takes in what was written into the run's register, by this process or by `atoll invite`."""
        if identity.refresh():
            self._sessions.revoke(identity.revoked)
            # Who was told to go, and why, has a moment to read it.
            asyncio.get_running_loop().call_later(LAST_WORD_SECONDS, identity.security.guard.end_calls_of, identity.revoked)

    async def close(self) -> None:
        """Tell the peers, stop the server, end every task and thread. Harmless when done already."""
        ended = self._conductor.ended if self._conductor is not None else None
        if ended is None:
            ended = EndRun(finished=False, reason="the coordinator has ended")
        reason = ended.reason
        _settle(self._exports, RunFailed(reason))
        _settle(self._replans, RunFailed(reason))
        # First of all: what is being found out about peers would be told as if they had refused, when they go.
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._sessions.end(ended, within_seconds=END_SECONDS)
        await self._relay.close()
        if self._server is not None:
            await self._server.stop(grace=1.0)
            self._server = None
        await self._offload.close()
        self._state.abandon()
        if self._identity is not None:
            self._identity.close()
            self._identity = None
        if self._folder is not None:
            folder, self._folder = self._folder, None
            folder.close()

    async def _start(self) -> str:
        settings = self._settings
        folder = self._folder = await self._offload.run(StateFolder.claim, settings.state, settings.job)
        self._sessions.run_id = folder.journal.run_id()
        if not settings.insecure:
            open_identity = partial(RunIdentity.open, settings.state, self._sessions.run_id, settings.certificate_lifetime)
            identity = self._identity = await self._offload.run(open_identity)
            self._security = identity.security
            for name in identity.register.removed():
                self._sessions.membership.bar(name)
            self._sessions.revoke(identity.revoked)
        self._reaching = Reaching(self._sessions, self._security, self._spawn)
        self._surveyor.know_reach(self._reaching.settled, self._relay.grants.allow)
        if folder.resumption is not None:
            self._machine.resume(folder.resumption)
            self._measurements.codecs.resume(folder.resumption.codecs)
        self._conductor = Conductor(
            folder=folder,
            sessions=self._sessions,
            state=self._state,
            measurements=self._measurements,
            surveyor=self._surveyor,
            offload=self._offload,
            spawn=self._spawn,
            post=self._post,
            on_event=self._on_event,
            vault=await self._open_vault(folder),
            relay=self._relay,
        )
        register_sessions = session_pb2_grpc.add_CoordinatorServicer_to_server
        register_operator = operator_pb2_grpc.add_OperatorServicer_to_server
        examination = self._examination = ExaminationServicer(_version(), self._security)
        probes = ProbesServicer(COORDINATOR, most_at_once=LATENCIES_AT_ONCE, refusal=self._not_here)
        enrolment = () if self._identity is None else (self._identity.add_services,)
        servicers = (
            examination.register,
            *enrolment,
            probes.register,
            self._relay.register,
            partial(register_sessions, CoordinatorServicer(self._sessions, self._state)),
            partial(register_operator, OperatorServicer(self)),
        )
        self._server, address = await self._listen(servicers, folder)
        folder.write_address(address, insecure=settings.insecure)
        await self._conductor.tell_of_resumption(folder)
        self._spawn(self._trace(self._conductor, folder.job))
        self._spawn(self._tick())
        _log.info("listening on %s", address)
        return address

    async def _open_vault(self, folder: StateFolder) -> Vault:
        """What the run has in stores, and goes on from. Raises JobError or ResourceError when that is nothing."""
        job = self._settings.job
        origin = self._origin = await find_begin(folder.journal, self._settings.resume, self._offload)
        settings = VaultSettings(
            url=job.durability.store,
            max_bytes_per_second=job.durability.store_bytes_per_second,
            run_id=self._sessions.run_id,
            job=job.name,
            origin=origin,
            security=self._security,
        )
        vault = Vault(settings, self._post)
        self._state.know_stored(vault.tensor)
        if origin is not None:
            self._machine.begin_at(origin.step)
        if vault.url is not None:
            await self._offload.run(folder.journal.write_store, vault.url)
        await vault.open()
        return vault

    async def _listen(
        self, servicers: Sequence[Callable[[grpc.aio.Server], None]], folder: StateFolder
    ) -> tuple[grpc.aio.Server, str]:
        """Where the run was before, if any port will do: its peers look for it there."""
        known = folder.listened if folder.resumption is not None else None
        wanted = parse_address(self._settings.listen, "--listen")
        if wanted.port == 0 and known is not None:
            try:
                return await start_server(servicers, str(Address(wanted.host, known)), security=self._security)
            except ResourceError as error:
                _log.warning("peers that wait for this run at its old address must be started again: %s", error)
        return await start_server(servicers, self._settings.listen, security=self._security)

    async def _trace(self, conductor: Conductor, job: Job) -> None:
        """Open the data and trace the model while peers join."""
        cache = self._settings.state / CACHE
        sizing = await self._offload.run(open_sizing, job, cache)
        if self._origin is not None:
            check_origin(self._origin, sizing.graph, sizing.changing)
        conductor.know(sizing)
        self._post(GraphReady(trainable=sizing.trainable, changing=sizing.changing))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._sessions.expel_silent()
            self._post(Tick())
            if self._identity is not None:
                self._look_at_identity(self._identity)
            turned_away = self._security.guard.handshakes.report(time.monotonic())
            if turned_away is not None:
                _log.warning("%s", turned_away)

    def _on_joined(self, member: Member) -> None:
        assert self._reaching is not None, "nobody joins before there is a server"
        self._reaching.joined(member)

    def _on_gone(self, peer: PeerId) -> None:
        self._surveyor.gone(peer)
        self._relay.gone(peer)

    async def _not_here(self, name: str) -> str | None:
        """Why nobody of that name is served a probe; None where it has a session, or was examined just now."""
        here = self._identity is None or self._sessions.find(PeerId(name)) is not None
        here = here or (self._examination is not None and self._examination.is_here(name))
        return None if here else f"{name[:80]} has no session with this coordinator"

    async def _drive(self) -> None:
        """Feed the events to the machine, one after the other, until the run is over."""
        assert self._conductor is not None
        while self._conductor.ended is None:
            event = await self._events.get()
            self._chaos.taking(event)
            if isinstance(event, WeightsWritten):
                reply = operator_pb2.ExportReply(path=event.path, step=self._machine.context.committed)
                _settle(self._exports, reply)
            elif isinstance(event, MoveJudged):
                _settle(self._replans, operator_pb2.ReplanReply(moved=event.proposed is not None, reason=event.reason))
            await self._handle(self._conductor, event)

    async def _handle(self, conductor: Conductor, event: RunEvent) -> None:
        try:
            instructions = self._machine.handle(event, time.monotonic())
            await conductor.reserve(self._machine.context.generation)
            for instruction in instructions:
                self._chaos.carrying_out(instruction)
                await conductor.carry_out(instruction)
                self._chaos.carried_out(instruction)
        except AtollError as error:
            if self._machine.context.state.final:
                raise
            # What the failed instruction was to make safe must not follow: the rest of them is dropped.
            await self._handle(conductor, self._failure(error))

    async def _note_outcome(self, folder: StateFolder, outcome: Outcome) -> None:
        try:
            await self._offload.run(folder.journal.write_outcome, str(self._machine.context.state), outcome.reason)
        except AtollError as error:
            _log.warning("the journal does not hold how the run ended: %s", error)

    def _post(self, event: RunEvent) -> None:
        self._events.put_nowait(event)

    def _failure(self, error: AtollError) -> WorkFailed:
        if isinstance(error, JobError):
            self._job_error = error
        return WorkFailed(reason=str(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in the background. What it raises ends the run: an AtollError by its sentence, anything else as a
        bug."""
        task = asyncio.create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if isinstance(error, AtollError):
                self._post(self._failure(error))
            elif error is not None:
                self._bug = error
                self._post(WorkFailed(reason=f"a bug in the coordinator: {error!r}"))

        task.add_done_callback(ended)


def _settle(futures: list[asyncio.Future[Reply]], result: Reply | RunFailed) -> None:
    """Give everyone who waits the same answer."""
    waiting = [future for future in futures if not future.done()]
    futures.clear()
    for future in waiting:
        if isinstance(result, RunFailed):
            future.set_exception(result)
        else:
            future.set_result(result)


def _version() -> str:
    try:
        return importlib.metadata.version("atoll")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "unknown"
