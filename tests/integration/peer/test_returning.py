"""A coordinator that is gone and begins again: peers come back with what they have, and the numbers are those of an undisturbed
run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atoll.peer.session.values import ExitCode
from atoll.peer.settings import Patience
from atoll.protocol.graph import OpGraph
from atoll.protocol.ids import Generation, StepNumber
from atoll.protocol.v1 import session_pb2 as pb
from support.hand_models import HandModel, transformer
from support.hand_run import HandRun, RunSettings, Swarm, assert_equal, in_one_process, samples_of, send_assignment, swarm
from support.scripted_coordinator import RUN_ID, ScriptedCoordinator, Seat
from support.waiting import assert_eventually

QUICK = Patience(first_pause=0.05, longest_pause=0.2)
LATER = Generation(9)


@contextlib.asynccontextmanager
async def begun_again(peers: Swarm) -> AsyncIterator[ScriptedCoordinator]:
    """Another coordinator where the first one was."""
    await peers.coordinator.stop()
    again = ScriptedCoordinator()
    assert await again.start(peers.coordinator.address) == peers.coordinator.address
    try:
        yield again
    finally:
        for peer in peers.peers.values():
            peer.leave("the test is over")
        await peers.outcomes()
        await again.stop()


def names_of(graph: OpGraph) -> set[str]:
    return {spec.name for spec in graph.parameters} | {spec.name for spec in graph.buffers}


async def load_as_of(run: HandRun, step: int, cuts: tuple[int, ...]) -> None:
    """Has each peer get the stage that it had, from what it holds of ``step``."""
    names = [seat.peer for seat in run.seats]
    for seat in run.seats:
        seat.tell(lend=pb.Lend(generation=run.generation + 1, committed_step=step, borrowers=names))
    run.generation = Generation(run.generation + 1)
    for stage, seat in zip(run.stages, run.seats, strict=True):
        send_assignment(seat, replace(run.assignment(stage), committed_step=StepNumber(step)))
    for seat in run.seats:
        await seat.hears("ready")


async def back(again: ScriptedCoordinator, run: HandRun, model: HandModel) -> HandRun:
    """The same peers under the new coordinator."""
    seats = await again.seated("ann", "bob")
    following = HandRun(again, seats, model.graph, run.settings)
    following.stages, following.generation = run.stages, LATER
    return following


def held_by(seats: Sequence[Seat]) -> list[tuple[int, int, int]]:
    return [(seat.join.held.step, seat.join.held.reported_step, seat.join.held.generation) for seat in seats]


@pytest.mark.parametrize("committed", [True, False])
async def test_a_reported_step_is_committed_or_dropped(committed: bool) -> None:
    model = transformer(tied=True, dropout=0.1)
    steps, cuts = samples_of(model), model.cuts[2:3]
    alone = in_one_process(model, RunSettings())
    async with swarm("ann", "bob", patience=QUICK) as peers:
        run = HandRun(peers.coordinator, await peers.seats(), model.graph, RunSettings())
        await run.load(cuts)
        assert await run.step(1, steps[0], clip_norm=None) == alone.step(1, steps[0], clip_norm=None)
        run.start(2, steps[1])
        await run.reports(2)
        async with begun_again(peers) as again:
            later = await back(again, run, model)
            assert held_by(later.seats) == [(1, 2, 1)] * 2
            assert {name for seat in later.seats for name in seat.join.held.names} == names_of(model.graph)
            step = 1
            if committed:
                later.generation = Generation(1)
                later.commit(2, 1.0, 1e-2)
                alone.step(2, steps[1], clip_norm=None)
                later.generation, step = LATER, 2
            await load_as_of(later, step, cuts)
            assert_equal(await later.state(step), alone.state())
            for number in range(step + 1, 4):
                samples = steps[number - 1]
                assert await later.step(number, samples, clip_norm=None) == alone.step(number, samples, clip_norm=None)
            assert_equal(await later.state(3), alone.state())


async def test_a_step_in_the_middle_is_dropped() -> None:
    model = transformer()
    steps, cuts = samples_of(model), model.cuts[2:3]
    alone = in_one_process(model, RunSettings())
    async with swarm("ann", "bob", patience=QUICK) as peers:
        ann, bob = await peers.seats()
        run = HandRun(peers.coordinator, [ann, bob], model.graph, RunSettings())
        await run.load(cuts)
        assert await run.step(1, steps[0]) == alone.step(1, steps[0])
        await run.evaluate(1, steps[0])  # both have heard of the commit before
        run.send_batches(2, steps[1])
        ann.tell(start=pb.StartStep(generation=1, step=2, num_microbatches=len(steps[1])))  # bob never hears of the step
        async with begun_again(peers) as again:
            later = await back(again, run, model)
            assert held_by(later.seats) == [(1, 0, 1)] * 2
            await load_as_of(later, 1, cuts)
            assert_equal(await later.state(1), alone.state())
            assert await later.step(2, steps[1]) == alone.step(2, steps[1])


async def test_a_peer_whose_lease_was_over_is_refused_and_joins_anew() -> None:
    model = transformer()
    steps = samples_of(model)
    async with swarm("ann", patience=QUICK) as peers:
        (seat,) = await peers.seats()
        run = HandRun(peers.coordinator, [seat], model.graph, RunSettings())
        await run.load()
        await run.step(1, steps[0])
        peers.coordinator.seats.clear()
        seat.tell(rejected=pb.Rejected(reason="nothing was heard from it for 10 s", again=True))
        (anew,) = await peers.seats()
        assert anew is not seat
        assert anew.join.instance == seat.join.instance
        assert held_by([anew]) == [(1, 0, 1)]


async def test_commits_that_waited_for_an_upload_are_part_of_what_is_held() -> None:
    model = transformer()
    steps = samples_of(model)
    async with swarm("ann", patience=QUICK) as peers:
        (seat,) = await peers.seats()
        run = HandRun(peers.coordinator, [seat], model.graph, RunSettings())
        await run.load()
        run.start(1, steps[0])
        await run.reports(1)
        seat.tell(store=pb.Store(generation=1, step=0))
        run.commit(1, 1.0, 1e-2)
        run.start(2, steps[1])
        await run.reports(2)  # the commit is done, or waits for the upload, which is done by then
        async with begun_again(peers) as again:
            (later,) = await again.seated("ann")
            assert held_by([later]) == [(1, 2, 1)]


async def test_a_coordinator_that_stays_away_is_given_up_with_what_to_do() -> None:
    async with swarm("ann", patience=replace(QUICK, end=0.3)) as peers:
        await peers.seats()
        await peers.coordinator.stop()
        outcome = (await peers.outcomes())["ann"]
    assert outcome.exit_code == ExitCode.FAILED
    assert "the connection to the coordinator" in outcome.reason
    assert "start `atoll run` again with the same --state and --listen" in outcome.reason


async def test_what_a_peer_has_goes_to_its_disk_when_it_is_alone_for_long_and_it_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "atoll.peer")
    model = transformer()
    async with swarm("ann", patience=replace(QUICK, keep=0.2, end=30.0), cache=tmp_path) as peers:
        run = HandRun(peers.coordinator, await peers.seats(), model.graph, RunSettings())
        await run.load()
        samples = samples_of(model)[0]
        await run.step(1, samples)
        await run.evaluate(1, samples)  # the commit was heard before
        await peers.coordinator.stop()
        kept = f"the state of step 1 is kept in {tmp_path}"
        await assert_eventually(lambda: kept in caplog.text, what="nothing is on the disk, or nobody hears of it")
        async with begun_again(peers) as again:
            (seat,) = await again.seated("ann")
            (snapshot,) = seat.join.snapshots
            assert (snapshot.run_id, snapshot.step) == (RUN_ID, 1)
            assert set(snapshot.names) == {spec.name for spec in model.graph.parameters}


async def test_a_peer_that_is_away_can_be_told_to_end() -> None:
    async with swarm("ann", patience=QUICK) as peers:
        await peers.seats()
        await peers.coordinator.stop()
        peers.peers["ann"].leave("interrupted", ExitCode.INTERRUPTED)
        outcome = await asyncio.wait_for(peers.running["ann"], 5)
    assert outcome.exit_code == ExitCode.INTERRUPTED


async def test_nothing_of_a_stage_is_held_before_the_first_commit() -> None:
    model = transformer()
    async with swarm("ann", patience=QUICK) as peers:
        run = HandRun(peers.coordinator, await peers.seats(), model.graph, RunSettings())
        await run.load()
        async with begun_again(peers) as again:
            (seat,) = await again.seated("ann")
            assert held_by([seat]) == [(0, 0, 1)]
            seat.tell(release=pb.Release(generation=1))
            anew = HandRun(again, [seat], model.graph, RunSettings())
            anew.generation = LATER
            await anew.load()
            assert all(torch.isfinite(value).all() for value in (await anew.state()).values())
