"""A peer that becomes ten times slower in the middle of a run: layers of it move away, plans do not swing back
and forth, and every step is done once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.swarm import LocalSwarm, started_swarm, write_job

pytestmark = pytest.mark.system

RUN_SECONDS, STOP_SECONDS = 0.01, 0.09
STEPS = 60


def process_of(swarm: LocalSwarm, name: str) -> psutil.Process:
    """The process of one peer."""
    (found,) = [process for process in swarm.processes() if name in process.cmdline() and "join" in process.cmdline()]
    return found


@contextlib.asynccontextmanager
async def slowed_down(process: psutil.Process) -> AsyncIterator[None]:
    """The process stands still nine tenths of the time."""

    async def stop_and_go() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while True:
                process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(STOP_SECONDS)
                process.send_signal(signal.SIGCONT)
                await asyncio.sleep(RUN_SECONDS)

    task = asyncio.create_task(stop_and_go())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


def parameters_of(plan: dict[str, Any], peer: str) -> int:
    """How many parameters a plan gives to a peer."""
    return sum(stage["parameters"] for stage in plan["stages"] if peer in stage["peers"])


@pytest.mark.timeout(300)
async def test_the_layers_of_a_peer_that_became_slow_move_away_and_stay_away(tmp_path: Path) -> None:
    model = {"builtin": "gpt", "options": {"layers": 6, "width": 64, "heads": 2, "context": 32}}
    job = write_job(tmp_path, model=model, training={"steps": STEPS, "batch": 16, "microbatch": 2, "evaluate_every": None})
    async with started_swarm(job, "--peers", "3", state=tmp_path / "state") as swarm:
        await swarm.event("step", step=5)
        first = await swarm.event("plan")
        slow = first["stages"][0]["peers"][0]
        async with slowed_down(process_of(swarm, slow)):
            moved = await swarm.event("moved", within_seconds=110.0)
            assert await swarm.ended(within_seconds=110.0) == 0
    assert f"{slow} computes" in moved["reason"]
    plans = [event for event in swarm.events if event["event"] == "plan"]
    moves = [event for event in swarm.events if event["event"] == "moved"]
    assert len(moves) <= 2
    assert parameters_of(plans[-1], slow) < parameters_of(first, slow)
    assert all(later["step"] - earlier["step"] >= 10 for earlier, later in pairwise(moves))
    assert [event["step"] for event in swarm.events if event["event"] == "step"] == list(range(1, STEPS + 1))
