"""Swarms to which a fault plan happens come to what the undisturbed run comes to, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.churn import kill, run_swarm
from support.swarm import run_command, write_job

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

STEPS = 4


async def test_every_kind_of_fault_also_before_the_first_commit_changes_nothing(tmp_path: Path) -> None:
    words = ("--peers", "3", "--set", "plan.stages=2")
    training, durability = {"steps": STEPS, "evaluate_every": None}, {"snapshot_every": 2}
    job = write_job(tmp_path, training=training, network={"compression": "raw"}, durability=durability)
    faults = [
        {"fault": "kill", "peer": "peer-2", "at": "1s", "restart_after": "0s"},
        kill("joining", peer="peer-1"),
        kill("backward", stage=1, step=1, microbatch=1),
        {"fault": "corrupt", "stage": 0, "step": 2, "phase": "forward"},
        {"fault": "corrupt", "stage": 1, "step": 2, "phase": "backward"},
        {"fault": "freeze", "stage": 1, "step": 3, "phase": "forward", "seconds": 1},
        {"fault": "slow", "stage": 0, "step": 3, "phase": "forward", "factor": 5, "seconds": 1},
        {"fault": "cut", "stage": 1, "step": 4, "phase": "forward", "seconds": 1},
        {"fault": "fill_disk", "stage": 0, "step": 2, "phase": "snapshotting"},
    ]
    ran = await run_swarm(tmp_path / "disturbed", job, faults, *words)
    assert "did not come about" not in ran.log
    assert "goes on" in ran.log
    told = [(event["fault"], event["phase"], event["step"]) for event in ran.events if event["event"] == "chaos"]
    assert sorted(told) == sorted((fault["fault"], fault.get("phase", ""), fault.get("step", 0)) for fault in faults)
    failures = [event["failure"] for event in ran.events if event["event"] == "snapshot" and event["failure"]]
    assert any("could not take its part" in failure and "is full" in failure for failure in failures), failures
    assert ran.outcome == (await run_swarm(tmp_path / "undisturbed", job, [], *words)).outcome


async def test_a_swarm_tells_what_did_not_come_about(tmp_path: Path) -> None:
    job = write_job(tmp_path, training={"steps": 1, "evaluate_every": None})
    words = ("--peers", "1", "--set", "plan.stages=1")
    ran = await run_swarm(tmp_path / "disturbed", job, [kill("forward", stage=7, step=3)], *words)
    assert "atoll: chaos: this did not come about: kill of stage 7 at step 3, forward" in ran.log


async def test_a_wrong_plan_is_bad_usage_at_once(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    plan = tmp_path / "chaos.yaml"
    for text, sentence in (
        ("faults: [{fault: kil, stage: 1, phase: forward}]", "did you mean 'kill'?"),
        ("faults: [{fault: kill, peer: peer-9, phase: forward}]", "there is no peer 'peer-9'"),
    ):
        plan.write_text(text)
        ended = await run_command("swarm", job, "--chaos", plan, "--state", tmp_path / "state")
        assert ended.status == 2
        assert sentence in ended.errors.splitlines()[-1]
    assert not (tmp_path / "state").exists()
