"""Tokens a second over slow links: Atoll uncompressed, Atoll choosing its codecs, and torch.distributed.pipelining, in one run.

    python benchmarks/wan.py --shape "COMMAND" --links unlimited,20/40,8/80

The hosts are those of ATOLL_TEST_HOSTS, the coordinator's first. ``--shape`` are the words of a command that, with two hosts'
names, Mbps and the milliseconds of a round trip behind them, makes the link between these hosts so; without it the hosts are
measured as they are, once. Prints a table and then, as the last line, the same as JSON.

A side's figure is the median over its steps, warm-up left out. Where a step must take long by its bytes alone, fewer are made.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contestants import Failed, Measured, measure_atoll, measure_torch
from pipeline import machine
from setting import HOSTS_VARIABLE, Host, Setting, hosts_of_environment

SIDES = ("raw", "auto", "torch")
BITS = 32
SLOW_SECONDS = 4.0
"""A step that takes its bytes longer than this is slow: one is made to warm up, and no more than fill the following."""
SLOW_SIDE_SECONDS = 50.0
AS_THEY_ARE = "as they are"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A link between two hosts; 0 Mbps is unlimited."""

    mbps: float
    rtt_ms: float


EVEN = {
    "unlimited": Line(mbps=0, rtt_ms=0.2),
    "200/50": Line(mbps=200, rtt_ms=50),
    "100/20": Line(mbps=100, rtt_ms=20),
    "50/40": Line(mbps=50, rtt_ms=40),
    "20/40": Line(mbps=20, rtt_ms=40),
    "8/80": Line(mbps=8, rtt_ms=80),
    "2/40": Line(mbps=2, rtt_ms=40),
    "1/40": Line(mbps=1, rtt_ms=40),
}
"""Every pair of hosts alike: Mbps / milliseconds of a round trip."""
WORLD = (Line(mbps=50, rtt_ms=20), Line(mbps=100, rtt_ms=30), Line(mbps=8, rtt_ms=150), Line(mbps=20, rtt_ms=90))
"""No two pairs of neighbours alike: these in turn over the pairs of hosts."""
PROFILES = (*EVEN, "world")


def lines_of(profile: str, hosts: Sequence[Host]) -> dict[tuple[str, str], Line]:
    """Every pair's link."""
    pairs = list(itertools.combinations([host.name for host in hosts], 2))
    if profile == "world":
        return dict(zip(pairs, itertools.cycle(WORLD), strict=False))
    return dict.fromkeys(pairs, EVEN[profile])


def shape(command: Sequence[str], lines: dict[tuple[str, str], Line]) -> None:
    """Makes the links so."""
    for (one, other), line in lines.items():
        subprocess.run([*command, one, other, str(line.mbps), str(line.rtt_ms)], check=True)


def bound(setting: Setting, mbps: float) -> float:
    """Tokens a second that an uncompressed link carries, each direction."""
    return mbps * 1e6 / (setting.width * BITS) if mbps else float("inf")


def setting_for(setting: Setting, side: str, mbps: float) -> Setting:
    """With as many steps as there is time for."""
    seconds = setting.tokens / bound(setting, mbps)
    if side == "auto":
        return dataclasses.replace(setting, compression="auto")
    if seconds <= SLOW_SECONDS:
        return setting
    steps = max(1, min(setting.steps, int(SLOW_SIDE_SECONDS / seconds)))
    return dataclasses.replace(setting, warmup=1, steps=steps)


def measure(side: str, setting: Setting, hosts: Sequence[Host]) -> dict[str, Any]:
    """One side over the links as they are now."""
    folder = Path(tempfile.mkdtemp(prefix=f"atoll-benchmark-wan-{side}-"))
    found = (measure_torch if side == "torch" else measure_atoll)(setting, hosts, folder)
    shutil.rmtree(folder)  # kept, for its logs, when it failed
    speed = setting.tokens / statistics.median(found.step_seconds)
    return {"tokens_per_second": speed, "step_seconds": found.step_seconds, **_told(found)}


def _told(found: Measured) -> dict[str, Any]:
    """Which codecs were in use at the end, and what the plan had predicted."""
    links = {(e["source"], e["target"]): e["codec"] for e in found.events if e["event"] == "link"}
    plans = [event["predicted_step_seconds"] for event in found.events if event["event"] == "plan"]
    codecs = {f"{source} -> {target}": codec for (source, target), codec in links.items()}
    return {"codecs": codecs, "predicted_step_seconds": plans} if found.events else {}


def compare(profile: str, options: argparse.Namespace, setting: Setting, hosts: Sequence[Host]) -> dict[str, Any]:
    """All sides over the links of one profile."""
    mbps = 0.0
    if options.shape:
        lines = lines_of(profile, hosts)
        shape(shlex.split(options.shape), lines)
        mbps = min(line.mbps for line in lines.values()) if profile != "unlimited" else 0.0
    result: dict[str, Any] = {"links": profile, "bound": bound(setting, mbps) if mbps else None}
    for side in options.sides.split(","):
        result[side] = measure(side, setting_for(setting, side, mbps), hosts)
        print(f"{profile}, {side}: {result[side]['tokens_per_second']:.0f} tokens/s", file=sys.stderr, flush=True)
    return result


def table(results: Sequence[dict[str, Any]], sides: Sequence[str]) -> str:
    """The figures for people, tokens a second."""
    lines = [f"{'Mbps/ms':12} {'fp32 bound':>10} " + " ".join(f"{side:>10}" for side in sides) + "   codecs of auto"]
    for result in results:
        cells = " ".join(f"{result[side]['tokens_per_second']:10.0f}" for side in sides)
        bounded = "-" if result["bound"] is None else f"{result['bound']:.0f}"
        codecs = ", ".join(sorted(set(result.get("auto", {}).get("codecs", {}).values())))
        lines.append(f"{result['links']:12} {bounded:>10} {cells}   {codecs}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default=",".join(PROFILES), help="which of the links to measure")
    parser.add_argument("--sides", default=",".join(SIDES), help="which sides")
    parser.add_argument("--shape", help="the words of a command that makes a link; A B MBPS RTT_MS follow")
    for field in dataclasses.fields(Setting):
        if field.name != "compression":
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no process outlives this one
    hosts = hosts_of_environment()
    if not hosts:
        print(f"wan: {HOSTS_VARIABLE} names no hosts, so there is nothing to measure", file=sys.stderr)
        return 2
    fields = [field.name for field in dataclasses.fields(Setting) if field.name != "compression"]
    setting = Setting(**{name: getattr(options, name) for name in fields})
    profiles = options.links.split(",") if options.shape else [AS_THEY_ARE]
    if unknown := [profile for profile in profiles if profile not in (*PROFILES, AS_THEY_ARE)]:
        print(f"wan: there are no links {', '.join(unknown)}; there are {', '.join(PROFILES)}", file=sys.stderr)
        return 2
    try:
        results = [compare(profile, options, setting, hosts) for profile in profiles]
    except Failed as failure:
        print(f"wan: {failure}", file=sys.stderr)
        return 1
    print(table(results, options.sides.split(",")))
    print(json.dumps({"machine": machine(), "setting": dataclasses.asdict(setting), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
