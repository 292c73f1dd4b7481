"""Snapshots of a run with real peers in one process, each with a disk of its own: back to one, and on, as if nothing was."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from atoll.coordinator.events import PlanEvent, ReplayedEvent, RestoredEvent, SnapshotEvent, StepEvent
from atoll.coordinator.run_files import WEIGHTS
from support.coordinated import coordinated, join_with_disks, tiny_job
from support.reference import train_plainly


async def test_with_copies_a_loss_costs_the_steps_since_the_last_safe_snapshot(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, steps=40, plan={"stages": 2}, options={"tied": False})
    async with coordinated(job, tmp_path / "state", peers=0, min_peers=3) as run:
        join_with_disks(run, tmp_path, "a", "b", "c")
        await run.until(lambda: run.coordinator.status().HasField("safe_snapshot"))
        safe = run.coordinator.status().safe_snapshot
        await run.until(lambda: run.told(StepEvent)[-1].step > safe.step)
        run.kill(run.told(PlanEvent)[0].stages[1].peers[0])
        assert (await run.ended()).finished
    assert safe.bytes > 0
    (restored,) = run.told(RestoredEvent)
    assert 0 < restored.step <= restored.from_step
    assert [event.step for event in run.told(ReplayedEvent)] == list(range(restored.step + 1, restored.from_step + 1))
    assert all(event.equal for event in run.told(ReplayedEvent))
    plain = train_plainly(job, tmp_path / "cache")
    assert [event.loss for event in run.told(StepEvent)] == list(plain.losses)
    weights = load_file(tmp_path / "state" / WEIGHTS)
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.state.items())


async def test_peers_that_keep_nothing_say_so_and_the_run_goes_on(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, steps=8, plan={"stages": 2})
    async with coordinated(job, tmp_path / "state") as run:
        assert (await run.ended()).finished
    (first, *_) = run.told(SnapshotEvent)
    assert first.step == 2
    assert "could not take its part" in first.failure
    assert not run.told(RestoredEvent)
