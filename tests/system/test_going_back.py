"""A peer of the middle that is killed with all it holds: the run goes back to a snapshot, and ends as if nothing was."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from atoll.coordinator.run.journal import JOURNAL, Journal
from atoll.coordinator.run_files import CACHE, WEIGHTS
from atoll.protocol.folders import paths_in
from support.swarm import LocalSwarm, run_command, started_swarm, write_job
from support.waiting import assert_eventually

pytestmark = [pytest.mark.system, pytest.mark.release]

STEPS, SNAPSHOT_EVERY = 60, 20
LAST_SNAPSHOT = 40


def job_of(folder: Path) -> Path:
    """Three stages and a spare, AdamW with a warm-up, gradients that are clipped."""
    training = {
        "steps": STEPS,
        "batch": 4,
        "microbatch": 2,
        "evaluate_every": 24,
        "optimizer": {"name": "adamw", "learning_rate": 1e-2, "weight_decay": 0.1},
        "schedule": {"warmup": 6, "decay": "cosine", "final": 0.1},
        "clip_norm": 0.5,
    }
    return write_job(
        folder,
        training=training,
        plan={"stages": 3},
        network={"compression": "raw"},
        durability={"snapshot_every": SNAPSHOT_EVERY, "copies": 1},
    )


async def until_safe(swarm: LocalSwarm) -> None:
    """Wait until a snapshot has its copies on other peers' disks."""
    journal = Journal(swarm.state / JOURNAL)
    try:
        await assert_eventually(lambda: any(row.safe for row in journal.snapshots()), within_seconds=60.0)
    finally:
        journal.close()


def optimizer_state(swarm: LocalSwarm, folder: Path) -> dict[str, torch.Tensor]:
    """All that the last snapshot has on the disks, weights and moments; ``folder`` keeps it beyond the run."""
    folder.mkdir()
    for part in paths_in(swarm.state / CACHE, f"*/snapshots/*/{LAST_SNAPSHOT}/*.safetensors"):
        shutil.copy(part, folder)
    found: dict[str, torch.Tensor] = {}
    for part in sorted(folder.glob("*.safetensors")):
        found.update(load_file(part))
    return found


def told(swarm: LocalSwarm, kind: str) -> list[dict[str, Any]]:
    return [event for event in swarm.events if event["event"] == kind]


def kill(swarm: LocalSwarm, name: str) -> None:
    (process,) = [process for process in swarm.processes() if name in process.cmdline() and "join" in process.cmdline()]
    assert isinstance(process, psutil.Process)
    process.kill()


@pytest.mark.timeout(400)
async def test_a_killed_middle_stage_leaves_no_trace_in_weights_moments_and_losses(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    async with started_swarm(job, "--peers", "4", state=tmp_path / "calm") as calm:
        await calm.event("snapshot", step=LAST_SNAPSHOT, failure="")
        expected = optimizer_state(calm, tmp_path / "expected")
        assert await calm.ended() == 0
    async with started_swarm(job, "--peers", "4", state=tmp_path / "struck") as struck:
        await struck.event("snapshot", step=SNAPSHOT_EVERY, failure="")
        await until_safe(struck)
        await struck.event("step", step=SNAPSHOT_EVERY + 1)
        (victim,) = (await struck.event("plan"))["stages"][1]["peers"]
        kill(struck, victim)
        recovered = await struck.event("recovered")
        await struck.event("snapshot", step=LAST_SNAPSHOT, failure="")
        found = optimizer_state(struck, tmp_path / "found")
        assert await struck.ended() == 0
        listed = await run_command("snapshots", "--state", struck.state)
    assert (listed.status, listed.output) == (0, "no snapshot is kept\n"), "a finished run needs none"
    (restored,) = told(struck, "restored")
    assert restored["step"] in (SNAPSHOT_EVERY, LAST_SNAPSHOT)
    assert victim in restored["reason"]
    replayed = told(struck, "replayed")
    assert [event["step"] for event in replayed] == list(range(restored["step"] + 1, restored["from_step"] + 1))
    assert all(event["equal"] for event in replayed)
    assert recovered["replayed_steps"] == len(replayed)
    losses = [[(event["step"], event["loss"], event["samples"]) for event in told(one, "step")] for one in (calm, struck)]
    assert losses[0] == losses[1]
    assert [step for step, _, _ in losses[1]] == list(range(1, STEPS + 1))
    evaluations = [[(event["step"], event["loss"]) for event in told(one, "evaluation")] for one in (calm, struck)]
    assert evaluations[0] == evaluations[1]
    assert found.keys() == expected.keys()
    assert any("exp_avg" in name for name in found)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    weights = [load_file(one.state / WEIGHTS) for one in (calm, struck)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
