"""Replicas train by themselves within a step, and what came of it is averaged: to the bits of plain loops in one process, also
where a replica is lost, and the bytes between replicas fall by the number of inner steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atoll.coordinator.events import EvaluationEvent, FinishedEvent, PlanEvent, StepEvent
from atoll.peer.averaging.averager import Round
from atoll.peer.averaging.over_links import LinksAverager
from atoll.protocol.job import AveragingSection, Job
from support.coordinated import coordinated
from support.jobs import TOKENS, gpt_job, resnet_job
from support.local_reference import train_with_local_steps
from support.outcomes import watched_snapshots
from support.placements import Placement, ScriptedPlacements, placed
from support.reference import Trained

STEPS = 3
A, B, C, D = "peer-0", "peer-1", "peer-2", "peer-3"
LAYOUTS: Mapping[str, Placement] = {
    "one": placed((A, 1)),
    "three": placed(((A, B, C), 1)),
    "two in each of two stages": placed(((A, B), 1), ((C, D), 1)),
}


def local_job(base: Path, local_steps: int = 2, tied: bool = False, **training: Any) -> Job:
    """Steps of ``local_steps`` inner ones of three microbatches."""
    data = {**TOKENS, "validation": 0.05}
    settings = {"steps": STEPS, "batch": 6 * local_steps, "clip_norm": None, "evaluate_every": 3, "data": data, **training}
    job = gpt_job(base, tied=tied, **settings)
    return job.model_copy(update={"averaging": AveragingSection(local_steps=local_steps)})


async def train(
    job: Job, folder: Path, placement: Placement, monkeypatch: pytest.MonkeyPatch, lose: str = ""
) -> tuple[Trained, Sequence[StepEvent], dict[int, dict[str, set[str]]]]:
    """What came of it, how each step went, and the hashes of what peers held after each; ``lose`` is killed after one."""
    ScriptedPlacements(monkeypatch, [placement])
    durability = job.durability.model_copy(update={"snapshot_every": 1, "copies": 0})
    job = job.model_copy(update={"durability": durability})
    names = [name for replicas in placement.peers for name in replicas]
    async with watched_snapshots(folder) as watch, coordinated(job, folder, peers=0, min_peers=len(names)) as run:
        for name in names:
            run.join(name, cache=folder / "cache" / name)
        if lose:
            await run.until_told(StepEvent)
            run.kill(lose)
        outcome = await run.ended()
    assert outcome.finished, outcome.reason
    assert len(run.told(PlanEvent)) == (2 if lose else 1)
    assert [event.step for event in run.told(EvaluationEvent)] == [*range(3, job.training.steps + 1, 3)]
    steps = run.told(StepEvent)
    state = load_file(run.told(FinishedEvent)[0].weights)
    return Trained(losses=tuple(event.loss for event in steps), norms=(), state=state), steps, watch.found


def assert_same_bits(trained: Trained, expected: Trained) -> None:
    assert [name for name, value in trained.state.items() if not torch.equal(value, expected.state[name])] == []
    assert trained.losses == expected.losses


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_local_steps_are_those_of_plain_loops(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, placement = local_job(tmp_path), LAYOUTS[layout]
    expected = train_with_local_steps(job, tmp_path / "plain", [len(placement.peers[0])] * STEPS)
    trained, _, held = await train(job, tmp_path / "run", placement, monkeypatch)
    assert_same_bits(trained, expected)
    assert held, "no snapshot was seen"
    assert [(step, name) for step, tensors in held.items() for name, found in tensors.items() if len(found) > 1] == []


async def test_the_loss_of_a_replica_costs_the_open_step_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inner weights that are lost with it are nobody's: the step begins again from the last outer one, without it."""
    job = local_job(tmp_path, steps=9)
    trained, steps, _ = await train(job, tmp_path / "run", LAYOUTS["three"], monkeypatch, lose=B)
    replicas = [3 if event.generation == steps[0].generation else 2 for event in steps]
    assert {3, 2} == set(replicas)
    assert_same_bits(trained, train_with_local_steps(job, tmp_path / "plain", replicas))


async def test_bytes_between_replicas_fall_by_the_number_of_inner_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At equal samples."""
    brought: list[int] = []
    average = LinksAverager.average

    async def counting(averager: LinksAverager, round: Round, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        brought.append(sum(tensor.numel() * tensor.itemsize for tensor in tensors))
        return await average(averager, round, tensors)

    monkeypatch.setattr(LinksAverager, "average", counting)
    once, thrice = local_job(tmp_path, local_steps=1, steps=9), local_job(tmp_path, local_steps=3)
    await train(once, tmp_path / "once", LAYOUTS["three"], monkeypatch)
    synchronous, brought[:] = sum(brought), []
    await train(thrice, tmp_path / "thrice", LAYOUTS["three"], monkeypatch)
    assert synchronous == 3 * sum(brought) > 0


@pytest.mark.parametrize("kind", ["shared", "buffers"])
async def test_what_would_change_between_stages_or_microbatches_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = local_job(tmp_path, tied=True) if kind == "shared" else resnet_job(tmp_path, 18, batch=8, clip_norm=None)
    job = job.model_copy(update={"averaging": AveragingSection(local_steps=2)})
    names = {"shared": (A, B), "buffers": (A,)}[kind]
    placement = placed(*((name, 1) for name in names))
    ScriptedPlacements(monkeypatch, [placement])
    async with coordinated(job, tmp_path / "run", peers=0, min_peers=len(names)) as run:
        run.join(*names)
        outcome = await run.ended()
    assert not outcome.finished
    assert "averaging.local_steps cannot be had where" in outcome.reason
