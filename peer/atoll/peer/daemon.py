"""A peer: carries out what its session decides, and owns every task, thread and socket of it."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine
from functools import partial
from typing import Any

from atoll.compression.registry import decode_message
from atoll.peer.borrowing import borrow_state
from atoll.peer.connection import Received
from atoll.peer.engine import Engine
from atoll.peer.events import Arrived, Command, Faulted, Measure, Measured, Notice, SnapshotWritten
from atoll.peer.faults import fault_of
from atoll.peer.handling import handling_seconds
from atoll.peer.lending import Lending
from atoll.peer.line import Line
from atoll.peer.memory_use import MemoryUse
from atoll.peer.notice import watch_for_notice
from atoll.peer.probing import answer_probe
from atoll.peer.profile import Profile, measure
from atoll.peer.session import Session, SessionState
from atoll.peer.session_values import (
    Advance,
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
    SessionEvent,
    ShellFault,
    StateFetched,
    StopLending,
    Tell,
    Upload,
    Uploaded,
    UploadFailed,
    UseCodecs,
    Warn,
)
from atoll.peer.settings import PeerSettings, software_version
from atoll.peer.snapshots import Snapshots, held_message
from atoll.peer.transfer import fetch_state, store_state
from atoll.protocol.channel import PROTOCOL_VERSION
from atoll.protocol.errors import AtollError, LinkError, SessionError
from atoll.protocol.ids import Generation, MicrobatchIndex, PeerId
from atoll.protocol.messages import EncodedMessage, Kind, MessageKey
from atoll.protocol.pacing import Pacer
from atoll.protocol.state import state_judge
from atoll.protocol.v1 import session_pb2

CLOSING_SECONDS = 1.0  # within which all peers of a run that ends hear of it
JOIN_AGAIN_SECONDS = 0.5
PROGRESS_SECONDS = 2.0  # the coordinator's lease is several times this

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
        self._line = Line(settings, self._on_coordinator, self._on_connection_lost, self._pacers)
        self._introduction: session_pb2.Join | None = None
        self._join_by = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loading: set[asyncio.Task[None]] = set()
        self._errands: set[asyncio.Task[None]] = set()
        self._outcome: asyncio.Future[Outcome] | None = None
        self._leaving: LeaveRequested | None = None
        self._fetched_bytes = 0
        self._fetching_from: tuple[PeerId, ...] = ()

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
        engine = self._engine = Engine(settings, profile, self._on_notice, self._on_link_fault, self._pacers)
        await engine.snapshots.open()
        bound = await engine.start(settings.listen_address, settings.threads)
        handling = 0.0 if settings.flops_per_second is not None else await handling_seconds()
        self._join_by = time.monotonic() + settings.connect_seconds
        self._introduction = self._join(profile, handling, settings.advertised_address(bound))
        _log.info("joining the coordinator at %s as %s", settings.coordinator, self._own)
        await self._line.open(await self._joining(), settings.connect_seconds)
        self._spawn(self._watch_joining(), self._tasks)
        if settings.notice_url is not None:
            self._spawn(watch_for_notice(settings.notice_url, self.leave_in_order), self._tasks)

    async def _close(self, start: asyncio.Task[None]) -> None:
        if self._engine is not None:
            self._engine.stop_computing()
        tasks = {start, *self._tasks, *self._loading, *self._errands}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._line.close()
        if self._engine is not None:
            await self._engine.close()

    async def _joining(self, back: GoBack | None = None) -> session_pb2.Join:
        """What to say at joining now, and with what this peer comes ``back``."""
        assert self._introduction is not None
        join = session_pb2.Join()
        join.CopyFrom(self._introduction)
        join.snapshots.extend(held_message(snapshot) for snapshot in await self._snapshots.held())
        if back is not None:
            join.held.CopyFrom(
                session_pb2.HeldState(
                    run_id=back.run_id,
                    step=back.held.step,
                    generation=back.generation,
                    reported_step=back.held.reported_step,
                    names=back.held.names,
                )
            )
        return join

    def _join(self, profile: Profile, handling: float, address: str) -> session_pb2.Join:
        return session_pb2.Join(
            protocol_version=PROTOCOL_VERSION,
            version=software_version(),
            name=self._own,
            instance=uuid.uuid4().hex,
            address=address,
            device=profile.device,
            threads=profile.threads,
            memory_bytes=profile.memory_bytes,
            flops_per_second=profile.flops_per_second,
            handling_seconds=handling,
            machine=profile.machine,
            cores=profile.cores,
            disk_bytes=profile.disk_bytes,
            max_upload_bytes_per_second=self._settings.max_upload or 0.0,
            max_download_bytes_per_second=self._settings.max_download or 0.0,
            codecs=[
                session_pb2.CodecSpeed(
                    codec=name,
                    encode_bytes_per_second=speed.encode_bytes_per_second,
                    decode_bytes_per_second=speed.decode_bytes_per_second,
                    ratio=speed.ratio,
                )
                for name, speed in profile.codecs.items()
            ],
        )

    def _on_coordinator(self, received: Received) -> None:
        if not isinstance(received, EncodedMessage):
            before = self._session.state
            self._feed(received)
            if self._session.state is SessionState.IDLE and before in (SessionState.JOINING, SessionState.AWAY):
                self._line.welcomed()
                self._enter_run(self._session.run_id)
                if before is SessionState.JOINING:
                    _log.info("%s joined the run %s", self._own, self._session.run)
                    self._spawn(self._report_progress(), self._tasks)
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
        if self._session.state is SessionState.JOINING and time.monotonic() < self._join_by:
            self._line.hang_up()
            self._spawn(self._join_again(reason), self._tasks)
        else:
            self._feed(ConnectionLost(reason=reason))

    async def _join_again(self, reason: str) -> None:
        """The coordinator went away before it answered: it may be back in a moment."""
        await asyncio.sleep(JOIN_AGAIN_SECONDS)
        try:
            await self._line.open(await self._joining(), max(JOIN_AGAIN_SECONDS, self._join_by - time.monotonic()))
        except SessionError:
            self._feed(ConnectionLost(reason=reason))
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
                self._spawn(self._fetch(instruction), self._loading)
            case Advance():
                self._advance(instruction)
            case UseCodecs():
                self._use_codecs(instruction)
            case Disconnect():
                self._disconnect()
            case LendOut():
                self._lending.lend(instruction.kept)
            case StopLending():
                self._lending.stop()
            case Upload():
                self._spawn(self._upload(instruction), self._errands)
            case MeasureLink():
                self._spawn(self._probe(instruction.probe), self._errands)
            case CopyOver():
                self._spawn(self._copy(instruction.copy), self._tasks)
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
    def _lending(self) -> Lending:
        assert self._engine is not None
        return self._engine.lending

    @property
    def _snapshots(self) -> Snapshots:
        assert self._engine is not None
        return self._engine.snapshots

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
        for task in self._errands:
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

    async def _fetch(self, instruction: Fetch) -> None:
        assignment, generation = instruction.assignment, instruction.assignment.generation
        judge = state_judge(assignment.graph, assignment.optimizer.name)
        doing, chaos = "fetching state from the coordinator", self._settings.chaos
        try:
            stub, cap = self._line.stub, self._settings.max_download
            given = await fetch_state(stub, self._own, generation, assignment.fetch, judge, max_download=cap)
            doing = "fetching state from other peers"
            began, bytes_before = time.monotonic(), self._fetched_bytes
            self._fetching_from = tuple(donor.peer for donor in assignment.donors)

            def count(num_bytes: int) -> None:
                chaos.reached("transferring", step=assignment.committed_step + 1)
                self._fetched_bytes += num_bytes

            given |= await borrow_state(
                self._own,
                assignment,
                count,
                self._settings.max_download,
                run_id=self._session.run_id,
                own_disk=self._snapshots.stored,
                chaos=chaos,
            )
        except AtollError as error:
            self._feed(ShellFault(generation=generation, fault=fault_of(error, doing=doing)))
            return
        finally:
            self._fetching_from = ()
        num_bytes, seconds = self._fetched_bytes - bytes_before, time.monotonic() - began
        if num_bytes:
            _log.info("fetched %.1f MiB of state from %d peers in %.2f s", num_bytes / 2**20, len(assignment.donors), seconds)
        self._feed(StateFetched(generation=generation, given=given, num_bytes=num_bytes, seconds=seconds))

    async def _upload(self, instruction: Upload) -> None:
        generation, step = instruction.generation, instruction.step
        try:
            key = self._state_key(instruction)
            await store_state(self._line.stub, self._own, key, instruction.items, pacers=self._pacers)
            self._feed(Uploaded(generation=generation, step=step))
        except AtollError as error:
            fault = fault_of(error, doing="storing state at the coordinator")
            self._feed(UploadFailed(generation=generation, step=step, fault=fault))

    async def _copy(self, request: session_pb2.CopySnapshot) -> None:
        copied = await self._snapshots.copy(request)
        if copied.failure:
            _log.warning("the snapshot of step %d is not copied from %s: %s", request.step, request.source, copied.failure)
        self._line.tell(session_pb2.PeerMessage(snapshot_copied=copied))

    async def _probe(self, probe: session_pb2.Probe) -> None:
        self._settings.chaos.reached("probing")
        probed = await answer_probe(
            probe,
            own=self._own,
            coordinator=str(self._settings.coordinator),
            pacers=self._pacers,
            max_download=self._settings.max_download,
        )
        self._line.tell(session_pb2.PeerMessage(probed=probed))

    def _state_key(self, instruction: Upload) -> MessageKey:
        assert self._engine is not None
        stage = self._engine.progress.stage
        assert stage is not None
        return MessageKey(
            generation=instruction.generation,
            step=instruction.step,
            microbatch=MicrobatchIndex(0),
            kind=Kind.STATE,
            source=stage,
            target=stage,
        )

    async def _report_progress(self) -> None:
        assert self._engine is not None
        while True:
            progress = self._engine.progress
            message = session_pb2.Progress(
                generation=progress.generation,
                step=progress.step,
                phase="fetching state" if self._fetching_from else progress.phase,
                waiting_for=next(iter(self._fetching_from), progress.waiting_for) or "",
                resident_bytes=self._memory.now_bytes(),
                count=progress.count,
                fetched_bytes=self._fetched_bytes,
            )
            self._line.tell(session_pb2.PeerMessage(progress=message))
            await asyncio.sleep(PROGRESS_SECONDS)

    async def _watch_joining(self) -> None:
        """Gives the connection up when the coordinator does not answer Join on it."""
        seconds, connection = self._settings.connect_seconds, self._line.connection
        await asyncio.sleep(seconds)
        unanswered = self._session.state in (SessionState.JOINING, SessionState.AWAY)
        if unanswered and self._line.connection is connection is not None:
            address = self._settings.coordinator
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
