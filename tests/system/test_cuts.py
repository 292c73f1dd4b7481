"""The network between two hosts is cut for half a minute, in the middle of a run: it goes on, around the cut or after it, and
the numbers are those of the undisturbed run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from atoll.coordinator.events import StepEvent
from atoll.protocol.job import load_job
from support.coordinated import coordinated
from support.hosts import Host, HostedRun, cut, hosted_run, hosts_for_test
from support.swarm import write_job
from support.waiting import assert_eventually

pytestmark = [pytest.mark.system, pytest.mark.hosts, pytest.mark.timeout(300)]

CUT_SECONDS = 30.0
RUN_SECONDS = 240.0
STEPS, MANY_STEPS = 150, 500


def job_of(folder: Path, steps: int = STEPS) -> Path:
    """Long enough that a cut falls into it; links are found silent after five seconds."""
    training = {"steps": steps, "batch": 4, "microbatch": 1, "evaluate_every": None}
    network = {"link_seconds": 5.0, "compression": {"forward": "raw", "backward": "raw"}}
    return write_job(folder, training=training, plan={"stages": 2}, network=network)


async def check(run: HostedRun, job: Path, folder: Path, steps: int = STEPS) -> None:
    """The run finishes with the losses of one that nothing disturbs."""
    assert (await run.event("finished", within_seconds=RUN_SECONDS))["steps"] == steps
    assert await run.ended() == 0
    found = [event["loss"] for event in run.events if event["event"] == "step"]
    async with coordinated(load_job(job), folder / "undisturbed", peers=2) as reference:
        assert (await reference.ended()).finished
        assert found == [event.loss for event in reference.told(StepEvent)]


async def stages(run: HostedRun) -> list[str]:
    """The peers of the first plan."""
    await run.event("step", step=5)
    plan = await run.event("plan")
    return [stage["peers"][0] for stage in plan["stages"]]


@asynccontextmanager
async def cut_for_long(one: Host, other: Host) -> AsyncIterator[None]:
    """A cut that lasts its time, whatever the run does meanwhile."""
    loop = asyncio.get_running_loop()
    async with cut(one, other):
        healed = loop.time() + CUT_SECONDS
        yield
        await asyncio.sleep(healed - loop.time())


async def test_a_cut_between_two_peers_is_gone_around_where_there_is_a_third(tmp_path: Path) -> None:
    coordinator, *peers = hosts_for_test(4)
    job = job_of(tmp_path)
    async with hosted_run(job, tmp_path / "state", coordinator, peers) as run:
        one, other = [next(host for host in peers if host.name == name) for name in await stages(run)]
        async with cut_for_long(one, other):
            moved = await run.event("moved", within_seconds=CUT_SECONDS)
            assert f"the link {' - '.join(sorted((one.name, other.name)))} is not counted on for a while" in moved["reason"]
            step = run.events[-1].get("step", moved["step"])
            await run.event("step", step=max(step, moved["step"]) + 2)
        await check(run, job, tmp_path)
    assert not [event for event in run.events if event["event"] == "paused"]


async def test_a_cut_between_the_only_two_peers_is_waited_out(tmp_path: Path) -> None:
    coordinator, *peers = hosts_for_test(3)
    job = job_of(tmp_path)
    async with hosted_run(job, tmp_path / "state", coordinator, peers) as run:
        one, other = [next(host for host in peers if host.name == name) for name in await stages(run)]
        async with cut_for_long(one, other):
            paused = await run.event("paused", within_seconds=CUT_SECONDS)
            assert "no plan does without the link" in paused["reason"]
        assert not [event for event in run.events[run.events.index(paused) :] if event["event"] == "step"]
        await run.event("resumed", within_seconds=RUN_SECONDS)
        await check(run, job, tmp_path)


async def test_a_peer_that_is_cut_off_its_coordinator_is_done_without_and_joins_anew(tmp_path: Path) -> None:
    coordinator, *peers = hosts_for_test(4)
    job = job_of(tmp_path, MANY_STEPS)
    async with hosted_run(job, tmp_path / "state", coordinator, peers) as run:
        names = await stages(run)
        gone = next(host for host in peers if host.name == names[0])

        def joined() -> int:
            return sum(
                event["event"] == "peer" and event["name"] == gone.name and event["state"] == "joined" for event in run.events
            )

        async with cut_for_long(coordinator, gone):
            await run.event("peer", name=gone.name, state="lost", within_seconds=CUT_SECONDS)
            before = max(event["step"] for event in run.events if event["event"] == "step")
            await run.event("step", step=before + 2, within_seconds=RUN_SECONDS)
        assert joined() == 1
        await assert_eventually(lambda: joined() == 2, within_seconds=RUN_SECONDS)
        await check(run, job, tmp_path, MANY_STEPS)
