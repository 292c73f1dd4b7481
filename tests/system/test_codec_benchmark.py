"""The codecs' benchmarks run, and what they print is complete."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.swarm import ROOT, environment


async def output_of(benchmark: str, *arguments: str) -> bytes:
    """What a benchmark prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "benchmarks" / benchmark),
        *arguments,
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output


async def printed(benchmark: str, *arguments: str) -> dict[str, Any]:
    """The last line of a benchmark."""
    output = await output_of(benchmark, *arguments)
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


@pytest.mark.system
async def test_the_codecs_benchmark_measures_speed_size_and_error() -> None:
    found = await printed(
        "codec_speed.py", "--codecs", "int8", "int4", "transform", "--elements", "1048576", "--repetitions", "1"
    )
    int8, int4, transform = found["codecs"]
    assert (int8["bits"], int4["bits"]) == (8.25, 4.25)
    assert 5.2 < transform["bits"] < 5.7, "a first message of white noise, its error bounded, with its basis"
    for kind in ("normal", "heavy tails", "outliers"):
        assert 0 < int8["errors"][kind] < int4["errors"][kind] < 0.02
    assert 0 < transform["errors"]["outliers"] < 0.013
    assert transform["errors"]["normal"] == pytest.approx(0.01, rel=0.3)
    assert min(one[way] for one in found["codecs"] for way in ("encode", "decode", "pays_below_mbps")) > 0


SMALL = {"steps": 10, "width": 32, "layers": 2, "stages": 2, "context": 64, "sequences": 4}
SIZES = [word for name, size in SMALL.items() for word in (f"--{name}", str(size))]


@pytest.mark.system
async def test_the_benchmark_of_quality_trains_and_counts_what_crosses() -> None:
    found = await printed("codec_quality.py", "--codecs", "raw:raw", "int8:transform", *SIZES)
    raw, lossy = found["runs"]
    assert set(raw["bits"].values()) == {32.0}
    assert set(raw["errors"].values()) == {0.0}
    assert lossy["bits"]["forward late"] == 8.25
    assert 1.8 < lossy["bits"]["backward late"] < 2.3
    assert 0 < lossy["errors"]["forward late"] < 1e-3 < lossy["errors"]["backward late"] < 0.3
    assert lossy["validation"] == pytest.approx(raw["validation"], abs=0.1)
    assert [step for step, _ in raw["curve"]] == [0, 10]
    assert raw["curve"][0][1] > raw["curve"][1][1]
    assert 0 < lossy["coding_seconds"] < lossy["seconds"]


@pytest.mark.system
async def test_the_benchmark_of_quality_goes_on_where_it_was_stopped_and_draws_curves(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    kept = ("--results", str(results), *SIZES)
    first = await printed("codec_quality.py", "--codecs", "raw:raw", *kept)
    both = await printed("codec_quality.py", "--codecs", "raw:raw", "topk-10:topk-10", *kept)
    assert [run["pair"] for run in both["runs"]] == ["raw:raw", "topk-10:topk-10"]
    assert both["runs"][0] == first["runs"][0]  # seconds too: it was not made again
    assert json.loads(results.read_text())["runs"] == both["runs"]
    output = await output_of("codec_quality.py", "--figures", str(tmp_path / "figures"), *kept)
    assert output == b""
    for name in ("codecs_steps.svg", "codecs_8_mbps.svg"):
        assert "<svg" in (tmp_path / "figures" / name).read_text()


@pytest.mark.system
async def test_the_policy_of_a_run_chooses_for_the_rate_of_the_links() -> None:
    found = await printed("codec_quality.py", "--codecs", "auto@100000", "auto@0.1", *SIZES)
    fast, slow = found["runs"]
    assert fast["bits"]["forward late"] == fast["bits"]["backward late"] == 32.0
    assert max(slow["bits"].values()) < 16.0
    assert slow["elapsed"][-1] > fast["elapsed"][-1] > fast["elapsed"][0] == 0.0
    assert any(line.startswith("step 1, forward: transform") for line in slow["choices"])


@pytest.mark.system
async def test_a_resnet_is_cut_and_trained_on_drawn_digits() -> None:
    sizes = ("--model", "resnet", "--layers", "18", "--context", "8", "--sequences", "4", "--steps", "5", "--stages", "2")
    found = await printed("codec_quality.py", "--codecs", "raw:raw", "int4:int4", *sizes)
    raw, lossy = found["runs"]
    assert raw["curve"][0] == lossy["curve"][0]
    assert lossy["bits"]["backward late"] == 4.25
    assert 0 < abs(lossy["validation"] - raw["validation"]) < 0.5


@pytest.mark.system
async def test_errors_are_taken_of_tensors_that_cross_in_training() -> None:
    found = await printed("codec_errors.py", "--codecs", "int8", "int4", "topk-10", *SIZES, "--steps", "40")
    for stretch in ("early", "late"):
        for way in ("forward", "backward"):
            int8, int4, sparse = (found["codecs"][name][f"{way} {stretch}"] for name in ("int8", "int4", "topk-10"))
            assert (int8["bits"], int4["bits"]) == (8.25, 4.25)
            assert 0 < int8["error"] < 1e-4 < int4["error"] < 0.02 < sparse["error"] < 1.0
