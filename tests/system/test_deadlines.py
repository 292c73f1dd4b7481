"""No state lasts for ever: peers that end in the middle of a step, or stand still while they load, are gone around, and the
status says meanwhile whom the run waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.cli.status import ask_status
from atoll.protocol.errors import AtollError
from support.churn import kill, run_swarm, written
from support.outcomes import outcome_of
from support.swarm import started_swarm, write_job

pytestmark = [pytest.mark.system, pytest.mark.release, pytest.mark.timeout(500)]

WORDS = ("--peers", "4", "--set", "plan.stages=2")
STEPS, STRUCK = 60, 40


@asynccontextmanager
async def listening(state: Path) -> AsyncIterator[set[str]]:
    """What the run in ``state`` waits for, as `atoll status` says it, over and over again."""
    told: set[str] = set()

    async def listen() -> None:
        while True:
            with suppress(AtollError):
                told.add((await asyncio.to_thread(ask_status, None, state)).reason)
            await asyncio.sleep(0.1)

    task = asyncio.create_task(listen())
    try:
        yield told
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_peers_that_end_in_a_step_or_while_they_load_or_stand_still_there_hold_nobody_up(tmp_path: Path) -> None:
    """Row 18: one stands still while the first plan is loaded, one is started again in the middle of a step, and one ends for
    good while it loads what follows."""
    training = {"steps": STEPS, "batch": 4, "microbatch": 1, "evaluate_every": None}
    job = write_job(tmp_path, training=training, network={"compression": "raw"}, durability={"snapshot_every": 5, "copies": 1})
    faults: list[dict[str, Any]] = [
        {"fault": "freeze", "stage": 0, "phase": "loading", "seconds": 600},
        kill("backward", stage=1, step=STRUCK, microbatch=1),
        kill("loading", stage=1, step=2, after=None),
    ]
    folder = tmp_path / "disturbed"
    plan = written(folder, faults)
    async with started_swarm(job, *WORDS, "--chaos", plan, state=folder / "state") as swarm:
        frozen = await swarm.event("chaos", fault="freeze", within_seconds=200.0)
        async with listening(swarm.state) as told:
            await swarm.event("peer", name=frozen["process"], state="lost", within_seconds=100.0)
        assert any(f"waits for {frozen['process']}" in reason and "to load" in reason for reason in told), told
        assert (await swarm.event("finished", within_seconds=300.0))["steps"] == STEPS
        phases = [event["phase"] for event in swarm.events if event["event"] == "chaos"]
    assert phases == ["loading", "backward", "loading"], swarm.events
    assert outcome_of(folder / "state") == (await run_swarm(tmp_path / "calm", job, [], *WORDS)).outcome
