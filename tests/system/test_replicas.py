"""Kill a replica at any moment of a step: the others of its stage hold what it held. Nothing is restored, no state moves, no
sample is lost or counted twice, and the run comes to what it comes to undisturbed, up to the order of sums."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atoll.protocol.hive import hivemind_is_here
from support.churn import Ran, kill, run_swarm
from support.swarm import write_job

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

STEPS = 8
LONGEST_SECONDS = 400.0
FIRST, SECOND = ["peer-1", "peer-2"], ["peer-3", "peer-4", "peer-5"]
WORDS = ("--peers", str(len(FIRST) + len(SECOND)))


def replicated_job(folder: Path, **averaging: str) -> Path:
    """Two and three replicas, and a snapshot after every step, which shows what each of them holds."""
    training = {"steps": STEPS, "batch": 6, "microbatch": 1, "evaluate_every": 4, "clip_norm": 1.0}
    durability = {"snapshot_every": 1, "copies": 0}
    plan = {"pin": {0: FIRST, 1: SECOND}}
    return write_job(
        folder, training=training, durability=durability, network={"compression": "raw"}, plan=plan, averaging=averaging
    )


@pytest.fixture(scope="module")
def calm() -> list[tuple[Path, Ran]]:
    """The undisturbed run, once it was needed."""
    return []


async def undisturbed(folder: Path, calm: list[tuple[Path, Ran]]) -> tuple[Path, Ran]:
    if not calm:
        calm.append(
            (
                folder / "calm",
                await run_swarm(folder / "calm", replicated_job(folder), [], *WORDS, within_seconds=LONGEST_SECONDS),
            )
        )
    return calm[0]


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([kill("backward", stage=0, step=3, microbatch=2, after=None)], id="in mid step"),
        pytest.param([kill("averaging", stage=1, step=3, after=None)], id="in the middle of an all-reduce"),
        pytest.param(
            [kill("committing", peer="peer-1", step=3, after=None)],
            id="the first one between commit and update",
            marks=pytest.mark.release,
        ),
        pytest.param(
            [kill("waiting for commit", peer="peer-3", step=3, after=None)],
            id="the first one of the last stage",
            marks=pytest.mark.release,
        ),
        pytest.param(
            [kill("averaging", stage=1, step=3, after=None), kill("forward", stage=1, step=5, after=None)],
            id="two of three",
            marks=pytest.mark.release,
        ),
    ],
)
async def test_the_others_go_on_without_a_lost_replica(
    tmp_path: Path, calm: list[tuple[Path, Ran]], faults: list[dict[str, Any]]
) -> None:
    await assert_goes_on(tmp_path, calm, faults)


@pytest.mark.release
@pytest.mark.skipif(not hivemind_is_here(), reason="hivemind has no wheel for this platform")
async def test_a_replica_that_is_lost_in_a_round_of_hiveminds(tmp_path: Path, calm: list[tuple[Path, Ran]]) -> None:
    """What it comes to undisturbed is what our own links come to, bit for bit."""
    faults = [kill("averaging", stage=1, step=3, after=None)]
    ran = await assert_goes_on(tmp_path, calm, faults, transport="hivemind")
    undisturbed_steps = slice(0, 2)
    _, expected = await undisturbed(tmp_path, calm)
    assert ran.outcome.losses[undisturbed_steps] == expected.outcome.losses[undisturbed_steps]
    assert "summed over the peers' own links" not in ran.log


async def assert_goes_on(
    tmp_path: Path, calm: list[tuple[Path, Ran]], faults: Sequence[dict[str, Any]], **averaging: str
) -> Ran:
    """A run through these losses, beside one without."""
    before, expected = await undisturbed(tmp_path, calm)
    ran = await run_swarm(
        tmp_path / "disturbed", replicated_job(tmp_path, **averaging), faults, *WORDS, within_seconds=LONGEST_SECONDS
    )
    told = [event["event"] for event in ran.events]
    assert ran.outcome.ledger == expected.outcome.ledger, "each sample counts once"
    assert [step for step, _ in ran.outcome.losses] == list(range(1, STEPS + 1))
    assert "restored" not in told, ran.log
    moves = [event for event in ran.events if event["event"] == "moved"]
    assert [move["bytes"] for move in moves] == [0] * len(faults), ran.log
    lost = {event["name"] for event in ran.events if event["event"] == "peer" and event["state"] == "lost"}
    assert len(lost) == len(faults), ran.log
    last = [event for event in ran.events if event["event"] == "plan"][-1]
    assert [stage["peers"] for stage in last["stages"]] == [
        [name for name in names if name not in lost] for names in (FIRST, SECOND)
    ]
    assert_close(ran, tmp_path / "disturbed", expected, before)
    assert_alike(ran)
    return ran


def assert_close(ran: Ran, folder: Path, expected: Ran, before: Path) -> None:
    """The order of sums is another once microbatches are dealt to others: rounding, over eight steps of AdamW."""
    losses = [loss for _, loss in ran.outcome.losses]
    assert losses == pytest.approx([loss for _, loss in expected.outcome.losses], rel=1e-4), ran.log
    weights, others = (load_file(path / "state" / "weights.safetensors") for path in (folder, before))
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=1e-3, atol=1e-4)


def assert_alike(*runs: Ran) -> None:
    """Whoever held a weight after a step held the same bits, and so in the runs beside."""
    steps: Sequence[int] = sorted(set.union(*(set(ran.snapshots) for ran in runs)))
    assert len(steps) >= 2, "hardly any snapshot was seen"
    for step in steps:
        tensors = [ran.snapshots.get(step, {}) for ran in runs]
        for name in set().union(*tensors):
            assert len(set().union(*(held.get(name, set()) for held in tensors))) == 1, (step, name)


@pytest.mark.release
async def test_a_slowed_replica_is_dealt_fewer_microbatches(tmp_path: Path) -> None:
    slow = {"fault": "slow", "peer": "peer-2", "step": 3, "phase": "forward", "factor": 8}
    training = {"steps": 30, "batch": 12, "microbatch": 1, "evaluate_every": 30}
    job = write_job(tmp_path, training=training, plan={"pin": {0: ["peer-1", "peer-2"]}}, network={"compression": "raw"})
    ran = await run_swarm(tmp_path / "run", job, [slow], "--peers", "2", within_seconds=LONGEST_SECONDS)
    moved = [event for event in ran.events if event["event"] == "moved"]
    assert moved, ran.log
    assert moved[0]["bytes"] == 0
    assert "peer-2 takes" in moved[0]["reason"]
    assert [step for step, _ in ran.outcome.losses] == list(range(1, 31))


@pytest.mark.release
async def test_two_runs_of_processes_have_the_same_bits(tmp_path: Path, calm: list[tuple[Path, Ran]]) -> None:
    _, first = await undisturbed(tmp_path, calm)
    second = await run_swarm(tmp_path / "again", replicated_job(tmp_path), [], *WORDS)
    assert second.outcome == first.outcome
    assert_alike(first, second)
