"""The codecs' benchmark runs, and what it prints is complete."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from support.swarm import ROOT, environment


@pytest.mark.system
async def test_the_codecs_benchmark_measures_speed_size_and_error() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "benchmarks" / "codec_speed.py"),
        *("--codecs", "int8", "int4", "--elements", "65536", "--repetitions", "2"),
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()

    assert process.returncode == 0, errors.decode()
    int8, int4 = json.loads(output.splitlines()[-1])["codecs"]
    assert (int8["bits"], int4["bits"]) == (8.25, 4.25)
    for kind in ("normal", "heavy tails", "outliers"):
        assert 0 < int8["errors"][kind] < int4["errors"][kind] < 0.02
    assert min(found[way] for found in (int8, int4) for way in ("encode", "decode", "pays_below_mbps")) > 0
