"""Layers change hands in the middle of a run, and the run comes to what it comes to without: bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.coordinator.events import Event, MovedEvent, PlanEvent, StepEvent
from atoll.protocol.job import Job
from support.coordinated import Coordinated, coordinated
from support.jobs import TOKENS, gpt_job, resnet_job
from support.marks import release
from support.placements import Placement, ScriptedPlacements, placed
from support.runs import assert_same

JobMaker = Callable[[Path], Job]

SGD = {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9}
STEPS = 30


def adamw(base: Path) -> Job:
    return gpt_job(base, steps=STEPS, evaluate_every=7, data={**TOKENS, "validation": 0.05})


def momentum(base: Path) -> Job:
    return gpt_job(base, steps=STEPS, optimizer=SGD)


def tied_dropout(base: Path) -> Job:
    return gpt_job(base, steps=STEPS, tied=True, dropout=0.1)


def batch_norm(base: Path) -> Job:
    return resnet_job(base, depth=18, steps=12)


A, B, C = "peer-0", "peer-1", "peer-2"
WALK = (
    placed((A, 1), (B, 1)),
    placed((A, 3), (B, 1)),  # a little moves forward
    placed((B, 1), (A, 1)),  # the stages change places
    placed((A, 1), (B, 1), (C, 1)),  # a third joins in
    placed((C, 1)),  # all to one
    placed((B, 1), (C, 2)),
)


async def until_more(run: Coordinated, kind: type[Event], than: int) -> None:
    """Wait until there were more events of that kind."""
    await run.until(lambda: len(run.told(kind)) > than)


async def train(job: Job, folder: Path, walk: tuple[Placement, ...], monkeypatch: pytest.MonkeyPatch) -> Coordinated:
    """Trains ``job`` on three peers, from one placement to the next, two committed steps and more on each."""
    ScriptedPlacements(monkeypatch, walk)
    async with coordinated(job, folder, peers=3) as run:
        for number in range(1, len(walk)):
            await until_more(run, StepEvent, len(run.told(StepEvent)))
            assert (await run.coordinator.replan()).moved
            await until_more(run, MovedEvent, number - 1)
        outcome = await run.ended()
    assert outcome.finished, outcome.reason
    return run


@pytest.mark.parametrize("make", [adamw, release(momentum), tied_dropout, batch_norm], ids=lambda make: make.__name__)
async def test_layers_move_again_and_again_and_nothing_changes(
    make: JobMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    still = await train(make(tmp_path), tmp_path / "still", WALK[:1], monkeypatch)
    moved = await train(make(tmp_path), tmp_path / "moved", WALK, monkeypatch)
    assert_same(moved, still)
    assert len(moved.told(PlanEvent)) == len(WALK)
    moves = moved.told(MovedEvent)
    assert [event.generation for event in moves] == [2, 3, 4, 5, 6]
    assert all(event.bytes > 0 for event in moves)
