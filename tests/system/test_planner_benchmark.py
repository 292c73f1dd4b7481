"""The planner's benchmark runs, on a few small swarms, and no baseline beats the plan."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from support.swarm import ROOT, environment


@pytest.mark.system
async def test_the_planner_benchmark_compares_with_both_baselines() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "benchmarks" / "planner.py"),
        *("--instances", "2", "--peers", "3", "5", "--blocks", "4", "--width", "512", "--microbatches", "8"),
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()

    assert process.returncode == 0, errors.decode()
    summary = json.loads(output.splitlines()[-1])
    assert list(summary) == ["ten cities", "three regions", "homes", "random"]
    for kind in summary.values():
        assert len(kind["planned_step_seconds"]) == len(kind["planning_seconds"]) == 2
        assert all(ratio >= 0.99 for name in ("OP-Fence", "equal split", "OP-Fence, same peers") for ratio in kind[name])
