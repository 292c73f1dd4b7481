"""A coordinator's shell and its peers without sockets: does what a machine wants and keeps what the peers would answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from atoll.coordinator.events import Event, StageSummary
from atoll.coordinator.planning.dealing import deal
from atoll.coordinator.planning.plan import Plan, StagePlan
from atoll.coordinator.planning.segments import PeerOffer
from atoll.coordinator.run.events import (
    BatchPrepared,
    GraphReady,
    MicrobatchLoss,
    MoveJudged,
    PeerJoined,
    PeerReady,
    PeerStored,
    PeerVoided,
    PlanMade,
    PlanRefused,
    RunEvent,
    SnapshotCopied,
    SnapshotTaken,
    StageReported,
    Tick,
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
    Instruction,
    KeepSnapshots,
    MakePlan,
    SendBatches,
    SendCommit,
    SendVoid,
    StartStep,
    WriteCommit,
)
from atoll.coordinator.run.invariants import validate
from atoll.coordinator.run.machine import RunMachine
from atoll.coordinator.run.snapshots import THE_STORE, HeldPart
from atoll.coordinator.run.states import RunSettings, RunState
from atoll.protocol.ids import MicrobatchIndex, NodeIndex, PeerId, StageIndex, StepNumber

GB = 10**9
PARAMETERS = ("embedding", "middle", "head")
MICROBATCHES = 2


def make_offer(name: str, memory_bytes: int = GB) -> PeerOffer:
    return PeerOffer(name=PeerId(name), flops_per_second=1e9, memory_bytes=memory_bytes)


def make_plan(peers: Iterable[PeerId], num_stages: int, replicas: int = 1, turns: int = MICROBATCHES) -> Plan:
    """The first peers have a stage each; where there are more, those after them are second replicas, and so on."""
    names = list(peers)
    groups = [tuple(names[stage::num_stages])[:replicas] for stage in range(min(num_stages, len(names)))]
    stages = tuple(
        StagePlan(
            stage=StageIndex(index),
            replicas=group,
            first=NodeIndex(10 * index),
            end=NodeIndex(10 * index + 10),
            in_flight=1,
            recompute=False,
            memory_bytes=1000,
            microbatch_seconds=0.1,
            sent_bytes=8,
            deal=deal([1.0] * len(group), turns),
        )
        for index, group in enumerate(groups)
    )
    spares = tuple(name for name in names if not any(name in group for group in groups))
    return Plan(stages=stages, spares=spares, step_seconds=0.3)


class SimulatedSwarm:
    """``answers`` are the honest answers to what the machine asked, not yet given; tests give them in any order."""

    def __init__(
        self,
        settings: RunSettings,
        *,
        most_stages: int = 2,
        replicas: int = 1,
        turns: int = MICROBATCHES,
        memory_needed: int = 0,
    ) -> None:
        self.now = 0.0
        self.machine = RunMachine(settings, self.now)
        self.answers: list[RunEvent] = []
        self.done: list[Instruction] = []
        self.told: list[Event] = []
        self.commits: list[WriteCommit] = []
        self.replays: list[WriteCommit] = []
        self.live: dict[PeerId, int] = {}
        self.disks: dict[PeerId, dict[StepNumber, frozenset[str]]] = {}
        self.full: set[PeerId] = set()
        self._stages: dict[PeerId, frozenset[str]] = {}
        self.ended: EndRun | None = None
        self.moves_pay = True
        self._most_stages = most_stages
        self._replicas = replicas
        self._turns = turns
        self._memory_needed = memory_needed

    def give(self, event: RunEvent) -> tuple[Instruction, ...]:
        """Hand ``event`` to the machine, check the invariants, carry out what it wants."""
        instructions = self.machine.handle(event, self.now)
        validate(self.machine)
        for instruction in instructions:
            assert self.ended is None, "something is done after the end"
            self._carry_out(instruction)
        self.done += instructions
        return instructions

    def start(self, *names: str) -> None:
        """Trace, join, settle and load: the first step is running afterwards."""
        self.give(GraphReady(trainable=PARAMETERS, changing=frozenset(PARAMETERS)))
        for name in names:
            self.give(PeerJoined(offer=make_offer(name)))
        self.pass_time(self.machine.context.settings.deadlines.settle_seconds)
        self.answer_all(lambda event: isinstance(event, PlanMade | PlanRefused))
        self.answer_all(lambda event: isinstance(event, PeerReady))

    def answer(self, index: int) -> None:
        self.give(self.answers.pop(index))

    def answer_all(self, wanted: object = None, most: int = 1000) -> None:
        """Give answers in order, those that ``wanted`` accepts, until there is none left."""
        for _ in range(most):
            chosen = [index for index, event in enumerate(self.answers) if not callable(wanted) or wanted(event)]
            if not chosen:
                return
            self.answer(chosen[0])
        raise AssertionError(f"there is no end to the answers: {self.answers[:3]}")

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.give(Tick())

    def forget(self, peer: PeerId) -> None:
        """The peer is gone and will not answer; what is on its disk stays there."""
        self.live.pop(peer, None)
        self.answers = [event for event in self.answers if getattr(event, "peer", None) != peer]

    def _carry_out(self, instruction: Instruction) -> None:
        plan = self.machine.context.plan
        match instruction:
            case MakePlan():
                self.answers.append(self._plan(instruction))
            case ConsiderMove():
                self.answers.append(self._judge(instruction))
            case Assign():
                self._check_sources(instruction)
                self.live |= dict.fromkeys(instruction.plan.peers, instruction.committed)
                self._stages = dict(
                    zip(instruction.plan.peers, instruction.plan.spread(names_of(instruction.plan)), strict=True)
                )
                self.answers += [
                    PeerReady(peer=peer, generation=instruction.generation, fetched_bytes=100, fetch_seconds=0.5)
                    for peer in instruction.plan.peers
                ]
            case CheckReplay():
                self.replays.append(instruction.commit)
            case SendBatches():
                self.answers.append(make_batch(instruction))
            case SendCommit():
                self._commit(instruction)
            case CopySnapshot():
                self._copy(instruction)
            case KeepSnapshots():
                self._keep(instruction)
            case StartStep():
                assert plan is not None
                self.answers += [make_report(instruction, peer, plan) for peer in plan.peers]
            case SendVoid():
                generation = instruction.next_generation
                self.answers += [PeerVoided(peer=peer, generation=generation) for peer in instruction.peers]
            case AskStore():
                assert plan is not None
                self.answers += [PeerStored(peer=peer, generation=instruction.generation) for peer in plan.leaders]
            case CloseWeights():
                self.answers.append(WeightsWritten(path="weights.safetensors"))
            case WriteCommit():
                self.commits.append(instruction)
            case Announce():
                self.told.append(instruction.event)
            case EndRun():
                self.ended = instruction

    def _commit(self, instruction: SendCommit) -> None:
        """Each stage goes on from the step before; its snapshot is on the disk once the answer is given."""
        for peer in instruction.peers:
            assert self.live[peer] == instruction.step - 1, f"{peer} is at {self.live[peer]}, not before {instruction.step}"
            self.live[peer] = instruction.step
            if instruction.snapshot:
                names = self._stages[peer]
                self._write(SnapshotTaken(peer=peer, step=instruction.step, names=names, num_bytes=8, stalled_seconds=0.01))

    def _copy(self, instruction: CopySnapshot) -> None:
        copy = instruction.copy
        held = self.disks.get(copy.source, {}).get(instruction.step, frozenset())
        assert held.issuperset(copy.names), f"{copy.source} has not all of {copy.names}"
        names = frozenset(copy.names)
        self._write(SnapshotCopied(peer=copy.target, step=instruction.step, source=copy.source, names=names, num_bytes=8))

    def _write(self, answer: SnapshotTaken | SnapshotCopied) -> None:
        """The peer's disk is full, or it has the part."""
        if answer.peer in self.full:
            answer = replace(answer, names=frozenset(), failure="its disk is full")
        disk = self.disks.setdefault(answer.peer, {})
        disk[answer.step] = disk.get(answer.step, frozenset()) | answer.names
        self.answers.append(answer)

    def _keep(self, instruction: KeepSnapshots) -> None:
        """No snapshot is deleted that is the newest complete or the newest safe one by what the machine was told."""
        snapshots = self.machine.context.snapshots
        assert instruction.steps or self.machine.context.state is RunState.FINISHED
        for newest in (snapshots.newest_complete(), snapshots.newest_safe()) if instruction.steps else ():
            assert newest is None or newest.step in instruction.steps
        for disk in self.disks.values():
            for step in disk.keys() - set(instruction.steps):
                del disk[step]

    def held_by(self, peer: PeerId) -> tuple[HeldPart, ...]:
        """What the peer says of its disk when it joins."""
        disk = self.disks.get(peer, {})
        return tuple(HeldPart(step=step, names=names, num_bytes=8) for step, names in disk.items() if names)

    def _check_sources(self, instruction: Assign) -> None:
        """After a commit each parameter of the plan comes from somebody who is here and was at that step."""
        if instruction.committed == 0:
            assert not instruction.holders
            assert not instruction.on_disks
            return
        for name in PARAMETERS:
            holders = (*instruction.holders.get(name, ()), *instruction.on_disks.get(name, ()))
            assert holders, f"nobody has {name}"
            peers = [holder for holder in holders if holder != THE_STORE]
            for holder in peers:
                assert self.machine.context.roster.is_present(holder)
            for holder in instruction.holders.get(name, ()):
                assert self.live[holder] == instruction.committed, f"{holder} is at {self.live[holder]}"
            for holder in peers[len(instruction.holders.get(name, ())) :]:
                assert name in self.disks[holder][instruction.committed], f"{holder} has no {name} on its disk"

    def _judge(self, instruction: ConsiderMove) -> MoveJudged:
        """The stages change places, where that is wanted and possible."""
        names = [offer.name for offer in instruction.peers if offer.memory_bytes > 0]
        if not self.moves_pay or len(names) < self._most_stages:
            return MoveJudged(since=instruction.since, reason="it does not pay", look=instruction.look)
        rotated = [*names[1:], names[0]] if names == list(instruction.plan.peers) else names
        plan = make_plan(rotated, self._most_stages, self._replicas, self._turns)
        made = PlanMade(generation=instruction.since, plan=plan, summaries=summaries_of(plan), names=names_of(plan))
        return MoveJudged(since=instruction.since, reason="it pays", proposed=made, look=instruction.look)

    def _plan(self, instruction: MakePlan) -> PlanMade | PlanRefused:
        names = tuple(offer.name for offer in instruction.peers)
        if sum(offer.memory_bytes for offer in instruction.peers) < self._memory_needed:
            return PlanRefused(generation=instruction.generation, peers=names, reason="1.0 GiB more memory needed")
        usable = tuple(offer.name for offer in instruction.peers if offer.memory_bytes > 0)
        if not usable:
            return PlanRefused(generation=instruction.generation, peers=names, reason="nobody has memory")
        plan = make_plan(usable, self._most_stages, self._replicas, self._turns)
        summaries = summaries_of(plan)
        return PlanMade(generation=instruction.generation, plan=plan, summaries=summaries, names=names_of(plan))


def share(stage: int, num_stages: int) -> tuple[str, ...]:
    """The parameters of a stage: one each, the last stage what is left."""
    return PARAMETERS[stage:] if stage == num_stages - 1 else PARAMETERS[stage : stage + 1]


def names_of(plan: Plan) -> tuple[frozenset[str], ...]:
    """What each stage holds."""
    return tuple(frozenset(share(stage.stage, len(plan.stages))) for stage in plan.stages)


def summaries_of(plan: Plan) -> tuple[StageSummary, ...]:
    return tuple(
        StageSummary(stage=stage.stage, peers=stage.replicas, first="a", last="b", parameters=1, predicted_memory_bytes=1)
        for stage in plan.stages
    )


def make_batch(instruction: SendBatches) -> BatchPrepared:
    first = instruction.step * 10
    return BatchPrepared(
        step=instruction.step,
        evaluation=instruction.evaluation,
        weights=(1.0, 3.0),
        num_tokens=64,
        samples=f"hash-{instruction.step}",
        sample_ids=((first,), (first + 1,)),
    )


def make_report(start: StartStep, peer: PeerId, plan: Plan) -> StageReported:
    """What the peer reports: the last stage the losses, and each stage the norms of its share of the parameters."""
    stage = plan.stage_of(peer)
    last = stage == len(plan.stages) - 1
    losses = tuple(
        MicrobatchLoss(microbatch=MicrobatchIndex(index), loss=2.0 + index, metrics={"accuracy": 0.5})
        for index in range(MICROBATCHES if last else 0)
        if plan.stages[-1].holder_of(MicrobatchIndex(index)) == peer
    )
    mine = share(stage, len(plan.stages)) if stage is not None else ()
    return StageReported(
        peer=peer,
        generation=start.generation,
        step=start.step,
        evaluation=start.evaluation,
        losses=losses,
        squared_norms=() if start.evaluation else tuple((name, 4.0) for name in mine),
    )
