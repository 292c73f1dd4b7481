"""How a peer comes and goes: every way to fail is one sentence, every way to end takes a moment."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from atoll.peer.daemon import Peer
from atoll.peer.session.values import ExitCode, Outcome
from atoll.peer.settings import Patience, PeerSettings
from atoll.protocol.channel import parse_address
from atoll.protocol.v1 import session_pb2 as pb
from support.hand_models import transformer
from support.hand_run import HandRun, RunSettings, samples_of, swarm
from support.scripted_coordinator import ScriptedCoordinator
from support.waiting import assert_eventually

BASE = PeerSettings(coordinator=parse_address("127.0.0.1:1"), name="ann", threads=1, patience=Patience(end=2.0), insecure=True)


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    """A port on which somebody listens who never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


async def outcome_of(settings: PeerSettings) -> Outcome:
    return await asyncio.wait_for(Peer(settings).run(), 20)


async def test_a_peer_tells_what_it_is() -> None:
    async with swarm("ann", memory_bytes=2**33) as peers:
        (seat,) = await peers.seats()
        join = seat.join
        assert (join.name, join.device) == ("ann", "cpu")
        assert 0 < join.memory_bytes < 2**33
        assert join.flops_per_second > 1e6
        assert join.threads >= 1
        assert parse_address(join.address).is_loopback


async def test_an_unreachable_coordinator() -> None:
    outcome = await outcome_of(BASE)
    assert outcome.exit_code == ExitCode.FAILED
    assert "no coordinator answers at 127.0.0.1:1" in outcome.reason
    assert "--listen" in outcome.reason


async def test_a_peer_waits_for_a_coordinator_that_comes_later_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    gone, coordinator = ScriptedCoordinator(), ScriptedCoordinator()
    address = await gone.start()
    await gone.stop()
    peer = Peer(replace(BASE, coordinator=parse_address(address), patience=Patience(longest_pause=0.5)))
    running = asyncio.create_task(peer.run())
    await assert_eventually(
        lambda: f"waiting for the coordinator at {address}, up to 1800 s" in caplog.text, within_seconds=60.0
    )
    assert await coordinator.start(address) == address
    await coordinator.seated("ann", within_seconds=60.0)
    peer.leave("the test is over")
    assert (await running).exit_code == ExitCode.FINISHED
    await coordinator.stop()
    assert "back in the run" not in caplog.text, "it was in none before"


async def test_a_coordinator_that_is_busy_at_first_is_given_longer() -> None:
    coordinator = ScriptedCoordinator(num_unanswered=2)
    address = await coordinator.start()
    peer = Peer(replace(BASE, coordinator=parse_address(address), answer_seconds=0.3, patience=Patience()))
    running = asyncio.create_task(peer.run())
    await coordinator.seated("ann", within_seconds=60.0)
    peer.leave("the test is over")
    assert (await running).exit_code == ExitCode.FINISHED
    await coordinator.stop()


async def test_something_else_listens_there() -> None:
    with taken_port() as port:
        outcome = await outcome_of(replace(BASE, coordinator=parse_address(f"127.0.0.1:{port}")))
    assert outcome.exit_code == ExitCode.FAILED
    assert f"127.0.0.1:{port}" in outcome.reason


async def test_the_peer_of_another_run_is_no_coordinator() -> None:
    async with swarm("bob") as peers:
        (bob,) = await peers.seats()
        outcome = await outcome_of(replace(BASE, coordinator=parse_address(bob.join.address)))
    assert outcome.exit_code == ExitCode.FAILED
    assert "is no Atoll coordinator" in outcome.reason


async def test_a_port_in_use() -> None:
    with taken_port() as port:
        outcome = await outcome_of(replace(BASE, listen=f"127.0.0.1:{port}"))
    assert outcome.exit_code == ExitCode.FAILED
    assert f"port {port} is in use" in outcome.reason
    assert "--listen" in outcome.reason


async def test_a_refusal_is_passed_on() -> None:
    coordinator = ScriptedCoordinator(refusal="this coordinator speaks protocol 9, the peer 1: install the same version")
    address = await coordinator.start()
    outcome = await outcome_of(replace(BASE, coordinator=parse_address(address)))
    await coordinator.stop()
    assert outcome.exit_code == ExitCode.FAILED
    assert "install the same version" in outcome.reason


@pytest.mark.parametrize("before_joining", [True, False])
async def test_leaving_is_quick_and_frees_the_port(before_joining: bool) -> None:
    async with swarm("ann", "bob") as peers:
        seats = [] if before_joining else await peers.seats()
        loop = asyncio.get_running_loop()
        began = loop.time()
        for peer in peers.peers.values():
            peer.leave("interrupted", ExitCode.INTERRUPTED)
        outcomes = await peers.outcomes()
        assert loop.time() - began < 3.0
        assert {outcome.exit_code for outcome in outcomes.values()} == {ExitCode.INTERRUPTED}
        for seat in seats:
            assert (await seat.hears("leave")).reason == "interrupted"
            port = parse_address(seat.join.address).port
            with socket.create_server(("127.0.0.1", port)):
                pass


async def test_leaving_in_the_middle_of_a_step() -> None:
    model = transformer()
    async with swarm("ann", "bob") as peers:
        run = HandRun(peers.coordinator, await peers.seats(), model.graph, RunSettings())
        await run.load(model.cuts[2:3])
        run.start(1, samples_of(model)[0])
        peers.peers["ann"].leave("told to end")
        assert (await peers.running["ann"]).exit_code == ExitCode.FINISHED


async def test_a_failed_run_ends_its_peers_with_the_reason() -> None:
    async with swarm("ann") as peers:
        (seat,) = await peers.seats()
        seat.tell(end=pb.End(finished=False, reason="bob was lost after step 3"))
        outcome = (await peers.outcomes())["ann"]
    assert outcome.exit_code == ExitCode.FAILED
    assert "bob was lost after step 3" in outcome.reason


async def test_a_coordinator_that_breaks_the_protocol_is_told_and_left() -> None:
    async with swarm("ann") as peers:
        (seat,) = await peers.seats()
        seat.tell(commit=pb.Commit(generation=3, step=1))
        fault = await seat.hears("fault")
        assert "broke the protocol" in fault.reason
        assert (await peers.outcomes())["ann"].exit_code == ExitCode.FAILED
