"""A swarm in containers: it trains, a peer's container and the coordinator's are killed, and the numbers stay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, ClientTimeout

from atoll.coordinator.events import StepEvent
from atoll.protocol.job import load_job
from support.compose import Compose, command, composed, copied
from support.coordinated import coordinated
from support.swarm import write_job

pytestmark = [pytest.mark.system, pytest.mark.docker, pytest.mark.timeout(1800)]

PAGE_PORT = 18080
STEPS = 2000
"""A tiny model does some fifty a second; the kills must fall into its steps."""
SECONDS = 240.0
POLL_SECONDS = 0.5


async def status_when(wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The run's status, once it is as ``wanted``; the coordinator may be away in the meantime."""
    async with asyncio.timeout(SECONDS), ClientSession(timeout=ClientTimeout(total=10.0)) as session:
        while True:
            try:
                async with session.get(f"http://127.0.0.1:{PAGE_PORT}/api/status") as answer:
                    status: dict[str, Any] = await answer.json()
            except (ClientError, TimeoutError, ConnectionError):
                status = {}
            if status and wanted(status):
                return status
            await asyncio.sleep(POLL_SECONDS)


def step_beyond(step: int) -> Callable[[dict[str, Any]], bool]:
    return lambda status: status["journal_step"] > step


async def container_of(compose: Compose, peer: str) -> str:
    """A peer is called after its host, which is its container, and its process."""
    containers = [*await compose.containers("peer"), *await compose.containers("peer-small")]
    (found,) = [one for one in containers if one.startswith(peer.rpartition("-")[0])]
    return found


async def check_numbers(folder: Path, job: Path, coordinator: str) -> None:
    """Each loss is that of a run in one process, bit for bit."""
    lines = await copied(coordinator, "/state/run/metrics.jsonl", folder)
    found = {line["step"]: line["loss"] for line in lines if line["event"] == "step"}
    async with coordinated(load_job(job), folder / "reference", peers=1) as reference:
        assert (await reference.ended()).finished
        assert found == {event.step: event.loss for event in reference.told(StepEvent)}


async def test_a_swarm_in_containers_survives_kills_and_leaves_nothing(tmp_path: Path) -> None:
    training = {"steps": STEPS, "batch": 8, "microbatch": 1, "evaluate_every": None}
    job = write_job(tmp_path, training=training, plan={"stages": 2}, network={"compression": "raw"})
    variables = {"ATOLL_STEPS": str(STEPS), "ATOLL_PAGE_PORT": str(PAGE_PORT)}
    async with composed(tmp_path, job=job.name, variables=variables) as compose:
        await compose.run("up", "--detach")
        first = await status_when(step_beyond(5))
        victim = next(peer["name"] for peer in first["peers"] if peer["stage"] == 1)
        killed = await container_of(compose, victim)
        await command("docker", "kill", "--signal", "KILL", killed)
        second = await status_when(step_beyond(first["journal_step"] + 5))
        await command("docker", "start", killed)
        (coordinator,) = await compose.containers("coordinator")
        await command("docker", "kill", "--signal", "KILL", coordinator)
        await command("docker", "start", coordinator)
        await status_when(step_beyond(second["journal_step"] + 5))
        assert await command("docker", "wait", coordinator, within_seconds=SECONDS) == "0\n"
        await check_numbers(tmp_path, job, coordinator)
    assert await compose.left() == []
