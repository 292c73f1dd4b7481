"""`atoll swarm` more than once on the same folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.churn import kill, written
from support.swarm import run_command, started_swarm, write_job

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

STEPS = 5


async def test_a_swarm_on_a_folder_takes_up_what_was_not_finished_and_refuses_what_was(tmp_path: Path) -> None:
    job = write_job(tmp_path, training={"steps": STEPS, "evaluate_every": None}, network={"compression": "raw"})
    folder = tmp_path / "first"
    plan = written(folder, [kill("waiting for commit", peer="coordinator", step=3, after=None)])
    state, words = folder / "state", ("--peers", "2", "--set", "plan.stages=2")
    async with started_swarm(job, *words, "--chaos", plan, state=state) as swarm:
        assert await swarm.ended(within_seconds=150.0) == 1
        done = [event["step"] for event in swarm.events if event["event"] == "step"]
    other = await run_command("swarm", job, *words, "--state", state, "--set", "training.steps=9")
    assert other.status == 2
    assert "training.steps was 5 and is 9" in other.errors
    async with started_swarm(job, *words, state=state) as swarm:
        assert await swarm.ended(within_seconds=150.0) == 0
        rest = [event["step"] for event in swarm.events if event["event"] == "step"]
    assert sorted({*done, *rest}) == list(range(1, STEPS + 1))
    again = await run_command("swarm", job, *words, "--state", state)
    assert again.status == 2
    assert "holds a finished run" in again.errors
