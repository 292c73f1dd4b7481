"""Half of the peers, with all that the run has learned, are out of reach of the coordinator at once: there is one run and not
two. The other half goes on from a snapshot, those that are cut off stop, and what they come back with counts for nothing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from support.churn import kill, run_swarm
from support.swarm import write_job

pytestmark = [pytest.mark.system, pytest.mark.release, pytest.mark.timeout(600)]

WORDS = ("--peers", "4", "--set", "plan.stages=2")
STEPS, STRUCK = 500, 60
CUT_SECONDS = 15
"""Longer than a lease."""


def halved_job(folder: Path) -> Path:
    training = {"steps": STEPS, "batch": 4, "microbatch": 1, "evaluate_every": None}
    durability = {"snapshot_every": 5, "copies": 1}
    return write_job(folder, training=training, durability=durability, network={"compression": "raw"})


def cut(stage: int) -> dict[str, Any]:
    return {"fault": "cut", "stage": stage, "from": "coordinator", "step": STRUCK, "phase": "forward", "seconds": CUT_SECONDS}


def generations(state: Path) -> list[int]:
    """Under which generation each step was committed, in order."""
    with closing(sqlite3.connect(state / "journal.sqlite")) as journal:
        rows = journal.execute("SELECT step, generation FROM commits ORDER BY step").fetchall()
    assert [step for step, _ in rows] == list(range(1, STEPS + 1)), "each step is committed once"
    return [generation for _, generation in rows]


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([cut(0), cut(1)], id="cut off"),
        pytest.param([kill("committing", stage=stage, step=STRUCK) for stage in (0, 1)], id="killed"),
    ],
)
async def test_half_of_the_peers_are_gone_at_once(tmp_path: Path, faults: list[dict[str, Any]]) -> None:
    """Row 21."""
    job = halved_job(tmp_path)
    ran = await run_swarm(tmp_path / "disturbed", job, faults, *WORDS, within_seconds=250.0)
    assert "did not come about" not in ran.log
    victims = {event["process"] for event in ran.events if event["event"] == "chaos"}
    assert len(victims) == 2, ran.log
    lost = {event["name"] for event in ran.events if event["event"] == "peer" and event["state"] == "lost"}
    assert victims <= lost, ran.log
    back = [event["name"] for event in ran.events if event["event"] == "peer" and event["state"] == "joined"]
    assert all(back.count(victim) >= 2 for victim in victims), "they are in the run again"
    used = generations(tmp_path / "disturbed" / "state")
    assert used == sorted(used)
    assert all(event["equal"] for event in ran.events if event["event"] == "replayed"), ran.log
    assert ran.outcome == (await run_swarm(tmp_path / "undisturbed", job, [], *WORDS)).outcome
