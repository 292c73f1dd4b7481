"""Kill peers at any moment: the run ends with the weights, the losses and the ledger of the undisturbed one, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.churn import Ran, kill, random_kills, run_swarm
from support.swarm import write_job

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

STAGES = 3
PEERS = tuple(f"peer-{number}" for number in range(1, STAGES + 2))
"""One more than stages: there is a spare, as long as whoever was killed comes back soon."""
WORDS = ("--peers", str(len(PEERS)), "--set", f"plan.stages={STAGES}")
SHORT, LONG, LONGEST = 8, 24, 120
"""Steps of a run."""


def churning_job(folder: Path, steps: int) -> Path:
    """A tiny job with a snapshot every third step, and nothing lost on links, however busy the machine is."""
    training = {"steps": steps, "batch": 4, "microbatch": 1, "evaluate_every": None, "clip_norm": 1.0}
    durability = {"snapshot_every": 3, "copies": 1}
    return write_job(folder, training=training, durability=durability, network={"compression": "raw"})


@pytest.fixture(scope="module")
def calm() -> dict[int, Ran]:
    """Undisturbed runs, by the number of their steps."""
    return {}


async def check(folder: Path, calm: dict[int, Ran], steps: int, faults: list[dict[str, Any]], seconds: float) -> str:
    """A run with ``faults`` comes to what it comes to without; what its swarm said."""
    job = churning_job(folder, steps)
    if steps not in calm:
        calm[steps] = await run_swarm(folder / "undisturbed", job, [], *WORDS)
    ran, expected = await run_swarm(folder / "disturbed", job, faults, *WORDS, within_seconds=seconds), calm[steps]
    assert ran.outcome.losses == expected.outcome.losses, ran.log
    assert ran.outcome == expected.outcome, ran.log
    assert all(event["equal"] for event in ran.events if event["event"] == "replayed"), ran.log
    assert_same_snapshots(ran.snapshots, expected.snapshots)
    return ran.log


def assert_same_snapshots(found: dict[int, dict[str, set[str]]], expected: dict[int, dict[str, set[str]]]) -> None:
    """What the optimizer keeps is on the disks as well, as of the same step in both runs."""
    common = [step for step in found.keys() & expected.keys() if found[step].keys() == expected[step].keys()]
    assert common, f"snapshots of {sorted(found)} here, of {sorted(expected)} there"
    for step in common:
        assert found[step] == expected[step]
        assert all(len(digests) == 1 for digests in found[step].values())


async def test_kills_of_every_stage_change_nothing(tmp_path: Path, calm: dict[int, Ran]) -> None:
    faults = [
        kill("committing", stage=0, step=3),
        kill("backward", stage=1, step=5, microbatch=2),
        kill("waiting for commit", stage=2, step=7),
    ]
    log = await check(tmp_path, calm, SHORT, faults, 250.0)
    assert "did not come about" not in log


@pytest.mark.parametrize("seed", [2])
async def test_a_few_random_kills_change_nothing(tmp_path: Path, calm: dict[int, Ran], seed: int) -> None:
    faults = random_kills(seed, 5, stages=STAGES, steps=SHORT)
    print(f"seed {seed}: {faults}")
    await check(tmp_path, calm, SHORT, faults, 250.0)


@pytest.mark.release
@pytest.mark.parametrize("stage", range(STAGES))
async def test_a_stage_may_be_killed_at_every_phase(tmp_path: Path, calm: dict[int, Ran], stage: int) -> None:
    faults = [
        kill("joining", peer=PEERS[stage]),
        kill("probing", peer=PEERS[stage + 1]),
        kill("forward", stage=stage, step=2, microbatch=1),
        kill("loading", stage=stage, step=2),
        kill("backward", stage=stage, step=5),
        *(kill("rejoining", peer=peer) for peer in PEERS),
        kill("waiting for commit", stage=stage, step=8),
        kill("committing", stage=stage, step=11),
        kill("snapshotting", stage=stage, step=12),
        kill("backward", stage=stage, step=16),
        kill("transferring", stage=stage, step=16),
        kill("committing", stage=stage, step=19),
    ]
    log = await check(tmp_path, calm, LONG, faults, 500.0)
    missing = [line for line in log.splitlines() if "did not come about" in line and "rejoining" not in line]
    assert not missing


@pytest.mark.release
async def test_the_coordinator_may_be_killed_at_every_phase(tmp_path: Path, calm: dict[int, Ran]) -> None:
    where: dict[str, Any] = {"peer": "coordinator"}
    faults = [
        kill("joining", **where),
        kill("rejoining", **where),
        kill("probing", **where),
        kill("loading", **where),
        kill("forward", step=2, **where),
        kill("backward", step=5, **where),
        kill("waiting for commit", step=8, **where),
        kill("committing", step=11, **where),
        kill("snapshotting", step=12, **where),
        kill("backward", stage=1, step=16),
        kill("transferring", step=16, **where),
        kill("committing", step=19, **where),
    ]
    log = await check(tmp_path, calm, LONG, faults, 500.0)
    assert "did not come about" not in log


@pytest.mark.release
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("seed", [20])
async def test_two_hundred_random_kills_change_nothing(tmp_path: Path, calm: dict[int, Ran], seed: int) -> None:
    faults = random_kills(seed, 200, stages=STAGES, steps=LONGEST)
    print(f"seed {seed}: {faults}")
    await check(tmp_path, calm, LONGEST, faults, 5000.0)
