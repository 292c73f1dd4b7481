"""Tokens a second over slow links: Atoll choosing its codecs, Atoll uncompressed, and torch.distributed.pipelining, in one run.

    python benchmarks/wan.py --shape "COMMAND" --links unlimited,20/40,8/80 --results wan.json

The hosts are those of ATOLL_TEST_HOSTS, the coordinator's first. ``--shape`` are the words of a command that, with two hosts'
names, Mbps and the milliseconds of a round trip behind them, makes the link between these hosts so; without it the hosts are
measured as they are, once. Atoll decides for itself how many stages there are, on as many peers as torch has, and how many
sequences a microbatch has, of the same batch; with ``--fixed`` both are as torch has them. Atoll trains on text, for what a
codec makes of random tokens says little; torch, whose bytes depend on shapes alone, on random numbers. Prints a table and then,
as the last line, the same as JSON; ``--results`` has it in a file after each side.

A side's figure is the median over its steps, warm-up left out. Where a step takes long fewer are made, and where it is known to
take longer than LONGEST_SECONDS by its bytes alone it is not made at all. A side that fails is told and left out.
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

SIDES = ("auto", "raw", "torch")
BITS = 32
SIDE_SECONDS = 45.0
"""For the steps of a side, by estimate."""
LONGEST_SECONDS = 20.0
"""Of an uncompressed step, for its bytes."""
COMPUTING_SECONDS = 4.0
TIMES_BYTES = {"raw": 1.4, "torch": 5.0}
"""What a step takes beside computing, as multiples of the time of its bytes over one link: guesses, for the number of steps."""
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
PROFILES = ("unlimited", "20/40", "8/80", "2/40", "1/40", "200/50", "100/20", "50/40", "world")
"""What is compared first comes first."""


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


def setting_for(setting: Setting, side: str, mbps: float) -> Setting | None:
    """With as many steps as there is time for; None where there is none for a single one."""
    if side == "torch":
        setting = dataclasses.replace(setting, planned=False)
    if side == "auto":
        return dataclasses.replace(setting, compression="auto")
    seconds = setting.tokens / bound(setting, mbps)
    if seconds > LONGEST_SECONDS:
        return None
    step = COMPUTING_SECONDS + TIMES_BYTES[side] * seconds
    steps = max(1, min(setting.steps, int(SIDE_SECONDS / step)))
    return dataclasses.replace(setting, warmup=setting.warmup if steps == setting.steps else 1, steps=steps)


def measure(side: str, setting: Setting, hosts: Sequence[Host]) -> dict[str, Any]:
    """One side over the links as they are now."""
    folder = Path(tempfile.mkdtemp(prefix=f"atoll-benchmark-wan-{side}-"))
    found = (measure_torch if side == "torch" else measure_atoll)(setting, hosts, folder)
    shutil.rmtree(folder)  # kept, for its logs, when it failed
    speed = setting.tokens / statistics.median(found.step_seconds)
    return {"tokens_per_second": speed, "step_seconds": found.step_seconds, **_told(found)}


def _told(found: Measured) -> dict[str, Any]:
    """Which codecs were in use at the end, and what the last plan was and had predicted."""
    plans = [event for event in found.events if event["event"] == "plan"]
    if not plans:
        return {}
    links = {(e["source"], e["target"]): e["codec"] for e in found.events if e["event"] == "link"}
    return {
        "codecs": {f"{source} -> {target}": codec for (source, target), codec in links.items()},
        "predicted_step_seconds": [plan["predicted_step_seconds"] for plan in plans],
        "stages": len(plans[-1]["stages"]),
        "microbatch": plans[-1]["microbatch"],
    }


class Comparison:
    """Measures, and keeps what was measured in ``path``, if there is one."""

    def __init__(self, setting: Setting, sides: Sequence[str], shaping: Sequence[str], path: Path | None) -> None:
        self._setting = setting
        self._sides = sides
        self._shaping = shaping
        self._path = path
        self.results: list[dict[str, Any]] = []

    def compare(self, profile: str, hosts: Sequence[Host]) -> None:
        """All sides over the links of one profile."""
        mbps = 0.0
        if self._shaping:
            lines = lines_of(profile, hosts)
            shape(self._shaping, lines)
            mbps = min(line.mbps for line in lines.values()) if profile != "unlimited" else 0.0
        result: dict[str, Any] = {"links": profile, "bound": bound(self._setting, mbps) if mbps else None}
        self.results.append(result)
        for side in self._sides:
            setting = setting_for(self._setting, side, mbps)
            if setting is None:
                continue
            try:
                result[side] = measure(side, setting, hosts)
                print(f"{profile}, {side}: {result[side]['tokens_per_second']:.0f} tokens/s", file=sys.stderr, flush=True)
            except Failed as failure:
                result[side] = {"failure": str(failure)}
                print(f"wan: {profile}, {side}: {failure}", file=sys.stderr, flush=True)
            self._keep()

    def to_json(self) -> str:
        return json.dumps({"machine": machine(), "setting": dataclasses.asdict(self._setting), "results": self.results})

    @property
    def failed(self) -> bool:
        return any("failure" in result.get(side, {}) for result in self.results for side in self._sides)

    def _keep(self) -> None:
        if self._path is not None:
            self._path.write_text(self.to_json())


def table(results: Sequence[dict[str, Any]], sides: Sequence[str]) -> str:
    """The figures for people, tokens a second; of Atoll's sides with stages x samples of a microbatch, as planned."""
    lines = [f"{'Mbps/ms':12} {'fp32 bound':>10} " + " ".join(f"{side:>14}" for side in sides) + "   codecs of auto"]
    for result in results:
        cells = " ".join(f"{_cell(result.get(side)):>14}" for side in sides)
        bounded = "-" if result["bound"] is None else f"{result['bound']:.0f}"
        codecs = ", ".join(sorted(set(result.get("auto", {}).get("codecs", {}).values())))
        lines.append(f"{result['links']:12} {bounded:>10} {cells}   {codecs}")
    return "\n".join(lines)


def _cell(measured: dict[str, Any] | None) -> str:
    if measured is None:
        return "-"
    if "failure" in measured:
        return "failed"
    plan = f" ({measured['stages']} x {measured['microbatch']})" if "stages" in measured else ""
    return f"{measured['tokens_per_second']:.0f}{plan}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default=",".join(PROFILES), help="which of the links to measure")
    parser.add_argument("--sides", default=",".join(SIDES), help="which sides")
    parser.add_argument("--shape", default="", help="the words of a command that makes a link; A B MBPS RTT_MS follow")
    parser.add_argument("--fixed", action="store_true", help="stages and microbatches of Atoll as torch has them")
    parser.add_argument("--results", type=Path, help="keep what was measured in this file, after each side")
    numbers = [field for field in dataclasses.fields(Setting) if field.name not in ("compression", "planned", "text")]
    for field in numbers:
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no process outlives this one
    hosts = hosts_of_environment()
    if not hosts:
        print(f"wan: {HOSTS_VARIABLE} names no hosts, so there is nothing to measure", file=sys.stderr)
        return 2
    setting = Setting(planned=not options.fixed, text=True, **{field.name: getattr(options, field.name) for field in numbers})
    profiles = options.links.split(",") if options.shape else [AS_THEY_ARE]
    if unknown := [profile for profile in profiles if profile not in (*PROFILES, AS_THEY_ARE)]:
        print(f"wan: there are no links {', '.join(unknown)}; there are {', '.join(PROFILES)}", file=sys.stderr)
        return 2
    sides = options.sides.split(",")
    comparison = Comparison(setting, sides, shlex.split(options.shape), options.results)
    for profile in profiles:
        comparison.compare(profile, hosts)
    print(table(comparison.results, sides))
    print(comparison.to_json())
    return int(comparison.failed)


if __name__ == "__main__":
    sys.exit(main())
