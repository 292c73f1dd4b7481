"""Carries out what the state machine wants, in order: speaks to peers, writes the journal, tells the outside. Decides
nothing; plans are asked for at ``proposing``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from atoll.coordinator.assigning import StateSources, encode_assignment, make_assignment, relayed_pairs, share_downloads
from atoll.coordinator.batches import BatchSender, routes
from atoll.coordinator.data.feed import Feed
from atoll.coordinator.events import (
    Event,
    FailedEvent,
    FinishedEvent,
    PredictionEvent,
    ResumedEvent,
    StageSummary,
    StepEvent,
    StoppedEvent,
)
from atoll.coordinator.learning_rates import InnerRates
from atoll.coordinator.measurements import Measurements
from atoll.coordinator.moves import donations, without_store
from atoll.coordinator.offload import Offload
from atoll.coordinator.proposing import Proposing
from atoll.coordinator.reach.relay import Relay
from atoll.coordinator.reach.relay_grants import Pair
from atoll.coordinator.run.events import (
    PeersCompared,
    RunEvent,
    StorePurpose,
    WeightsWritten,
)
from atoll.coordinator.run.instructions import (
    Announce,
    AskStore,
    Assign,
    CheckReplay,
    CloseWeights,
    ConsiderMove,
    CopySnapshot,
    EndRun,
    ExpelPeer,
    FillStore,
    Instruction,
    KeepSnapshots,
    LetGo,
    MakePlan,
    NotePart,
    NoteSnapshot,
    RefuseHandOver,
    ReleaseState,
    SendBatches,
    SendCommit,
    SendVoid,
    StartStep,
    SurveyPeers,
    WriteCommit,
)
from atoll.coordinator.run.replay import compare, difference, is_alarming
from atoll.coordinator.run_files import WEIGHTS
from atoll.coordinator.sessions.sessions import Sessions
from atoll.coordinator.sizing import Sizing
from atoll.coordinator.state_folder import StateFolder
from atoll.coordinator.state_keeper import StateKeeper
from atoll.coordinator.store.vault import Vault
from atoll.coordinator.survey.survey import Surveyor
from atoll.coordinator.traced_model import Proposal, TracedModel
from atoll.protocol.errors import AtollError
from atoll.protocol.ids import Generation, PeerId, StepNumber
from atoll.protocol.messages import EncodedMessage
from atoll.protocol.v1 import session_pb2

_log = logging.getLogger(__name__)

_COPY_SECONDS = 3600.0
"""For which a snapshot may be copied: slowly, beside training, and one after the other."""


class Conductor:
    """``spawn`` runs work in the background; ``post`` takes its results; ``on_event`` is the outside."""

    def __init__(
        self,
        *,
        folder: StateFolder,
        sessions: Sessions,
        state: StateKeeper,
        measurements: Measurements,
        surveyor: Surveyor,
        offload: Offload,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        post: Callable[[RunEvent], None],
        on_event: Callable[[Event], None],
        vault: Vault,
        relay: Relay,
    ) -> None:
        self._relay = relay
        self._vault = vault
        self._folder = folder
        self._sessions = sessions
        self._state = state
        self._measurements = measurements
        self._surveyor = surveyor
        self._offload = offload
        self._spawn = spawn
        self._post = post
        self._on_event = on_event
        self._proposing = Proposing(
            keep_job=folder.keep_job, surveyor=surveyor, offload=offload, begin=self._begin, post=post, tell=self._tell
        )
        self._model: TracedModel | None = None
        self._batches: BatchSender | None = None
        self._proposal: Proposal | None = None
        self._generation = Generation(0)
        self._step = StepNumber(0)
        self._num_microbatches = {False: 0, True: 0}
        self._reserved = Generation(0)
        self.ended: EndRun | None = None

    @property
    def summaries(self) -> tuple[StageSummary, ...]:
        """The stages of the plan in force."""
        return self._proposal.summaries if self._proposal is not None else ()

    def know(self, sizing: Sizing) -> None:
        """The model is traced: plans can be made."""
        self._proposing.sizing = sizing

    async def reserve(self, generation: Generation) -> None:
        """See to it that ``generation`` is nobody's after a restart, before anybody hears of it."""
        if generation > self._reserved:
            self._reserved = await self._offload.run(self._folder.journal.reserve, generation)

    async def tell_of_resumption(self, folder: StateFolder) -> None:
        """That the run goes on, after what was committed and not told before the coordinator was killed."""
        if folder.resumption is None or folder.resumption.last is None:
            return
        for event in folder.untold:
            await self._tell(event)
        last = folder.resumption.last
        await self._tell(ResumedEvent(reason=f"the coordinator takes the run up after step {last.step}"))

    def _begin(self, model: TracedModel, feed: Feed) -> None:
        """From now on batches can be sent."""
        self._model = model
        rates = InnerRates(model.job) if model.job.averaging.local_steps > 1 else None
        self._batches = BatchSender(feed, model.graph, self._sessions, self._offload, self._post, rates)
        self._num_microbatches = {False: model.job.training.num_microbatches, True: len(feed.validation())}
        self._state.know(model.graph, model.first_values)
        self._surveyor.know(model, feed)
        self._spawn(self._batches.run())

    async def carry_out(self, instruction: Instruction) -> None:
        """Do one thing. Raises AtollError when it cannot be done; then what follows it must not be done either."""
        match instruction:
            case MakePlan():
                self._spawn(self._proposing.make_plan(instruction))
            case SurveyPeers():
                self._spawn(self._proposing.survey_peers(self._generation, instruction))
            case ConsiderMove():
                self._spawn(self._proposing.consider_move(self._generation, instruction))
            case Assign():
                await self._assign(instruction)
            case ReleaseState():
                self._release(instruction)
            case SendBatches():
                self._sender.request(instruction)
            case StartStep():
                await self._start_step(instruction)
            case WriteCommit():
                await self._offload.run(self._folder.journal.write_commit, instruction)
                self._measurements.codecs.committed(instruction)
            case CheckReplay():
                await self._check_replay(instruction.commit)
            case NoteSnapshot():
                await self._offload.run(self._folder.journal.write_snapshot, instruction, time.time())
            case NotePart():
                await self._offload.run(self._folder.journal.write_part, instruction.peer, instruction.part)
            case CopySnapshot():
                self._copy_snapshot(instruction)
            case FillStore():
                self._spawn(self._fill_store(instruction))
            case KeepSnapshots():
                await self._keep_snapshots(instruction)
            case SendCommit():
                self._send_commit(instruction)
            case SendVoid():
                self._send_void(instruction)
            case AskStore():
                await self._ask_store(instruction)
            case CloseWeights():
                self._post(WeightsWritten(path=str(await self._state.complete())))
            case ExpelPeer():
                self._sessions.expel(instruction.peer, instruction.reason)
            case LetGo():
                self._sessions.let_go(instruction.peer, instruction.reason, removed=instruction.removed)
            case RefuseHandOver():
                told = session_pb2.CannotHandOver(reason=instruction.reason)
                self._sessions.tell(instruction.peers, session_pb2.CoordinatorMessage(cannot_hand_over=told))
            case Announce():
                await self._announce(instruction.event)
            case EndRun():
                self.ended = instruction

    @property
    def _sender(self) -> BatchSender:
        assert self._batches is not None, "a plan is made of a traced model"
        return self._batches

    @property
    def _holders(self) -> tuple[PeerId, ...]:
        """The peers of the plan, in stage order."""
        assert self._proposal is not None
        return self._proposal.plan.peers

    async def _assign(self, instruction: Assign) -> None:
        assert self._model is not None
        self._proposal, surveyed = self._proposing.take(instruction.plan)
        model, plan, graphs = self._model, instruction.plan, self._proposal.graphs
        members = {member.name: member for member in self._sessions.membership}
        before = {name: member.resident_at_join for name, member in members.items()}
        self._measurements.planned(plan, before, surveyed.factors)
        self._generation = instruction.generation
        self._sessions.advance(instruction.generation)
        self._sender.under(instruction.generation, routes(graphs, plan))
        await self._offload.run(self._folder.journal.write_plan, instruction.generation, plan)
        codecs = self._measurements.codecs
        first = codecs.planned(
            plan,
            graphs,
            surveyed.offers,
            surveyed.network,
            num_microbatches=self._num_microbatches[False],
            next_step=StepNumber(instruction.committed + 1),
        )
        await self._offload.run(self._folder.journal.write_codecs, first)
        self._lend(instruction)
        to_fetch, relayed, assigned = {}, set[Pair](), []
        ways = self._surveyor.ways()
        holders, on_disks = instruction.holders, without_store(instruction.on_disks)
        state = StateSources(
            committed=instruction.committed,
            somewhere=holders.keys() | instruction.on_disks.keys(),
            donations=donations(plan.spread(graphs), plan.peers, holders, on_disks, instruction.broken),
            stored=self._vault.lend(instruction),
        )
        needed = {*plan.peers, *(donor for given in state.donations.values() for donor, _ in given)}
        if not all(peer in ways for peer in needed):
            return  # one of them is gone; the machine is about to hear of it
        caps = {name: member.introduction.max_download_bytes_per_second for name, member in members.items()}
        shares = share_downloads(plan, graphs, caps)
        for peer in plan.peers:
            assignment = make_assignment(
                model.job,
                instruction.generation,
                plan,
                graphs,
                peer,
                ways,
                model.first_values,
                state,
                shares,
                codecs.of(peer),
                surveyed.network,
            )
            to_fetch[peer] = assignment.fetch
            relayed |= relayed_pairs(assignment)
            encoded = await self._offload.run(encode_assignment, assignment)
            assigned.append((peer, encoded))
        self._relay.planned(relayed)
        for peer, encoded in assigned:
            self._spawn(self._send(peer, encoded))
        self._state.allow_fetching(instruction.generation, to_fetch)

    def _lend(self, instruction: Assign) -> None:
        """Whoever holds state of the committed step keeps it, and gives it to the peers of the plan; whoever holds state of
        another step drops it."""
        lend = session_pb2.Lend(
            generation=instruction.generation, committed_step=instruction.committed, borrowers=instruction.plan.peers
        )
        lenders = (*instruction.holders.values(), *instruction.on_disks.values(), instruction.stale)
        keepers = {peer for peers in lenders for peer in peers}
        self._sessions.tell(sorted(keepers), session_pb2.CoordinatorMessage(lend=lend))

    def _release(self, instruction: ReleaseState) -> None:
        release = session_pb2.Release(generation=instruction.generation)
        self._sessions.tell(instruction.peers, session_pb2.CoordinatorMessage(release=release))

    async def _send(self, peer: PeerId, message: EncodedMessage) -> None:
        session = self._sessions.find(peer)
        if session is not None:
            await session.send(message)

    async def _start_step(self, instruction: StartStep) -> None:
        codecs = self._measurements.codecs
        if not instruction.evaluation and (changes := codecs.changes(instruction.step)):
            await self._offload.run(self._folder.journal.write_codecs, changes)
        for peer in self._holders:
            used = codecs.of(peer, raw=instruction.without_codecs)
            start = session_pb2.StartStep(
                generation=instruction.generation,
                step=instruction.step,
                num_microbatches=self._num_microbatches[instruction.evaluation],
                evaluation=instruction.evaluation,
                codecs=[session_pb2.LinkCodec(target=target, codec=codec) for target, codec in used.items()],
            )
            self._sessions.tell([peer], session_pb2.CoordinatorMessage(start=start))

    async def _check_replay(self, again: WriteCommit) -> None:
        journaled = await self._offload.run(self._folder.journal.committed, again.step)
        event = compare(again, journaled)
        if not event.equal:
            alarming = is_alarming(again, journaled, lossless=self._measurements.codecs.lossless)
            _log.log(logging.WARNING if alarming else logging.INFO, "%s", difference(again, journaled))
        self._measurements.codecs.committed(again)
        await self._tell(event)

    def _send_commit(self, instruction: SendCommit) -> None:
        commit = session_pb2.Commit(
            generation=instruction.generation,
            step=instruction.step,
            clip_factor=instruction.clip_factor,
            learning_rate=instruction.learning_rate,
            snapshot=instruction.snapshot,
        )
        self._sessions.tell(instruction.peers, session_pb2.CoordinatorMessage(commit=commit))

    async def _fill_store(self, instruction: FillStore) -> None:
        everybody = [member.name for member in self._sessions.membership]
        await self._vault.fill(instruction, await self._relay.addresses(self._surveyor.ways(), everybody))

    def _copy_snapshot(self, instruction: CopySnapshot) -> None:
        copy = instruction.copy
        ways = self._surveyor.ways()
        if copy.source not in ways:
            return  # it is gone; the machine is about to hear of it
        way = ways.to(copy.target, copy.source)
        order = session_pb2.CopySnapshot(
            step=instruction.step, source=copy.source, address=way.address, names=copy.names, relayed=way.relayed
        )
        if way.relayed:
            self._relay.grants.allow(copy.target, copy.source, time.monotonic() + _COPY_SECONDS)
        self._sessions.permit(copy.source, copy.target, session_pb2.Permit.PERMIT_COPY, _COPY_SECONDS, step=instruction.step)
        self._sessions.tell([copy.target], session_pb2.CoordinatorMessage(copy_snapshot=order))

    async def _keep_snapshots(self, instruction: KeepSnapshots) -> None:
        await self._offload.run(self._folder.journal.keep_snapshots, instruction.steps)
        keep = session_pb2.KeepSnapshots(steps=instruction.steps)
        everybody = [member.name for member in self._sessions.membership]
        self._sessions.tell(everybody, session_pb2.CoordinatorMessage(keep_snapshots=keep))

    def _send_void(self, instruction: SendVoid) -> None:
        self._generation = instruction.next_generation
        self._sender.under(instruction.next_generation)
        self._sessions.advance(instruction.next_generation)
        void = session_pb2.Void(
            generation=instruction.generation,
            step=instruction.step,
            next_generation=instruction.next_generation,
            reason=instruction.reason,
        )
        self._sessions.tell(instruction.peers, session_pb2.CoordinatorMessage(void=void))

    async def _ask_store(self, instruction: AskStore) -> None:
        assert self._proposal is not None
        name = f"weights-step-{instruction.step}.safetensors" if instruction.purpose is StorePurpose.EXPORT else WEIGHTS
        path: Path = self._folder.path / name
        leaders = self._proposal.plan.leaders
        holders = dict(zip(leaders, self._proposal.graphs, strict=True))
        await self._state.open(path, instruction.generation, instruction.step, holders)
        store = session_pb2.Store(generation=instruction.generation, step=instruction.step)
        self._sessions.tell(leaders, session_pb2.CoordinatorMessage(store=store))

    async def _announce(self, event: Event) -> None:
        if isinstance(event, FinishedEvent):
            for last in (*self._measurements.predictions(), *self._measurements.links()):
                await self._tell(last)
        await self._tell(event)
        if isinstance(event, StepEvent):
            self._step = StepNumber(event.step)
            for measured in self._measurements.after_step(event):
                await self._tell(measured)
            slowdown = self._measurements.observed.slowdown
            self._post(PeersCompared(slowdowns={peer: slowdown(peer) for peer in self._holders}))

    async def _tell(self, event: Event) -> None:
        if isinstance(event, PredictionEvent):
            _log.info("%s %s: predicted %g, measured %g", event.what, event.peer, event.predicted, event.measured)
            write = self._folder.journal.write_prediction
            await self._offload.run(write, event.what, event.peer, self._step, event.predicted, event.measured)
        try:
            self._folder.write_event(event)
        except AtollError:
            # That the disk is full must reach the screen, if not the disk.
            if not isinstance(event, StoppedEvent | FailedEvent):
                raise
        self._on_event(event)
