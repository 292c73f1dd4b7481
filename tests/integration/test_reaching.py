"""Peers that accept no connection: they dial those that do, meet each other at the coordinator, and train to the same bits."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from atoll.coordinator.events import StepEvent
from atoll.coordinator.sessions.membership import Reach
from atoll.protocol.ids import PeerId
from support.coordinated import Coordinated, coordinated, tiny_job


def reaches(run: Coordinated) -> dict[str, str]:
    return {peer.name: peer.reach for peer in run.coordinator.status().peers}


def all_known(run: Coordinated) -> bool:
    found = reaches(run)
    return len(found) == 2 and Reach.UNKNOWN not in found.values()


async def losses(run: Coordinated) -> list[float]:
    assert (await run.ended()).finished
    return [event.loss for event in run.told(StepEvent)]


async def test_peers_that_cannot_be_dialled_train_to_the_same_bits(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, plan={"stages": 2})
    async with coordinated(job, tmp_path / "undisturbed", peers=2) as reference:
        wanted = await losses(reference)
    both = frozenset({PeerId("ann"), PeerId("bob")})
    for outbound_only, relayed in (({"bob"}, set()), (both, {both})):
        async with coordinated(job, tmp_path / f"without-{len(outbound_only)}", peers=0, min_peers=2, insecure=False) as run:
            for name in ("ann", "bob"):
                run.join(name, outbound_only=name in outbound_only, cache=tmp_path / name)
            await run.until(partial(all_known, run), "they were not dialled")
            cannot = {name for name, reach in reaches(run).items() if reach == Reach.OUTBOUND_ONLY}
            assert cannot == set(outbound_only)
            assert await losses(run) == wanted
            assert run.coordinator._relay.grants._planned == relayed
