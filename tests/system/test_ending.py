"""However a run ends, its processes end with it, within seconds, with the right status."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path

import pytest

from support.marks import release
from support.swarm import local_swarm, run_command, write_job
from support.waiting import assert_eventually

pytestmark = pytest.mark.system

ENDING_SECONDS = 15.0
LONG = {"steps": 100_000, "evaluate_every": None}


def assert_port_free(state: Path) -> None:
    host, port = json.loads((state / "address.json").read_text())["address"].rsplit(":", 1)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, int(port)))


@pytest.mark.parametrize("number", [release(signal.SIGINT), signal.SIGTERM])
async def test_an_interruption_ends_every_process(tmp_path: Path, number: signal.Signals) -> None:
    job = write_job(tmp_path, training=LONG)
    async with local_swarm(job, tmp_path / "state", peers=2) as swarm:
        await swarm.event("step", step=2)
        began = time.monotonic()
        swarm.signal(number)
        assert await swarm.ended() == 130
        assert time.monotonic() - began < ENDING_SECONDS
        assert swarm.left() == []
    assert_port_free(tmp_path / "state")
    assert "Traceback" not in (tmp_path / "swarm.log").read_text()


async def test_an_interruption_before_the_first_step_ends_every_process(tmp_path: Path) -> None:
    async with local_swarm(write_job(tmp_path, training=LONG), tmp_path / "state", peers=2) as swarm:
        await swarm.event("peer")
        swarm.signal(signal.SIGINT)
        assert await swarm.ended(within_seconds=ENDING_SECONDS) == 130
        assert swarm.left() == []


async def test_processes_do_not_outlive_a_swarm_that_is_killed(tmp_path: Path) -> None:
    async with local_swarm(write_job(tmp_path, training=LONG), tmp_path / "state", peers=2) as swarm:
        await swarm.event("step", step=1)
        swarm.signal(signal.SIGKILL)
        await assert_eventually(lambda: swarm.left() == [], within_seconds=2 * ENDING_SECONDS)


async def test_a_run_that_lacks_a_peer_pauses_and_says_so(tmp_path: Path) -> None:
    async with local_swarm(write_job(tmp_path, training=LONG), tmp_path / "state", peers=2) as swarm:
        await swarm.event("step", step=1)
        victim = next(process for process in swarm.processes() if "peer-2" in process.cmdline())
        victim.kill()
        lost = await swarm.event("peer", state="lost")
        paused = await swarm.event("paused")
        swarm.signal(signal.SIGINT)
        assert await swarm.ended(within_seconds=ENDING_SECONDS) == 130
        assert swarm.left() == []
    assert lost["name"] == "peer-2"
    assert "asks for 2 stages, but only 1 peer joined; start 1 more" in paused["reason"]


async def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        ended = await run_command("run", write_job(tmp_path), "--listen", f"127.0.0.1:{port}", "--state", tmp_path / "state")
    assert ended.status == 1
    assert str(port) in ended.errors.splitlines()[-1]
    assert "--listen" in ended.errors.splitlines()[-1]
    assert "Traceback" not in ended.errors


async def test_a_wrong_job_is_bad_usage_at_once(tmp_path: Path) -> None:
    job = write_job(tmp_path, training={"microbatch": 3})
    for command in ("swarm", "run"):
        ended = await run_command(command, job, "--state", tmp_path / "state")
        assert ended.status == 2
        assert "training.microbatch" in ended.errors.splitlines()[-1]
        assert ended.output == ""
    ended = await run_command("swarm", write_job(tmp_path), "--peers", "2", "--set", "plan.stages=3")
    assert ended.status == 2
    assert "--peers" in ended.errors
    assert not (tmp_path / "state").exists()
