"""A peer: carries out what its session decides, and owns every task, thread and socket of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from atoll.compression.registry import decode_message
from atoll.peer.engine import Engine
from atoll.peer.errands import Errands
from atoll.peer.faults import fault_of
from atoll.peer.links.tunnels import Tunnels
from atoll.peer.measuring.handling import handling_seconds
from atoll.peer.measuring.profile import measure
from atoll.peer.session.connection import Received
from atoll.peer.session.enrolling import Belonging
from atoll.peer.session.introduction import introduction, saying_what_is_held
from atoll.peer.session.line import Line
from atoll.peer.session.notice import watch_for_notice
from atoll.peer.session.session import Session
from atoll.peer.session.values import (
    Advance,
    Allow,
    AnswerTunnel,
    AssignmentArrived,
    Compute,
    Connect,
    ConnectionLost,
    CopyOver,
    Disconnect,
    ExitCode,
    Fetch,
    Finish,
    GoBack,
    HangUp,
    Instruction,
    KeepOnly,
    LeaveLater,
    LeaveRequested,
    LendOut,
    LinksReady,
    LongAlone,
    MeasureLink,
    Outcome,
    Revoke,
    SessionEvent,
    SessionState,
    ShellFault,
    StopLending,
    SumUp,
    Tell,
    Upload,
    UseCodecs,
    Warn,
)
from atoll.peer.settings import PeerSettings
from atoll.peer.stage.events import Arrived, Command, Faulted, Measure, Measured, Notice, SnapshotWritten
from atoll.peer.stage.memory_use import MemoryUse
from atoll.peer.state.lending import Lending
from atoll.peer.state.snapshots import Snapshots
from atoll.protocol.errors import AtollError, LinkError, SessionError
from atoll.protocol.ids import Generation, PeerId
from atoll.protocol.messages import EncodedMessage, Kind
from atoll.protocol.pacing import Pacer
from atoll.protocol.v1 import session_pb2

if TYPE_CHECKING:
    from atoll.peer.watching.watch import Watch

CLOSING_SECONDS = 1.0  # within which all peers of a run that ends hear of it
JOIN_AGAIN_SECONDS = 0.5
LONGEST_ANSWER_SECONDS = 60.0

_log = logging.getLogger("atoll.peer")


class Peer:
    """Runs once: ``outcome = await Peer(settings).run()``. Several may live in one process and on one loop."""

    def __init__(self, settings: PeerSettings) -> None:
        self._settings = settings
        self._own = PeerId(settings.name)
        self._session = Session()
        self._pacers: tuple[Pacer, ...] = () if settings.max_upload is None else (Pacer(settings.max_upload),)
        self._memory = MemoryUse(settings.device)
        self._engine: Engine | None = None
        self._belonging = Belonging(settings)
        self._line = Line(settings, self._on_coordinator, self._on_connection_lost, self._pacers)
        self._introduction: session_pb2.Join | None = None
        self._answer_seconds = settings.answer_seconds
        self._tasks: set[asyncio.Task[None]] = set()
        self._loading: set[asyncio.Task[None]] = set()
        self._over_session: set[asyncio.Task[None]] = set()
        self._errands: Errands | None = None
        self._watch: Watch | None = None
        self._outcome: asyncio.Future[Outcome] | None = None
        self._leaving: LeaveRequested | None = None

    async def run(self) -> Outcome:
        """Joins and works until the run or this peer ends; never raises for what other processes or the network do."""
        self._outcome = asyncio.get_running_loop().create_future()
        if self._leaving is not None:
            self._finish(Outcome(exit_code=self._leaving.exit_code, reason=self._leaving.reason))
        start = asyncio.create_task(self._start())
        try:
            await asyncio.wait((start, self._outcome), return_when=asyncio.FIRST_COMPLETED)
            if not self._outcome.done():
                start.result()
            return await self._outcome
        except AtollError as error:
            return Outcome(exit_code=ExitCode.FAILED, reason=str(error))
        finally:
            await self._close(start)

    def leave(self, reason: str, exit_code: int = ExitCode.FINISHED) -> None:
        """Announces that this peer leaves, and ends it; on the loop, at any moment."""
        self._request_leave(LeaveRequested(reason=reason, exit_code=exit_code))

    def leave_in_order(self, reason: str, exit_code: int = ExitCode.FINISHED) -> None:
        """The same once others have what it holds, or the time for that is over; the second time at once."""
        seconds = self._settings.hand_over_seconds
        self._request_leave(LeaveRequested(reason=reason, exit_code=exit_code, hand_over_seconds=seconds))

    def _request_leave(self, request: LeaveRequested) -> None:
        if self._outcome is None:
            self._leaving = request
        elif self._introduction is not None:
            self._feed(request)
        else:
            self._finish(Outcome(exit_code=request.exit_code, reason=request.reason))

    def _leave_later(self, leave: LeaveRequested) -> None:
        seconds = leave.hand_over_seconds
        _log.info(
            "%s: leaves once others have what it holds, within %g s; a second signal ends it at once", leave.reason, seconds
        )
        over = f"{leave.reason}; others did not have all that it holds within {seconds:g} s"
        asyncio.get_running_loop().call_later(seconds, self.leave, over)

    async def _start(self) -> None:
        settings = self._settings
        profile = await asyncio.to_thread(
            measure,
            settings.device,
            threads=settings.threads,
            memory_cap_bytes=settings.memory_bytes,
            declared_flops=settings.flops_per_second,
            cache=settings.cache,
        )
        security = self._line.security = await self._belonging.open()
        tunnels = Tunnels(self._own, lambda: str(self._line.address), security)
        engine = self._engine = Engine(settings, profile, self._on_notice, self._on_link_fault, tunnels, self._pacers, security)
        self._errands = Errands(settings, self._line, engine, self._memory, self._feed, self._pacers)
        await engine.snapshots.open()
        bound = await engine.start(settings.listen_address, settings.threads)
        handling = 0.0 if settings.flops_per_second is not None else await handling_seconds()
        self._introduction = introduction(settings, profile, handling, settings.advertised_address(bound))
        if settings.metrics is not None:
            from atoll.peer.watching.watch import Watch  # aiohttp is slow to import, and most peers show nothing

            self._watch = Watch(settings, self._session, self._line, engine, self._errands, self._memory)
            await self._watch.start(settings.metrics)
        if settings.outbound_only:
            _log.info("this peer accepts no connection: it dials others, or meets them through the coordinator")
        _log.info("joining the coordinator at %s as %s", settings.coordinator, self._own)
        await self._line.open(self._joining)
        self._spawn(self._watch_joining(), self._tasks)
        self._spawn(self._belonging.keep_renewing(), self._tasks)
        if settings.notice_url is not None:
            self._spawn(watch_for_notice(settings.notice_url, self.leave_in_order), self._tasks)

    async def _close(self, start: asyncio.Task[None]) -> None:
        if self._watch is not None:
            await self._watch.close()
        if self._engine is not None:
            self._engine.stop_computing()
        tasks = {start, *self._tasks, *self._loading, *self._over_session}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._line.close()
        if self._engine is not None:
            await self._engine.close()

    async def _joining(self, back: GoBack | None = None) -> session_pb2.Join:
        """What to say at joining now, and with what this peer comes ``back``."""
        assert self._introduction is not None
        return saying_what_is_held(self._introduction, await self._snapshots.held(), back)

    def _on_coordinator(self, received: Received) -> None:
        if not isinstance(received, EncodedMessage):
            before = self._session.state
            self._feed(received)
            if self._session.state is SessionState.IDLE and before in (SessionState.JOINING, SessionState.AWAY):
                self._line.welcomed()
                self._belonging.coordinator = self._line.address
                self._enter_run(self._session.run_id)
                if before is SessionState.JOINING:
                    _log.info("%s joined the run %s", self._own, self._session.run)
                    self._spawn(self._doing.report_progress(), self._tasks)
        elif received.key.kind is Kind.ASSIGNMENT:
            payload = b"".join(bytes(tensor.data) for tensor in received.tensors)
            self._feed(AssignmentArrived(generation=received.key.generation, payload=payload))
        elif received.key.kind is Kind.MEASUREMENT:
            self._settings.chaos.reached("probing")
            self._post(Measure(message=decode_message(received)))
        else:
            self._post(Arrived(sender=None, message=decode_message(received)))

    def _enter_run(self, run_id: str) -> None:
        assert self._engine is not None
        self._engine.enter(run_id)

    def _on_connection_lost(self, reason: str) -> None:
        connection = self._line.connection
        foreign = connection is not None and connection.is_foreign
        if self._session.state is SessionState.JOINING and self._line.is_patient and not foreign:
            self._line.hang_up()
            self._spawn(self._join_again(reason), self._tasks)
        else:
            self._feed(ConnectionLost(reason=reason))

    async def _join_again(self, reason: str) -> None:
        """The coordinator went away before it answered: it may be back in a moment."""
        _log.info("%s; joining again", reason)
        await asyncio.sleep(JOIN_AGAIN_SECONDS)
        try:
            await self._line.open(self._joining)
        except SessionError as error:
            self._feed(ConnectionLost(reason=str(error)))
        else:
            await self._watch_joining()

    def _on_link_fault(self, error: LinkError) -> None:
        asyncio.get_running_loop().call_later(CLOSING_SECONDS, self._warn_of, error, self._session.generation)
        self._feed(ShellFault(generation=self._session.generation, fault=fault_of(error, doing="exchanging tensors")))

    def _warn_of(self, error: LinkError, generation: Generation) -> None:
        assert self._outcome is not None
        # At the end of a run, or of a plan, a neighbour may hear of it first.
        if not self._outcome.done() and generation == self._session.generation:
            _log.warning("%s", error)

    def _on_notice(self, notice: Notice) -> None:
        if isinstance(notice, Faulted):
            _log.warning("step %d: %s", notice.step, notice.fault.reason)
        elif isinstance(notice, Measured):
            _log_measured(notice)
        elif isinstance(notice, SnapshotWritten) and notice.failure:
            _log.warning("there is no snapshot of step %d here: %s", notice.step, notice.failure)
        elif isinstance(notice, SnapshotWritten) and self._session.state is SessionState.AWAY:
            _log.info("the state of step %d is kept in %s", notice.step, self._snapshots.where)
        if self._watch is not None:
            self._watch.noticed(notice)
        self._feed(notice)

    def _feed(self, event: SessionEvent) -> None:
        for instruction in self._session.handle(event):
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Tell():
                self._tell(instruction.message)
            case Compute():
                self._post(instruction.command)
            case Connect():
                _log_stage(instruction)
                self._spawn(self._connect(instruction), self._loading)
            case Fetch():
                self._spawn(self._doing.fetch(instruction, self._session.run_id), self._loading)
            case Advance():
                self._advance(instruction)
            case UseCodecs():
                self._use_codecs(instruction)
            case Disconnect():
                self._disconnect()
            case SumUp():
                self._spawn(self._doing.sum_up(instruction.ready), self._tasks)
            case LendOut():
                self._lending.lend(instruction.kept)
            case StopLending():
                self._lending.stop()
            case Upload():
                self._spawn(self._doing.upload(instruction), self._over_session)
            case MeasureLink():
                self._spawn(self._doing.probe(instruction.probe), self._over_session)
            case CopyOver():
                self._spawn(self._doing.copy(instruction.copy), self._tasks)
            case Allow():
                self._allow(instruction.permit)
            case AnswerTunnel():
                self._answer(instruction)
            case Revoke():
                self._belonging.revoke(instruction.serials)
            case KeepOnly():
                self._spawn(self._snapshots.keep_only(instruction.steps), self._tasks)
            case LeaveLater():
                self._leave_later(instruction.leave)
            case Warn():
                _log.warning("%s", instruction.text)
            case HangUp():
                self._hang_up()
            case GoBack():
                self._spawn(self._go_back(instruction), self._tasks)
            case Finish():
                self._finish(instruction.outcome)

    def _tell(self, message: session_pb2.PeerMessage) -> None:
        """Sends a message to the coordinator, with what only the shell knows filled in."""
        assert self._engine is not None
        if message.HasField("ready"):
            message.ready.resident_bytes = self._memory.peak_bytes()
        elif message.HasField("report"):
            message.report.resident_bytes = self._memory.peak_bytes()
            message.report.links.extend(self._engine.uses())
        self._line.tell(message)

    def _post(self, command: Command) -> None:
        assert self._engine is not None
        self._engine.post(command)

    @property
    def _doing(self) -> Errands:
        assert self._errands is not None
        return self._errands

    @property
    def _lending(self) -> Lending:
        assert self._engine is not None
        return self._engine.lending

    @property
    def _snapshots(self) -> Snapshots:
        assert self._engine is not None
        return self._engine.snapshots

    def _allow(self, permit: session_pb2.Permit) -> None:
        assert self._engine is not None
        self._engine.permits.grant(permit)

    def _answer(self, instruction: AnswerTunnel) -> None:
        assert self._engine is not None
        self._engine.tunnels.answer(instruction.offer)

    def _use_codecs(self, instruction: UseCodecs) -> None:
        assert self._engine is not None
        self._engine.use_codecs(instruction.codecs)

    def _disconnect(self) -> None:
        assert self._engine is not None
        for task in self._loading:
            task.cancel()
        self._spawn(self._engine.disconnect(), self._tasks)

    def _advance(self, instruction: Advance) -> None:
        assert self._engine is not None
        self._engine.advance(instruction.generation)
        self._line.advance(instruction.generation)

    def _hang_up(self) -> None:
        for task in self._over_session:
            task.cancel()
        self._line.hang_up()

    async def _go_back(self, instruction: GoBack) -> None:
        """Joins again, with what is held; ends the peer when that took too long."""
        given_up = await self._line.go_back(
            instruction, partial(self._joining, instruction), lambda: self._feed(LongAlone()), self._snapshots.where
        )
        if given_up is not None:
            self._finish(Outcome(exit_code=ExitCode.FAILED, reason=given_up))
        else:
            await self._watch_joining()

    def _finish(self, outcome: Outcome) -> None:
        assert self._outcome is not None
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    async def _connect(self, instruction: Connect) -> None:
        assert self._engine is not None
        generation = instruction.assignment.generation
        try:
            await self._engine.connect(instruction.assignment, instruction.boundaries)
            self._feed(LinksReady(generation=generation))
        except AtollError as error:
            self._feed(ShellFault(generation=generation, fault=fault_of(error, doing="connecting to neighbours")))

    async def _watch_joining(self) -> None:
        """Gives the connection up when the coordinator does not answer Join on it; the next time it has longer, for it may be
        busy with a large model."""
        seconds, connection = self._answer_seconds, self._line.connection
        self._answer_seconds = min(2.0 * seconds, LONGEST_ANSWER_SECONDS)
        await asyncio.sleep(seconds)
        unanswered = self._session.state in (SessionState.JOINING, SessionState.AWAY)
        if unanswered and self._line.connection is connection is not None:
            address = self._line.address
            self._on_connection_lost(f"the coordinator at {address} did not answer within {seconds:g} s: is it overloaded?")

    def _spawn(self, work: Coroutine[Any, Any, None], group: set[asyncio.Task[None]]) -> None:
        """Runs ``work`` as a task; an error that it lets through is a bug and ends this peer."""
        task = asyncio.create_task(work)
        group.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            group.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                _log.error("this is a bug in atoll-peer", exc_info=error)
                self._finish(Outcome(exit_code=ExitCode.FAILED, reason=f"a bug in atoll-peer: {error!r}"))

        task.add_done_callback(ended)


def _log_measured(measured: Measured) -> None:
    if measured.seconds is None:
        _log.warning("a kind of segment was not measured: %s", measured.failure)
        return
    seconds, where = measured.seconds, "known from before" if measured.cached else "measured"
    later = seconds.backward + seconds.accumulate
    _log.info("a kind of segment takes %.2f ms forward, %.2f ms back (%s)", 1e3 * seconds.forward, 1e3 * later, where)


def _log_stage(instruction: Connect) -> None:
    graph = instruction.assignment.graph
    modules = [node.module for node in graph.nodes if node.module] or ["the model"]
    last = graph.num_stages - 1
    _log.info("stage %d (of stages 0 to %d): %s to %s", graph.stage, last, modules[0], modules[-1])
