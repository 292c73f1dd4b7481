"""What real peers need beside what is predicted: each stage of a model on a process of its own, its resident memory watched.

What a plan must have room for is measured, not what happens to be needed on one machine. The last stage gets its batches only
when every earlier one waits for gradients, so each holds as many microbatches as it may; and every earlier one is stopped until
the gradients of all these are there, so it puts off as much as it may.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from atoll.coordinator.planning.segments import state_copies
from atoll.coordinator.tracing.dataflow import Dataflow
from atoll.coordinator.tracing.memory import MemoryModel
from atoll.coordinator.tracing.rehearsal import Rehearsal, rehearse
from atoll.coordinator.tracing.segments import segments_of
from atoll.protocol.assignment import Assignment, OptimizerSettings
from atoll.protocol.graph import OpGraph, StageGraph
from atoll.protocol.v1 import session_pb2
from support.hand_run import HandRun, RunSettings
from support.pipelines import Sample
from support.scripted_coordinator import ScriptedCoordinator, Seat
from support.swarm import environment
from support.waiting import assert_eventually

STEPS = 2
"""The optimizer's state is there from the second step on."""
WORK_SECONDS = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A model cut where ``shares`` of its work are done; stage ``s`` holds ``in_flight[s]`` microbatches."""

    name: str
    graph: Callable[[], OpGraph]
    sample: Callable[[torch.Generator], Mapping[str, Tensor]]
    in_flight: tuple[int, ...]
    optimizer: OptimizerSettings
    precision: str = "fp32"
    recompute: bool = False
    microbatches: int = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Bytes of one stage: predicted, and by how much its process grew at most."""

    trial: str
    stage: int
    in_flight: int
    predicted: int
    grown: int
    before: int

    @property
    def error(self) -> float:
        """How much more was predicted than needed, relative to what was needed."""
        return self.predicted / self.grown - 1.0


async def run_trial(trial: Trial) -> list[Found]:
    """Trains two steps on as many processes as there are stages."""
    graph = trial.graph()
    rehearsal = rehearse(graph, trial.precision)
    cuts = even_cuts(rehearsal, len(trial.in_flight))
    settings = RunSettings(optimizer=trial.optimizer, recompute=trial.recompute, precision=trial.precision, link_seconds=60.0)
    async with peer_processes(len(trial.in_flight)) as (coordinator, seats, numbers):
        run = TrialRun(coordinator, seats, graph, settings)
        run.in_flight, run.processes = trial.in_flight, tuple(numbers)
        before = [reset_peak(number) for number in numbers]
        run.assign(cuts)
        for seat in seats:
            await seat.hears("ready", within_seconds=WORK_SECONDS)
        generator = torch.Generator().manual_seed(0)
        for step in range(1, STEPS + 1):
            await run.slow_step(step, [Sample(inputs=trial.sample(generator)) for _ in range(trial.microbatches)])
        peaks = [peak_bytes(number) for number in numbers]
        run.end()
    predicted = predictions(trial, rehearsal, cuts)
    return [
        Found(
            trial=trial.name,
            stage=stage,
            in_flight=trial.in_flight[stage],
            predicted=predicted[stage],
            grown=peaks[stage] - before[stage],
            before=before[stage],
        )
        for stage in range(len(peaks))
    ]


def even_cuts(rehearsal: Rehearsal, num_stages: int) -> tuple[int, ...]:
    """Narrow cuts that share the parameters about equally."""
    segments = segments_of(rehearsal, copies=1)
    sums = segments.parameter_bytes
    wanted = [sums[-1] * part / num_stages for part in range(1, num_stages)]
    numbers = [min(range(1, len(sums) - 1), key=lambda number: abs(sums[number] - share)) for share in wanted]
    return tuple(segments.positions[number] for number in numbers)


def predictions(trial: Trial, rehearsal: Rehearsal, cuts: Sequence[int]) -> list[int]:
    """What the memory model says of each stage."""
    flow = Dataflow(rehearsal.graph)
    model = MemoryModel(rehearsal, flow, state_copies(trial.optimizer.name, trial.optimizer.momentum))
    bounds = (0, *cuts, len(rehearsal.graph.nodes))
    needs = [model.need(first, end, recompute=trial.recompute) for first, end in pairwise(bounds)]
    return [need.fixed_bytes + held * need.microbatch_bytes for need, held in zip(needs, trial.in_flight, strict=True)]


class TrialRun(HandRun):
    """Steps in which the last stage waits until all others do. ``in_flight`` has a number for each stage."""

    in_flight: tuple[int, ...] = ()
    processes: tuple[int, ...] = ()

    def assignment(self, stage: StageGraph, fetch: tuple[str, ...] = ()) -> Assignment:
        return replace(super().assignment(stage, fetch), in_flight=self.in_flight[stage.stage])

    async def slow_step(self, step: int, samples: Sequence[Sample]) -> None:
        """One committed step."""
        for seat in self.seats:
            seat.tell(start=session_pb2.StartStep(generation=self.generation, step=step, num_microbatches=len(samples)))
        *early, last = self.stages
        self.send_batches(step, samples, stages=early)
        for seat in self.seats[:-1]:
            await _shows(seat, step, "waiting for gradient")
        for process in self.processes[:-1]:
            os.kill(process, signal.SIGSTOP)
        self.send_batches(step, samples, stages=[last])
        for seat, process in zip(self.seats[:0:-1], self.processes[-2::-1], strict=True):
            await _shows(seat, step, "waiting for activation")
            os.kill(process, signal.SIGCONT)
        for seat in self.seats:
            await seat.hears("report", within_seconds=WORK_SECONDS)
        self.commit(step, 0.5, 1e-3)
        for seat in self.seats:
            await _shows(seat, step, "idle")


async def _shows(seat: Seat, step: int, phase: str) -> None:
    """Returns once the peer's progress says so."""

    def shown() -> bool:
        assert not seat.gone, f"{seat.peer} left: {seat.said}"
        return (seat.progress.step, seat.progress.phase) == (step, phase)

    await assert_eventually(shown, within_seconds=WORK_SECONDS, what=f"{seat.peer} is not {phase!r}")


@contextlib.asynccontextmanager
async def peer_processes(count: int) -> AsyncIterator[tuple[ScriptedCoordinator, list[Seat], list[int]]]:
    """A scripted coordinator, peers that have joined it, and the numbers of their processes."""
    coordinator = ScriptedCoordinator()
    address = await coordinator.start()
    names = [f"peer-{number}" for number in range(count)]
    words = ("-m", "atoll.peer", "join", address, "--insecure", "--device", "cpu", "--threads", "1", "--name")
    variables = environment(OMP_NUM_THREADS="1")
    processes = [await asyncio.create_subprocess_exec(sys.executable, *words, name, env=variables) for name in names]
    try:
        yield coordinator, await coordinator.seated(*names, within_seconds=WORK_SECONDS), [process.pid for process in processes]
    finally:
        for process in processes:
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        await asyncio.gather(*(process.wait() for process in processes))
        await coordinator.stop()


def reset_peak(process: int) -> int:
    """Makes the process's peak what is resident now; its bytes."""
    Path(f"/proc/{process}/clear_refs").write_text("5")
    return _status_bytes(process, "VmRSS")


def peak_bytes(process: int) -> int:
    """The most that was resident since :func:`reset_peak`."""
    return _status_bytes(process, "VmHWM")


def _status_bytes(process: int, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
