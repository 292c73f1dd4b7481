"""A run driven by hand: real peers over real gRPC, placed and stepped by the test through a scripted coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from atoll.coordinator.tracing.slicing import slice_graph
from atoll.peer.daemon import Peer
from atoll.peer.session.values import Outcome
from atoll.peer.settings import PeerSettings
from atoll.peer.stage.stage import StageSettings
from atoll.protocol.assignment import Assignment, Neighbour, OptimizerSettings, assignment_to_bytes
from atoll.protocol.channel import parse_address
from atoll.protocol.graph import OpGraph, StageGraph, bind
from atoll.protocol.groups import Group
from atoll.protocol.ids import Generation, MicrobatchIndex, NodeIndex, StageIndex, StepNumber
from atoll.protocol.messages import Kind, Message, MessageKey
from atoll.protocol.v1 import session_pb2
from support.hand_models import HandModel
from support.pipelines import HandPipeline, Sample
from support.scripted_coordinator import RUN_ID, ScriptedCoordinator, Seat


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What every assignment of a run has in common."""

    run_seed: int = 7
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    in_flight: int = 2
    recompute: bool = False
    precision: str = "fp32"
    link_seconds: float = 10.0


class HandRun:
    """Steps of one op graph over the given peers, one stage each."""

    def __init__(self, coordinator: ScriptedCoordinator, seats: Sequence[Seat], graph: OpGraph, settings: RunSettings) -> None:
        self.coordinator = coordinator
        self.seats = tuple(seats)
        self.graph = graph
        self.settings = settings
        self.generation = Generation(0)
        self.stages: tuple[StageGraph, ...] = ()

    async def load(self, cuts: Sequence[int] = (), fetch: tuple[str, ...] = ()) -> None:
        """Assigns the stages and waits until every peer is ready."""
        self.assign(cuts, fetch)
        for seat in self.seats:
            assert (await seat.hears("ready")).generation == self.generation

    def assign(self, cuts: Sequence[int] = (), fetch: tuple[str, ...] = ()) -> None:
        """Sends the assignments of a new generation."""
        self.generation = Generation(self.generation + 1)
        self.stages = slice_graph(self.graph, tuple(NodeIndex(cut) for cut in cuts))
        assert len(self.stages) == len(self.seats)
        for stage, seat in zip(self.stages, self.seats, strict=True):
            held = {parameter.name for parameter in stage.parameters} | {buffer.name for buffer in stage.buffers}
            send_assignment(seat, self.assignment(stage, tuple(name for name in fetch if name in held)))

    def assignment(self, stage: StageGraph, fetch: tuple[str, ...] = ()) -> Assignment:
        """The assignment of one stage, its neighbours dialled by the earlier one."""
        exchanged = {item.source for item in stage.receives} | {item.target for item in stage.sends}
        exchanged |= {other for shared in stage.shared if stage.stage in shared.stages for other in shared.stages}
        neighbours = tuple(
            Neighbour(
                stage=other, peer=self.seats[other].peer, address=self.seats[other].join.address, dial=stage.stage < other
            )
            for other in sorted(exchanged - {stage.stage})
        )
        settings = self.settings
        return Assignment(
            generation=self.generation,
            graph=stage,
            neighbours=neighbours,
            run_seed=settings.run_seed,
            in_flight=settings.in_flight,
            recompute=settings.recompute,
            precision=settings.precision,
            optimizer=settings.optimizer,
            groups=tuple(
                Group(stage=item.stage, replicas=(seat.peer,)) for item, seat in zip(self.stages, self.seats, strict=True)
            ),
            fetch=fetch,
            link_seconds=settings.link_seconds,
        )

    def start(self, step: int, samples: Sequence[Sample], *, evaluation: bool = False) -> None:
        """Sends the batches of a step and starts it."""
        self.send_batches(step, samples, evaluation=evaluation)
        started = session_pb2.StartStep(
            generation=self.generation, step=step, num_microbatches=len(samples), evaluation=evaluation
        )
        for seat in self.seats:
            seat.tell(start=started)

    def send_batches(
        self, step: int, samples: Sequence[Sample], *, evaluation: bool = False, stages: Sequence[StageGraph] | None = None
    ) -> None:
        """Sends every stage, or those in ``stages``, its inputs of each microbatch."""
        total = sum(sample.weight for sample in samples)
        for index, sample in enumerate(samples):
            sizes = bind(self.graph.inputs, {name: tuple(value.shape) for name, value in sample.inputs.items()})
            numbers = {"scale": sample.weight / total, **{f"size:{name}": float(size) for name, size in sizes.items()}}
            for stage in self.stages if stages is None else stages:
                key = MessageKey(
                    generation=self.generation,
                    step=StepNumber(step),
                    microbatch=MicrobatchIndex(index),
                    kind=Kind.BATCH,
                    source=StageIndex(0),
                    target=stage.stage,
                    evaluation=evaluation,
                )
                tensors = tuple((name, sample.inputs[name]) for name, _ in stage.inputs)
                self.seats[stage.stage].submit(Message(key=key, tensors=tensors, numbers=numbers))

    async def reports(self, step: int, *, evaluation: bool = False) -> list[session_pb2.StageReport]:
        """Every stage's report of a step."""
        reports = [await seat.hears("report") for seat in self.seats]
        for report in reports:
            assert (report.generation, report.step, report.evaluation) == (self.generation, step, evaluation)
        return reports

    async def step(
        self, step: int, samples: Sequence[Sample], learning_rate: float = 1e-2, clip_norm: float | None = 1.0
    ) -> tuple[float, float]:
        """One committed step; its loss and the norm of its gradient."""
        self.start(step, samples)
        reports = await self.reports(step)
        norms = {item.parameter: item.value for report in reports for item in report.squared_norms}
        norm = math.sqrt(sum(norms[name] for name in sorted(norms)))
        factor = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
        self.commit(step, factor, learning_rate)
        return loss_of(reports, samples), norm

    def commit(self, step: int, clip_factor: float, learning_rate: float) -> None:
        """Tells every peer that the step happens."""
        words = session_pb2.Commit(generation=self.generation, step=step, clip_factor=clip_factor, learning_rate=learning_rate)
        for seat in self.seats:
            seat.tell(commit=words)

    async def evaluate(self, step: int, samples: Sequence[Sample]) -> float:
        """The loss over ``samples``, nothing changed."""
        self.start(step, samples, evaluation=True)
        return loss_of(await self.reports(step, evaluation=True), samples)

    async def void(self, step: int) -> None:
        """Voids a step everywhere and moves to the next generation."""
        following = Generation(self.generation + 1)
        words = session_pb2.Void(generation=self.generation, step=step, next_generation=following, reason="the test says so")
        for seat in self.seats:
            seat.tell(void=words)
        for seat in self.seats:
            assert (await _hears_voided(seat)).generation == following
        self.generation = following

    async def state(self, step: int = 0) -> dict[str, torch.Tensor]:
        """Weights and buffers of all stages, through StoreState."""
        found: dict[str, torch.Tensor] = {}
        for seat in self.seats:
            seat.stored.clear()
            seat.tell(store=session_pb2.Store(generation=self.generation, step=step))
            await seat.hears("stored")
            found |= seat.stored
        return found

    def end(self, *, finished: bool = True, reason: str = "") -> None:
        """Ends the run for every peer."""
        for seat in self.seats:
            seat.tell(end=session_pb2.End(finished=finished, reason=reason))


async def _hears_voided(seat: Seat) -> session_pb2.Voided:
    """Like ``seat.hears``, past faults that the voided step had."""
    while True:
        with contextlib.suppress(AssertionError):
            voided = await seat.hears("voided")
            assert isinstance(voided, session_pb2.Voided)
            return voided
        assert not seat.gone, f"{seat.peer} left instead of voiding"


def send_assignment(seat: Seat, assignment: Assignment, payload: bytes | None = None) -> None:
    """Sends one assignment, or ``payload`` in its place."""
    data = assignment_to_bytes(assignment) if payload is None else payload
    key = MessageKey(
        generation=assignment.generation,
        step=StepNumber(0),
        microbatch=MicrobatchIndex(0),
        kind=Kind.ASSIGNMENT,
        source=StageIndex(0),
        target=assignment.graph.stage,
    )
    seat.submit(Message(key=key, tensors=(("assignment", torch.frombuffer(bytearray(data), dtype=torch.uint8)),)))


def loss_of(reports: Sequence[session_pb2.StageReport], samples: Sequence[Sample]) -> float:
    """The step's loss out of the microbatches', as the coordinator sums it."""
    losses = {item.microbatch: item.loss for report in reports for item in report.losses}
    total = sum(sample.weight for sample in samples)
    return sum(sample.weight * losses[index] for index, sample in enumerate(samples)) / total


def samples_of(model: HandModel, num_microbatches: int = 3, num_steps: int = 3) -> list[list[Sample]]:
    """The microbatches of each step, of different sizes."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 4, 3)[index % 3] for index in range(num_microbatches)]
    return [[Sample(inputs=model.sample(size, generator), weight=float(size)) for size in sizes] for _ in range(num_steps)]


def in_one_process(model: HandModel, settings: RunSettings) -> HandPipeline:
    """The uncut graph, before its first step."""
    used = StageSettings(
        run_seed=settings.run_seed,
        device=torch.device("cpu"),
        optimizer=settings.optimizer,
        precision=settings.precision,
        recompute=settings.recompute,
    )
    return HandPipeline(slice_graph(model.graph, ()), used)


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Same names, same bits."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@dataclass(slots=True)
class Swarm:
    """Peers that run in this process, and what became of them."""

    coordinator: ScriptedCoordinator
    peers: dict[str, Peer]
    running: dict[str, asyncio.Task[Outcome]]

    async def outcomes(self) -> Mapping[str, Outcome]:
        """How each peer ended; waits for all."""
        await asyncio.wait_for(asyncio.gather(*self.running.values()), 20)
        return {name: task.result() for name, task in self.running.items()}

    async def seats(self) -> list[Seat]:
        return await self.coordinator.seated(*self.peers)


@contextlib.asynccontextmanager
async def swarm(*names: str, caches: Path | None = None, run_id: str = RUN_ID, **changes: Any) -> AsyncIterator[Swarm]:
    """A scripted coordinator and peers of these names, each with a folder of its own in ``caches``; whoever still runs at the
    end leaves."""
    coordinator = ScriptedCoordinator(run_id=run_id)
    base = PeerSettings(coordinator=parse_address(await coordinator.start()), name="", threads=1, insecure=True, **changes)
    peers = {name: Peer(replace(base, name=name, cache=base.cache if caches is None else caches / name)) for name in names}
    found = Swarm(coordinator, peers, {name: asyncio.create_task(peer.run()) for name, peer in peers.items()})
    try:
        yield found
    finally:
        for name, peer in peers.items():
            if not found.running[name].done():
                peer.leave("the test is over")
        await asyncio.gather(*found.running.values(), return_exceptions=True)
        await coordinator.stop()
