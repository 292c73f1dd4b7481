"""Codecs that the coordinator chooses link by link: slow links get lossy ones and shorter steps, quick ones lose nothing."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file

from atoll.coordinator.events import EvaluationEvent, LinkEvent, StepEvent
from atoll.coordinator.run.journal import JOURNAL
from atoll.coordinator.run_files import WEIGHTS
from atoll.protocol.job import Compression, Job, NetworkSection
from support.coordinated import Coordinated, coordinated, tiny_job

MEGABITS = 1e6 / 8.0
SLOW = {"max_upload": MEGABITS}


def job_of(folder: Path, compression: Compression, **training: Any) -> Job:
    """A model that computes for some milliseconds a microbatch, and sends 64 kB."""
    job = tiny_job(
        folder, batch=4, microbatch=1, options={"width": 128, "context": 128, "tied": False}, plan={"stages": 2}, **training
    )
    data = job.data.model_copy(update={"sequence_length": 128})
    return job.model_copy(update={"network": NetworkSection(compression=compression), "data": data})


async def train(job: Job, state: Path, **peers: Any) -> Coordinated:
    """A finished run of two peers."""
    async with coordinated(job, state, peers=0, min_peers=2) as run:
        run.join("peer-0", "peer-1", **peers)
        outcome = await run.ended()
        assert outcome.finished, outcome.reason
    return run


def chosen(state: Path) -> list[tuple[int, str, str]]:
    """Step, source and codec of each entry in the journal."""
    with sqlite3.connect(state / JOURNAL) as journal:
        return journal.execute("SELECT step, source, codec FROM codecs ORDER BY rowid").fetchall()


async def test_slow_links_get_lossy_codecs_and_shorter_steps(tmp_path: Path) -> None:
    automatic = await train(job_of(tmp_path, Compression(), steps=8), tmp_path / "auto", **SLOW)
    raw = await train(job_of(tmp_path, Compression(forward="raw", backward="raw"), steps=4), tmp_path / "raw", **SLOW)
    codecs = {(event.source, event.codec) for event in automatic.told(LinkEvent)}
    assert {source for source, _ in codecs} == {"peer-0", "peer-1"}
    assert not any(codec in ("raw", "bf16") for _, codec in codecs)
    assert all(event.bytes < 0.5 * event.raw_bytes for event in automatic.told(LinkEvent))
    seconds = [median(event.seconds for event in run.told(StepEvent)[1:]) for run in (automatic, raw)]
    assert seconds[0] < 0.7 * seconds[1]
    assert {source for _, source, _ in chosen(tmp_path / "auto")} == {"peer-0", "peer-1"}
    losses = [[event.loss for event in run.told(StepEvent)[:4]] for run in (automatic, raw)]
    assert all(abs(one - other) < 0.05 for one, other in zip(*losses, strict=True))


async def test_peers_of_one_machine_lose_nothing_however_busy_it_is(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, steps=8, plan={"stages": 2})
    for name, compression in (("auto", Compression()), ("raw", Compression(forward="raw", backward="raw"))):
        run = await train(job.model_copy(update={"network": NetworkSection(compression=compression)}), tmp_path / name)
        assert {event.codec for event in run.told(LinkEvent)} == {"raw"}
        assert [codec for _, _, codec in chosen(tmp_path / name)] == ["raw", "raw"]
    weights, exact = load_file(tmp_path / "auto" / WEIGHTS), load_file(tmp_path / "raw" / WEIGHTS)
    assert all(torch.equal(weights[name], tensor) for name, tensor in exact.items())


async def test_a_floor_is_never_passed(tmp_path: Path) -> None:
    run = await train(job_of(tmp_path, Compression(floor="bf16"), steps=3), tmp_path / "run", **SLOW)
    assert {event.codec for event in run.told(LinkEvent)} == {"bf16"}


async def test_evaluations_with_codecs_and_without(tmp_path: Path) -> None:
    evaluated: dict[str, Any] = {"evaluate_every": 2, "evaluate_without_codecs": True, "steps": 4}
    lossy = await train(job_of(tmp_path, Compression(forward="int2", backward="raw"), **evaluated), tmp_path / "lossy")
    exact = await train(job_of(tmp_path, Compression(forward="raw", backward="raw"), **evaluated), tmp_path / "exact")
    events = lossy.told(EvaluationEvent)
    assert [event.step for event in events] == [2, 4]
    assert all(event.loss_without_codecs not in (None, event.loss) for event in events)
    assert all(event.loss_without_codecs == event.loss for event in exact.told(EvaluationEvent))
    assert len(lossy.told(StepEvent)) == 4


async def test_the_guard_tells_what_a_codec_costs_the_loss(tmp_path: Path) -> None:
    damages = []
    for codec in ("int8", "int4", "int2"):
        run = await train(job_of(tmp_path, Compression(forward=codec, backward="raw"), steps=10), tmp_path / codec)
        (damage,) = {event.damage for event in run.told(LinkEvent)[-2:] if event.direction == "forward"}
        assert damage is not None
        damages.append(damage)
        assert all(event.damage is None for event in run.told(LinkEvent) if event.direction == "backward")
    assert 0.0 < damages[0] < 0.1 * damages[1] < 0.1 * damages[2]
