"""Real peers write, rotate, copy and read back snapshots, and a run that goes back to one goes on bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.coordinator.first_values import held_specs
from atoll.coordinator.tracing.slicing import slice_graph
from atoll.peer.state.snapshot_folder import SnapshotFolder
from atoll.protocol.assignment import Donor, OptimizerSettings
from atoll.protocol.ids import Generation, NodeIndex, StepNumber
from atoll.protocol.v1 import session_pb2 as pb
from support.hand_models import HandModel, convolutional, transformer
from support.hand_run import HandRun, RunSettings, assert_equal, in_one_process, samples_of, send_assignment, swarm
from support.pipelines import HandPipeline, Sample
from support.scripted_coordinator import RUN_ID, Seat
from support.waiting import assert_eventually

TWO, FOUR = StepNumber(2), StepNumber(4)
SGD = OptimizerSettings(name="sgd", momentum=0.9)


def commit(run: HandRun, step: int, *, snapshot: bool) -> None:
    words = pb.Commit(generation=run.generation, step=step, clip_factor=1.0, learning_rate=1e-2, snapshot=snapshot)
    for seat in run.seats:
        seat.tell(commit=words)


async def train(run: HandRun, steps: Sequence[Sequence[Sample]], first: int, last: int, snapshots: Sequence[int] = ()) -> None:
    """The steps from ``first`` to ``last``, and snapshots after some."""
    for number in range(first, last + 1):
        run.start(number, steps[number - 1])
        await run.reports(number)
        commit(run, number, snapshot=number in snapshots)


async def taken(run: HandRun) -> list[pb.SnapshotTaken]:
    """What each peer says of its snapshot."""
    return [await seat.hears("snapshot_taken") for seat in run.seats]


def go_back(run: HandRun, seats: Sequence[Seat], cuts: Sequence[int], step: StepNumber, donors: Sequence[Donor]) -> None:
    """The run loads the state of ``step`` again, on these peers and with these cuts."""
    run.generation = Generation(run.generation + 1)
    borrowers = [seat.peer for seat in seats]
    for seat in {id(seat): seat for seat in (*run.seats, *seats)}.values():
        seat.tell(lend=pb.Lend(generation=run.generation, committed_step=step, borrowers=borrowers))
    run.seats = tuple(seats)
    run.stages = slice_graph(run.graph, tuple(NodeIndex(cut) for cut in cuts))
    for stage, seat in zip(run.stages, seats, strict=True):
        held = {spec.name for spec in held_specs(stage)}
        wanted = tuple(replace(donor, names=names) for donor in donors if (names := tuple(n for n in donor.names if n in held)))
        send_assignment(seat, replace(run.assignment(stage), committed_step=step, donors=wanted))


def alone(model: HandModel, settings: RunSettings, steps: Sequence[Sequence[Sample]], count: int) -> HandPipeline:
    found = in_one_process(model, settings)
    for number in range(1, count + 1):
        found.step(number, steps[number - 1], clip_norm=None)
    return found


MODELS = {
    "tied": (transformer(tied=True, dropout=0.1), RunSettings()),
    "bf16": (transformer(), RunSettings(precision="bf16")),
    "batch norm": (convolutional(), RunSettings(optimizer=SGD)),
}


@pytest.mark.parametrize("which", MODELS)
async def test_a_run_that_goes_back_to_a_snapshot_goes_on_bit_for_bit(which: str, tmp_path: Path) -> None:
    model, settings = MODELS[which]
    steps = samples_of(model, num_steps=5)
    async with swarm("ann", "bob", caches=tmp_path) as peers:
        ann, bob = await peers.seats()
        run = HandRun(peers.coordinator, (ann, bob), model.graph, settings)
        await run.load(model.cuts[1:2])
        await train(run, steps, 1, 2, snapshots=[2])
        answers = await taken(run)
        assert [answer.failure for answer in answers] == ["", ""]
        await train(run, steps, 3, 4)
        before = await run.state(4)
        donors = [
            Donor(peer=seat.peer, address=seat.join.address, names=tuple(answer.names))
            for seat, answer in zip((ann, bob), answers, strict=True)
        ]
        go_back(run, (bob, ann), model.cuts[2:3], TWO, donors)  # other stages, another cut
        for seat in run.seats:
            ready = await seat.hears("ready")
            assert (ready.generation, ready.fetched_bytes > 0) == (run.generation, True)
        await train(run, steps, 3, 4)
        assert_equal(await run.state(4), before)
        await train(run, steps, 5, 5)
        assert_equal(await run.state(5), alone(model, settings, steps, 5).state())


async def test_a_peer_reads_its_own_snapshot_without_the_network(tmp_path: Path) -> None:
    model = transformer()
    steps = samples_of(model, num_steps=3)
    async with swarm("ann", caches=tmp_path) as peers:
        (ann,) = await peers.seats()
        run = HandRun(peers.coordinator, (ann,), model.graph, RunSettings())
        await run.load()
        await train(run, steps, 1, 2, snapshots=[2])
        (answer,) = await taken(run)
        await train(run, steps, 3, 3)
        go_back(run, (ann,), (), TWO, [Donor(peer=ann.peer, address="127.0.0.1:1", names=tuple(answer.names))])
        ready = await ann.hears("ready")
        assert ready.fetched_bytes == 0
        await train(run, steps, 3, 3)
        assert_equal(await run.state(3), alone(model, RunSettings(), steps, 3).state())


async def test_a_run_goes_back_to_its_beginning_without_any_snapshot(tmp_path: Path) -> None:
    model = convolutional()
    steps = samples_of(model, num_steps=2)
    async with swarm("ann", "bob") as peers:
        ann, bob = await peers.seats()
        run = HandRun(peers.coordinator, (ann, bob), model.graph, RunSettings())
        await run.load(model.cuts[1:2])
        await train(run, steps, 1, 2)
        go_back(run, (bob, ann), model.cuts[1:2], StepNumber(0), [])
        for seat in run.seats:
            await seat.hears("ready")
        await train(run, steps, 1, 2)
        assert_equal(await run.state(2), alone(model, RunSettings(), steps, 2).state())


async def test_snapshots_at_every_step_are_rotated_and_told_at_the_next_join(tmp_path: Path) -> None:
    model = transformer()
    steps = samples_of(model, num_steps=4)
    async with swarm("ann", caches=tmp_path) as peers:
        (ann,) = await peers.seats()
        assert list(ann.join.snapshots) == []
        run = HandRun(peers.coordinator, (ann,), model.graph, RunSettings())
        await run.load()
        for number in range(1, 5):
            await train(run, steps, number, number, snapshots=[number])
            (answer,) = await taken(run)
            assert (answer.step, answer.failure) == (number, "")
            assert answer.seconds >= answer.stalled_seconds >= 0.0
        ann.tell(keep_snapshots=pb.KeepSnapshots(steps=[2, 4]))
        folder = SnapshotFolder(tmp_path / "ann")
        await assert_eventually(lambda: folder.steps(RUN_ID) == [TWO, FOUR])
    async with swarm("ann", caches=tmp_path) as peers:
        (ann,) = await peers.seats()
        assert [(held.run_id, held.step) for held in ann.join.snapshots] == [(RUN_ID, 2), (RUN_ID, 4)]
        assert sorted(ann.join.snapshots[0].names) == sorted(spec.name for spec in model.graph.parameters)
        assert ann.join.snapshots[0].num_bytes == answer.num_bytes
        ann.tell(end=pb.End(finished=True))
        await peers.outcomes()
        assert folder.steps(RUN_ID) == [], "nobody goes back to a snapshot of a run that finished"


async def test_a_copy_is_as_good_as_what_it_was_made_of(tmp_path: Path) -> None:
    model = convolutional()
    steps = samples_of(model, num_steps=3)
    async with swarm("ann", "bob", caches=tmp_path) as peers:
        ann, bob = await peers.seats()
        run = HandRun(peers.coordinator, (ann,), model.graph, RunSettings())
        await run.load()
        await train(run, steps, 1, 2, snapshots=[2])
        (answer,) = await taken(run)
        request = pb.CopySnapshot(step=2, source="ann", address=ann.join.address, names=answer.names)
        bob.tell(copy_snapshot=request)
        copied = await bob.hears("snapshot_copied")
        assert (copied.step, copied.source, copied.failure) == (2, "ann", "")
        assert sorted(copied.names) == sorted(answer.names)
        assert copied.num_bytes == answer.num_bytes
        bob.tell(copy_snapshot=request)
        again = await bob.hears("snapshot_copied")
        assert (again.failure, again.num_bytes, sorted(again.names)) == ("", 0, sorted(answer.names))
        peers.peers["ann"].leave("the test says so")
        await peers.running["ann"]
        run.seats = ()
        go_back(run, (bob,), (), TWO, [Donor(peer=bob.peer, address=bob.join.address, names=tuple(copied.names))])
        await bob.hears("ready")
        await train(run, steps, 3, 3)
        assert_equal(await run.state(3), alone(model, RunSettings(), steps, 3).state())


@pytest.mark.parametrize("reason", ["no such step", "nobody there"])
async def test_a_copy_that_fails_is_told_and_what_came_is_kept(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.protocol.fetching.PAUSE_SECONDS", 0.01)
    model = transformer()
    async with swarm("ann", "bob", caches=tmp_path) as peers:
        ann, bob = await peers.seats()
        run = HandRun(peers.coordinator, (ann,), model.graph, RunSettings())
        await run.load()
        await train(run, samples_of(model), 1, 2, snapshots=[2])
        (answer,) = await taken(run)
        step, address = (3, ann.join.address) if reason == "no such step" else (2, "127.0.0.1:1")
        few, rest = answer.names[:2], answer.names[2:]
        bob.tell(copy_snapshot=pb.CopySnapshot(step=2, source="ann", address=ann.join.address, names=few))
        assert (await bob.hears("snapshot_copied")).failure == ""
        bob.tell(copy_snapshot=pb.CopySnapshot(step=step, source="ann", address=address, names=rest))
        copied = await bob.hears("snapshot_copied")
        assert "ann" in copied.failure
        assert list(copied.names) == []
        assert sorted(SnapshotFolder(tmp_path / "bob").open(RUN_ID, TWO).names) == sorted(few)


async def test_a_peer_without_a_folder_says_so_and_trains_on() -> None:
    model = transformer()
    steps = samples_of(model)
    async with swarm("ann") as peers:
        (ann,) = await peers.seats()
        run = HandRun(peers.coordinator, (ann,), model.graph, RunSettings())
        await run.load()
        await train(run, steps, 1, 1, snapshots=[1])
        (answer,) = await taken(run)
        assert "--cache" in answer.failure
        ann.tell(copy_snapshot=pb.CopySnapshot(step=1, source="bob", address="127.0.0.1:1", names=["x"]))
        assert "--cache" in (await ann.hears("snapshot_copied")).failure
        await train(run, steps, 2, 3)
        assert_equal(await run.state(3), alone(model, RunSettings(), steps, 3).state())


async def test_a_damaged_snapshot_is_told_to_the_coordinator_and_the_next_donor_gives_it(tmp_path: Path) -> None:
    model = transformer()
    steps = samples_of(model, num_steps=3)
    async with swarm("ann", "bob", caches=tmp_path) as peers:
        ann, bob = await peers.seats()
        run = HandRun(peers.coordinator, (ann,), model.graph, RunSettings())
        await run.load()
        await train(run, steps, 1, 2, snapshots=[2])
        (answer,) = await taken(run)
        bob.tell(copy_snapshot=pb.CopySnapshot(step=2, source="ann", address=ann.join.address, names=answer.names))
        assert (await bob.hears("snapshot_copied")).failure == ""
        (path,) = (tmp_path / "ann").rglob("*.safetensors")
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        path.write_bytes(damaged)
        donors = [Donor(peer=seat.peer, address=seat.join.address, names=tuple(answer.names)) for seat in (ann, bob)]
        run.seats = (ann, bob)
        go_back(run, (ann,), (), TWO, donors)
        told = await ann.hears("snapshot_taken")
        assert told.step == 2
        assert "do not agree with their hash" in told.failure
        await ann.hears("ready")
        await train(run, steps, 3, 3)
        assert_equal(await run.state(3), alone(model, RunSettings(), steps, 3).state())


async def test_who_asks_in_the_name_of_another_run_gets_nothing(tmp_path: Path) -> None:
    model = transformer()
    async with swarm("ann", caches=tmp_path) as peers, swarm("eve", caches=tmp_path, run_id="66" * 16) as others:
        (ann,), (eve,) = await peers.seats(), await others.seats()
        run = HandRun(peers.coordinator, (ann,), model.graph, RunSettings())
        await run.load()
        await train(run, samples_of(model), 1, 1, snapshots=[1])
        (answer,) = await taken(run)
        eve.tell(copy_snapshot=pb.CopySnapshot(step=1, source="ann", address=ann.join.address, names=answer.names))
        assert "ann is in the run" in (await eve.hears("snapshot_copied")).failure
