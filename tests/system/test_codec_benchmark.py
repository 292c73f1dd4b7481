"""The codecs' benchmarks run, and what they print is complete."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from support.swarm import ROOT, environment


async def printed(benchmark: str, *arguments: str) -> dict[str, Any]:
    """The last line of a benchmark."""
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
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


@pytest.mark.system
async def test_the_codecs_benchmark_measures_speed_size_and_error() -> None:
    found = await printed(
        "codec_speed.py", "--codecs", "int8", "int4", "transform", "--elements", "1048576", "--repetitions", "1"
    )
    int8, int4, transform = found["codecs"]
    assert (int8["bits"], int4["bits"]) == (8.25, 4.25)
    assert 1.8 < transform["bits"] < 2.3
    for kind in ("normal", "heavy tails", "outliers"):
        assert 0 < int8["errors"][kind] < int4["errors"][kind] < 0.02
    assert 0 < transform["errors"]["outliers"] < 0.02 < transform["errors"]["normal"] < 0.2
    assert min(one[way] for one in found["codecs"] for way in ("encode", "decode", "pays_below_mbps")) > 0


@pytest.mark.system
async def test_the_benchmark_of_quality_trains_and_counts_what_crosses() -> None:
    small = {"steps": 10, "width": 32, "layers": 2, "stages": 2, "context": 64}
    sizes = [word for name, size in small.items() for word in (f"--{name}", str(size))]
    found = await printed("codec_quality.py", "--codecs", "raw:raw", "int8:transform", *sizes)
    raw, lossy = found["runs"]
    assert set(raw["bits"].values()) == {32.0}
    assert set(raw["errors"].values()) == {0.0}
    assert lossy["bits"]["forward late"] == 8.25
    assert 1.8 < lossy["bits"]["backward late"] < 2.3
    assert 0 < lossy["errors"]["forward late"] < 1e-3 < lossy["errors"]["backward late"] < 0.3
    assert lossy["validation"] == pytest.approx(raw["validation"], abs=0.1)
