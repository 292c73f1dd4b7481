"""A swarm in containers: it trains, a peer's container and the coordinator's are killed, and the numbers stay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, ClientTimeout

from atoll.coordinator.events import FinishedEvent, StepEvent
from atoll.protocol.job import load_job
from support.compose import Compose, command, composed, copied
from support.coordinated import coordinated
from support.swarm import write_job
from support.waiting import assert_eventually

pytestmark = [pytest.mark.system, pytest.mark.docker, pytest.mark.timeout(1800)]

PAGE_PORT = 18080
STEPS = 1_000_000
"""More than will be done: the run is stopped once it has lived through what it is to live through."""
SECONDS = 240.0
POLL_SECONDS = 0.5
EVENTS = "/state/run/metrics.jsonl"


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


def is_here(container: str) -> Callable[[dict[str, Any]], bool]:
    """Whether a peer from that container is connected: only of those the run knows the address."""
    return lambda status: any(peer["address"] and container.startswith(host_of(peer["name"])) for peer in status["peers"])


def host_of(peer: str) -> str:
    """A peer is called after its host, which is its container, and its process."""
    return peer.rpartition("-")[0]


async def container_of(compose: Compose, peer: str) -> str:
    containers = [*await compose.containers("peer"), *await compose.containers("peer-small")]
    (found,) = [one for one in containers if one.startswith(host_of(peer))]
    return found


async def start(container: str) -> float:
    """Starts it again; the time of day when it ran."""
    await command("docker", "start", container)
    text = await command("docker", "inspect", "--format", "{{.State.StartedAt}}", container)
    return datetime.fromisoformat(text.strip()[:26].rstrip("Z") + "+00:00").timestamp()


def seconds_to_join(container: str, started: float, events: list[dict[str, Any]]) -> float:
    """From the start of a peer's container until the run had it."""
    joined: list[float] = [
        event["time"]
        for event in events
        if event["event"] == "peer" and event["state"] == "joined" and container.startswith(host_of(event["name"]))
    ]
    return next(time for time in joined if time > started) - started


async def check_numbers(folder: Path, job: Path, events: list[dict[str, Any]]) -> None:
    """Each loss is that of a run in one process, bit for bit."""
    found = {line["step"]: line["loss"] for line in events if line["event"] == "step"}
    alone = load_job(job, [f"training.steps={max(found)}", "plan.stages=1"])
    async with coordinated(alone, folder / "reference", peers=1) as reference:
        await assert_eventually(lambda: bool(reference.told(FinishedEvent)), within_seconds=SECONDS)
        assert found == {event.step: event.loss for event in reference.told(StepEvent)}


async def test_a_swarm_in_containers_survives_kills_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = {"steps": STEPS, "batch": 4, "microbatch": 1, "evaluate_every": None}
    job = write_job(tmp_path, training=training, plan={"stages": 2}, network={"compression": "raw"})
    variables = {"ATOLL_STEPS": str(STEPS), "ATOLL_PAGE_PORT": str(PAGE_PORT)}
    async with composed(job, variables) as compose:
        await compose.run("up", "--detach")
        first = await status_when(step_beyond(5))
        victim = next(peer["name"] for peer in first["peers"] if peer["stage"] == 1)
        killed = await container_of(compose, victim)
        await command("docker", "kill", "--signal", "KILL", killed)
        second = await status_when(step_beyond(first["journal_step"] + 5))
        (coordinator,) = await compose.containers("coordinator")
        await command("docker", "kill", "--signal", "KILL", coordinator)
        await command("docker", "start", coordinator)
        await status_when(step_beyond(second["journal_step"] + 5))
        started = await start(killed)
        await status_when(is_here(killed))
        await compose.run("exec", "-T", "coordinator", "atoll", "stop", "--state", "/state/run", "--reason", "enough")
        containers = [coordinator, *await compose.containers("peer"), *await compose.containers("peer-small")]
        ends = await command("docker", "wait", *containers, within_seconds=SECONDS)
        assert ends.split() == ["0"] * len(containers), "what was asked for is no failure: nobody is started again"
        events = await copied(coordinator, EVENTS, tmp_path)
        assert "enough" in events[-1]["reason"]
        joined, size = seconds_to_join(killed, started, events), await compose.image_bytes()
        with capsys.disabled():
            print(f"\nthe image has {size / 1e6:.0f} MB; a peer joined {joined:.1f} s after its container had started")
    assert await compose.left() == []
    await check_numbers(tmp_path, job, events)
