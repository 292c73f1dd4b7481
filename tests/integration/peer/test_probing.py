"""A peer that is asked to measure links, and what its owner's caps do to the answers."""

from __future__ import annotations

import pytest

from support.hand_run import swarm


async def test_a_peer_measures_its_link_to_another_one() -> None:
    async with swarm("ann", "bob") as peers:
        ann, bob = await peers.seats()
        ann.tell(probe={"number": 5, "peer": "bob", "address": bob.join.address, "limit_seconds": 20.0})
        probed = await ann.hears("probed")
    assert (probed.number, probed.failure) == (5, "")
    assert probed.round_trip_seconds > 0
    assert min(probed.upload_bytes_per_second, probed.download_bytes_per_second) > 1e6


async def test_caps_are_declared_and_are_what_probes_find() -> None:
    async with swarm("ann", "bob", max_upload=1e6, max_download=0.5e6) as peers:
        ann, bob = await peers.seats()
        assert (ann.join.max_upload_bytes_per_second, ann.join.max_download_bytes_per_second) == (1e6, 0.5e6)
        ann.tell(probe={"number": 1, "peer": "bob", "address": bob.join.address, "limit_seconds": 20.0})
        probed = await ann.hears("probed")
    assert probed.upload_bytes_per_second == pytest.approx(0.5e6, rel=0.15)  # what bob may be sent
    assert probed.download_bytes_per_second == pytest.approx(0.5e6, rel=0.15)


async def test_a_peer_always_answers() -> None:
    async with swarm("ann") as peers:
        (ann,) = await peers.seats()
        ann.tell(probe={"number": 2, "peer": "gone", "address": "127.0.0.1:1", "limit_seconds": 5.0})
        probed = await ann.hears("probed")
    assert probed.number == 2
    assert probed.failure.startswith("link to gone: the probe failed after")
    assert probed.round_trip_seconds == 0.0


async def test_a_coordinator_that_serves_no_probes_is_a_failure_too() -> None:
    async with swarm("ann") as peers:
        (ann,) = await peers.seats()
        ann.tell(probe={"number": 3, "limit_seconds": 5.0, "latency_only": True})
        probed = await ann.hears("probed")
    assert probed.number == 3
    assert "UNIMPLEMENTED" in probed.failure
