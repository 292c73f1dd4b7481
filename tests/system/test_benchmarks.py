"""The benchmark runs, on a tiny model: what it prints is complete and it leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from support.swarm import ROOT, environment

TINY = {
    "layers": 4,
    "width": 32,
    "heads": 2,
    "context": 16,
    "stages": 2,
    "microbatches": 2,
    "warmup": 1,
    "steps": 2,
    "rounds": 1,
}


@pytest.mark.system
@pytest.mark.timeout(300)
async def test_the_pipeline_benchmark_compares_both_sides() -> None:
    flags = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "benchmarks" / "pipeline.py"),
        *flags,
        env=environment(ATOLL_TEST_HOSTS="[]"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()

    assert process.returncode == 0, errors.decode()
    *table, line = output.decode().splitlines()
    (result,) = json.loads(line)["results"]
    assert result["hosts"] == ["loopback"]
    assert result["ratio"] == result["atoll"]["tokens_per_second"] / result["torch"]["tokens_per_second"] > 0
    assert any("loopback" in row for row in table)


@pytest.mark.system
@pytest.mark.release
@pytest.mark.timeout(300)
async def test_the_churn_benchmark_tells_what_a_kill_costs() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "benchmarks" / "churn.py"),
        *("--kills", "2", "--restarts", "0", "--minutes", "0", "--width", "32", "--apart", "8"),
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()

    assert process.returncode == 0, errors.decode()
    answer = json.loads(output.splitlines()[-1])
    assert answer["num_kills"] == 2
    assert set(answer["parts"]) == {"noticed", "planned", "moved", "replayed", "step"}
    assert answer["kills"]["least"] > answer["step_seconds"] > 0
    assert answer["goodput"]["Atoll"]["60"] < answer["goodput"]["Atoll"]["600"] < 1


@pytest.mark.system
@pytest.mark.timeout(300)
async def test_the_fleets_benchmark_compares_predicted_with_measured() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "benchmarks" / "fleets.py"),
        *("--fleets", "two,two-hosts", "--steps", "4", "--width", "32"),
        env=environment(ATOLL_TEST_HOSTS="[]"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()

    assert process.returncode == 0, errors.decode()
    *table, line = output.decode().splitlines()
    answer = json.loads(line)
    (result,) = answer["results"]
    assert (result["fleet"], result["stages"], len(result["steps"])) == ("two", 2, 2)
    assert result["error"] == result["predicted_step_seconds"] / result["measured_step_seconds"] - 1.0
    assert sorted(stage["peer"] for stage in result["memory"]) == ["peer-1", "peer-2"]
    assert all(stage["predicted_bytes"] > 0 for stage in result["memory"])
    assert [one["fleet"] for one in answer["skipped"]] == ["two-hosts"]
    assert any(row.startswith("two-hosts") and "ATOLL_TEST_HOSTS" in row for row in table)


@pytest.mark.system
@pytest.mark.timeout(120)
async def test_the_link_benchmark_compares_a_link_with_plain_tcp() -> None:
    sizes = ("--bytes", "2097152", "--short-bytes", "1048576", "--message-bytes", "262144", "--idle-seconds", "0.1")
    output = await benchmark("link.py", *sizes, "--rounds", "1")

    *table, line = output.splitlines()
    results = json.loads(line)["results"]
    assert set(results) == {"long, busy", "long, idle", "short, busy", "short, idle"}
    assert all(one["ratio"] == one["link_mbps"] / one["tcp_mbps"] > 0 for one in results.values())
    assert len(table) == 1 + len(results)


@pytest.mark.system
@pytest.mark.release
@pytest.mark.timeout(300)
async def test_the_wan_benchmark_measures_all_sides_on_the_hosts_as_they_are(tmp_path: Path) -> None:
    flags = [word for name, value in TINY.items() if name != "rounds" for word in (f"--{name}", str(value))]
    hosts: list[dict[str, object]] = [{"name": name, "address": "127.0.0.1", "exec": []} for name in ("one", "two")]
    kept = tmp_path / "wan.json"
    output = await benchmark("wan.py", *flags, "--fixed", "--results", str(kept), hosts=json.dumps(hosts))

    *table, line = output.splitlines()
    assert json.loads(kept.read_text())["results"] == json.loads(line)["results"]
    (result,) = json.loads(line)["results"]
    assert (result["raw"]["stages"], result["raw"]["microbatch"]) == (2, 2)
    assert all(result[side]["tokens_per_second"] > 0 for side in ("raw", "auto", "torch"))
    assert result["raw"]["codecs"] == {"peer-1 -> peer-2": "raw", "peer-2 -> peer-1": "raw"}
    assert "as they are" in table[-1]


async def benchmark(name: str, *words: str, hosts: str = "[]") -> str:
    """What a benchmark prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "benchmarks" / name),
        *words,
        env=environment(ATOLL_TEST_HOSTS=hosts),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()
