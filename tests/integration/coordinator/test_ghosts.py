"""Peers that register and then say nothing more: they cost the run their lease, once, and nothing else."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from atoll.coordinator.events import PeerEvent, PlanEvent
from atoll.protocol.v1 import operator_pb2
from support.coordinated import Coordinated, ScriptedPeer, coordinated, tiny_job

LEASE_SECONDS = 4.0
GHOSTS = 10


async def test_ten_ghosts_are_evicted_after_their_lease_and_the_run_finishes_without_them(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, options={"layers": 1}, plan={"stages": 2})
    async with coordinated(job, tmp_path / "state", peers=0, min_peers=2, lease_seconds=LEASE_SECONDS) as run:
        ghosts = [ScriptedPeer(run.address, f"ghost-{number}") for number in range(GHOSTS)]
        try:
            await asyncio.gather(*(ghost.hears("welcome") for ghost in ghosts))
            run.join("peer-0", "peer-1")
            assert (await run.ended()).finished
        finally:
            await asyncio.gather(*(ghost.close() for ghost in ghosts))
    lost = {event.name for event in run.told(PeerEvent) if event.state == "lost"}
    assert lost == {f"ghost-{number}" for number in range(GHOSTS)}
    assert {peer for stage in run.told(PlanEvent)[-1].stages for peer in stage.peers} == {"peer-0", "peer-1"}


async def test_a_name_that_registers_and_vanishes_ten_times_is_one_peer_that_is_gone(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, options={"layers": 1}, plan={"stages": 2})
    async with coordinated(job, tmp_path / "state", peers=0, min_peers=2) as run:
        for round_ in range(GHOSTS):
            ghost = ScriptedPeer(run.address, "ghost")
            await ghost.hears("welcome")
            await ghost.close()
            await run.until(partial(_lost_as_often, run, round_ + 1), "it was never lost")
        assert [peer.name for peer in run.coordinator.status().peers] == ["ghost"]
        run.join("peer-0", "peer-1")
        assert (await run.ended()).finished


def _lost_as_often(run: Coordinated, count: int) -> bool:
    return len([event for event in run.told(PeerEvent) if event.state == "lost"]) == count


async def test_the_operator_removes_a_ghost_at_once(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, options={"layers": 1}, plan={"stages": 2})
    async with coordinated(job, tmp_path / "state", peers=0, min_peers=2) as run, run.operator() as stub:
        ghost = ScriptedPeer(run.address, "ghost")
        try:
            await ghost.hears("welcome")
            assert (await stub.RemovePeer(operator_pb2.RemovePeerRequest(name="ghost"))).was_here
            assert "removed by the operator" in (await ghost.hears("rejected")).reason
            run.join("peer-0", "peer-1")
            assert (await run.ended()).finished
        finally:
            await ghost.close()
