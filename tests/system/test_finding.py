"""A run is found by its name, by real processes: also when its coordinator was killed and came back on another address."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest

from atoll.protocol.hive import hivemind_is_here
from support.command import Command, started
from support.marks import release
from support.swarm import write_job

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hivemind_is_here(), reason="hivemind has no wheel for this platform"),
]

JOB: dict[str, dict[str, Any]] = {
    "model": {"builtin": "gpt", "options": {"layers": 2, "width": 32, "heads": 2, "context": 32}},
    "training": {"steps": 400, "batch": 2, "microbatch": 2, "evaluate_every": 1000},
    "plan": {"stages": 1},
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("secure", [True, release(False)], ids=["with a token", "in plain text"])
async def test_a_peer_finds_a_run_by_its_name_and_finds_it_again(secure: bool, tmp_path: Path) -> None:
    job, state, invitation = write_job(tmp_path, **JOB), tmp_path / "state", tmp_path / "invitation"
    how = ("--invite-to", invitation) if secure else ("--insecure",)
    async with started("atoll.coordinator", "dht") as meeting_place:
        node = (await meeting_place.says("/p2p/")).strip()

        def coordinate() -> contextlib.AbstractAsyncContextManager[Command]:
            words = (
                "--state",
                state,
                "--listen",
                f"127.0.0.1:{free_port()}",
                *how,
                "--dht",
                "--initial-peers",
                node,
                "--json",
            )
            return started("atoll.coordinator", "run", job, "--set", "name=tale", *words)

        async with coordinate() as first:
            await first.says("peers find this run with `atoll-peer join --run tale --initial-peers /ip4/")
            own = ("--token", invitation.read_text().strip()) if secure else ("--insecure",)
            words = ("join", "--run", "tale", "--initial-peers", node, "--name", "ann", "--threads", "1", *own)
            async with started("atoll.peer", *words, "--cache", tmp_path / "cache") as peer:
                await first.event("step")
                first.kill()
                await first.ended()
                async with coordinate() as second:
                    await second.event("finished")
                    assert await second.ended() == 0
                    assert await peer.ended() == 0
