"""Snapshots outlive peers: a run goes back to one on disks, and another run goes on from one in a store, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atoll.coordinator.events import FinishedEvent, ReplayedEvent, RestoredEvent, SnapshotEvent, StepEvent
from atoll.coordinator.store.origin import find_origin
from atoll.coordinator.store.store import Store, StoredSnapshot
from atoll.protocol.errors import JobError
from atoll.protocol.job import Job
from support.coordinated import Coordinated, coordinated
from support.jobs import gpt_job, resnet_job
from support.marks import release
from support.runs import assert_same

STEPS = 8
MANY_STEPS = 60
"""Enough that a run is in the middle of them when its first snapshot is where it should be."""


def with_snapshots(job: Job, every: int = 2, copies: int = 0, store: Path | None = None) -> Job:
    durability = job.durability.model_copy(
        update={"snapshot_every": every, "copies": copies, "store": None if store is None else str(store)}
    )
    return job.model_copy(update={"durability": durability})


def staged(job: Job, stages: int) -> Job:
    return job.model_copy(update={"plan": job.plan.model_copy(update={"stages": stages})})


def stored_in(store: Path) -> list[StoredSnapshot]:
    return Store(str(store), "test").snapshots()


async def finish(job: Job, state: Path, peers: int, **settings: Any) -> Coordinated:
    """A whole run, each peer with a disk of its own."""
    async with coordinated(staged(job, peers), state, peers=0, min_peers=peers, **settings) as run:
        for number in range(peers):
            run.join(f"peer-{number}", cache=state / f"disk-{number}")
        outcome = await run.ended()
    assert outcome.finished, outcome.reason
    return run


async def test_a_run_goes_back_to_a_snapshot_and_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    job = gpt_job(tmp_path, steps=MANY_STEPS)
    calm = await finish(job, tmp_path / "calm", 2)
    async with coordinated(staged(with_snapshots(job, copies=1), 2), tmp_path / "state", peers=0, min_peers=2) as run:
        for number in range(2):
            run.join(f"peer-{number}", cache=tmp_path / f"disk-{number}")
        await run.until_told(SnapshotEvent, failure="")
        await run.until(lambda: run.coordinator._machine.context.snapshots.newest_safe() is not None)
        run.join("spare", cache=tmp_path / "disk-spare")
        run.kill("peer-1")
        outcome = await run.ended()
    assert outcome.finished, outcome.reason
    assert_same(run, calm)
    assert all(event.equal for event in run.told(ReplayedEvent))
    restored = run.told(RestoredEvent)
    assert restored
    assert all(event.step >= 2 for event in restored), "it went back to a snapshot, not to the beginning"


MODELS = {"adamw, tied, dropout": "gpt", "momentum, batch norm": "resnet"}


def make(which: str, base: Path) -> Job:
    if MODELS[which] == "gpt":
        return gpt_job(base, steps=2 * MANY_STEPS, tied=True, dropout=0.1)
    return resnet_job(base, depth=18, steps=2 * STEPS)


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("peers", [1, release(3)])
async def test_another_run_goes_on_from_a_store_with_any_number_of_peers(which: str, peers: int, tmp_path: Path) -> None:
    job = make(which, tmp_path)
    calm = await finish(job, tmp_path / "calm", 2)
    store = tmp_path / "store"
    async with coordinated(staged(with_snapshots(job, store=store), 2), tmp_path / "first", peers=0, min_peers=2) as first:
        for number in range(2):
            first.join(f"peer-{number}", cache=tmp_path / f"disk-{number}")
        await first.until(lambda: bool(stored_in(store)))
    (snapshot, *_) = stored_in(store)[-1:]
    assert 0 < snapshot.step < job.training.steps
    resumed = await finish(job, tmp_path / "second", peers, resume=str(store))
    steps = {event.step: event for event in calm.told(StepEvent)}
    again = resumed.told(StepEvent)
    assert [event.step for event in again] == list(range(snapshot.step + 1, job.training.steps + 1))
    for event in again:
        wanted = steps[event.step]
        assert (event.loss, event.grad_norm, event.samples) == (wanted.loss, wanted.grad_norm, wanted.samples)
        assert event.learning_rate == wanted.learning_rate
    weights, expected = (load_file(run.told(FinishedEvent)[0].weights) for run in (resumed, calm))
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


async def test_when_all_peers_and_their_disks_are_gone_the_store_gives_the_state(tmp_path: Path) -> None:
    job = gpt_job(tmp_path, steps=MANY_STEPS)
    calm = await finish(job, tmp_path / "calm", 2)
    store = tmp_path / "store"
    async with coordinated(staged(with_snapshots(job, store=store), 2), tmp_path / "state", peers=0, min_peers=2) as run:
        for number in range(2):
            run.join(f"peer-{number}", cache=tmp_path / f"disk-{number}")
        await run.until(lambda: bool(stored_in(store)))
        run.kill("peer-0")
        run.kill("peer-1")
        for number in range(2):
            run.join(f"other-{number}", cache=tmp_path / f"other-{number}")
        outcome = await run.ended()
    assert outcome.finished, outcome.reason
    assert_same(run, calm)
    restored = run.told(RestoredEvent)
    assert restored
    assert all(event.step >= 2 for event in restored), "it went back to a snapshot, not to the beginning"


async def test_what_cannot_be_gone_on_from_is_told(tmp_path: Path) -> None:
    job = gpt_job(tmp_path, steps=2)
    with pytest.raises(JobError, match=r"--resume: there is no complete snapshot in"):
        await finish(job, tmp_path / "nothing", 1, resume=str(tmp_path / "nowhere"))
    await finish(job, tmp_path / "plain", 1)
    store = tmp_path / "store"
    few = with_snapshots(gpt_job(tmp_path, steps=3), every=2, store=store)
    await finish(few, tmp_path / "state", 1)
    assert find_origin(str(tmp_path / "state")).snapshot == stored_in(store)[-1]
    assert stored_in(store)[-1].step == 3, "a finished run's store holds its last step"
    with pytest.raises(JobError, match=r"had no durability.store"):
        await finish(job, tmp_path / "third", 1, resume=str(tmp_path / "plain"))
    other = resnet_job(tmp_path, depth=18, steps=2)
    with pytest.raises(JobError, match=r"--resume: the snapshot of step \d+ .* has no"):
        await finish(other, tmp_path / "other", 1, resume=str(store))
