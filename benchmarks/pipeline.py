"""Tokens a second of Atoll and of torch.distributed.pipelining on the same GPT, in one run and in turns.

    python benchmarks/pipeline.py          on this machine, over loopback; with ATOLL_TEST_HOSTS on those hosts as well

Prints a table and then, as the last line, the same as JSON. The sides take turns (A B, B A, ...) so that a machine that slows
down slows both. A side's figure is the median over all steps of all its rounds, start-up and warm-up left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from contestants import Failed, Measured, measure_atoll, measure_torch
from setting import LOOPBACK, Host, Setting, hosts_of_environment

Contestant: TypeAlias = Callable[[Setting, Sequence[Host], Path], Measured]

CONTESTANTS: dict[str, Contestant] = {"atoll": measure_atoll, "torch": measure_torch}


def compare(setting: Setting, hosts: Sequence[Host], rounds: int) -> dict[str, Any]:
    """All rounds of both sides on ``hosts``."""
    measured: dict[str, list[Measured]] = {name: [] for name in CONTESTANTS}
    for turn in range(rounds):
        order = list(CONTESTANTS) if turn % 2 == 0 else list(reversed(CONTESTANTS))
        for name in order:
            folder = Path(tempfile.mkdtemp(prefix=f"atoll-benchmark-{name}-"))
            found = CONTESTANTS[name](setting, hosts, folder)
            shutil.rmtree(folder)  # kept, for its logs, when the round failed
            measured[name].append(found)
            speed = setting.tokens / statistics.median(found.step_seconds)
            print(f"round {turn + 1} of {rounds}, {name}: {speed:.0f} tokens/s", file=sys.stderr, flush=True)
    sides = {name: _summary(setting, found) for name, found in measured.items()}
    ratio = sides["atoll"]["tokens_per_second"] / sides["torch"]["tokens_per_second"]
    return {"hosts": [host.name for host in hosts], **sides, "ratio": ratio}


def _summary(setting: Setting, rounds: Sequence[Measured]) -> dict[str, Any]:
    steps = [seconds for one in rounds for seconds in one.step_seconds]
    return {
        "tokens_per_second": setting.tokens / statistics.median(steps),
        "step_seconds": statistics.median(steps),
        "rounds": [setting.tokens / statistics.median(one.step_seconds) for one in rounds],
        "total_seconds": [one.total_seconds for one in rounds],
    }


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    """The processor's name as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def table(results: Sequence[dict[str, Any]]) -> str:
    """The figures for people."""
    lines = [f"{'hosts':24} {'Atoll':>12} {'torch 1F1B':>12} {'Atoll/torch':>12}   (median tokens/s, rounds from-to)"]
    for result in results:
        atoll, baseline = result["atoll"], result["torch"]
        spread = ", ".join(f"{min(side['rounds']):.0f}-{max(side['rounds']):.0f}" for side in (atoll, baseline))
        speeds = f"{atoll['tokens_per_second']:12.0f} {baseline['tokens_per_second']:12.0f} {result['ratio']:12.2f}"
        lines.append(f"{','.join(result['hosts'])[:24]:24} {speeds}   ({spread})")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each side")
    for field in dataclasses.fields(Setting):
        if field.name != "planned":
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    options = vars(parser.parse_args())
    rounds = options.pop("rounds")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no process outlives this one
    setting = Setting(**options)
    places = [[LOOPBACK]]
    if hosts := hosts_of_environment():
        places.append(hosts)
    try:
        results = [compare(setting, place, rounds) for place in places]
    except Failed as failure:
        print(f"pipeline: {failure}", file=sys.stderr)
        return 1
    print(table(results))
    print(json.dumps({"machine": machine(), "setting": dataclasses.asdict(setting), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
