"""Tokens a second over slow links: Atoll choosing its codecs, Atoll uncompressed, and torch.distributed.pipelining, in one run.

    python benchmarks/wan.py --shape "COMMAND" --links unlimited,20/40=auto+raw,8/80 --rounds 3 --results wan.json

The hosts are those of ATOLL_TEST_HOSTS, the coordinator's first. ``--shape`` are the words of a command that, with two hosts'
names, Mbps and the milliseconds of a round trip behind them, makes the link between these hosts so; without it the hosts are
measured as they are, once. Atoll decides for itself how many stages there are, on as many peers as torch has, and how many
sequences a microbatch has, of the same batch; with ``--fixed`` both are as torch has them. Atoll trains on text, for what a
codec makes of random tokens says little; torch, whose bytes depend on shapes alone, on random numbers. Prints a table and then,
as the last line, the same as JSON; ``--results`` has it in a file after each side, behind what the file has already.

A machine's speed wanders within minutes, so every link and side comes once a round, in turn, and what a side has of its
unlimited rate is the median over the rounds. Its figure is the median over the steps of all rounds, warm-up left out. Where a
step takes long fewer are made, and where it is known to take longer than LONGEST_SECONDS by its bytes alone it is not made at
all. A side that fails is told and left out.
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
UNLIMITED = "unlimited"


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
    return {"tokens_per_second": speed, "tokens": setting.tokens, "step_seconds": found.step_seconds, **_told(found)}


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
    """Measures in rounds, and keeps what was measured in ``path``, if there is one, which may have earlier rounds."""

    def __init__(self, setting: Setting, shaping: Sequence[str], path: Path | None) -> None:
        self._setting = setting
        self._shaping = shaping
        self._path = path
        self.results: list[dict[str, Any]] = []
        if path is not None and path.exists():
            kept = json.loads(path.read_text())
            if kept["setting"] != dataclasses.asdict(setting):
                raise Failed(f"{path} is of another setting: give another file, or the words that it was made with")
            self.results = kept["results"]

    def compare(self, profile: str, sides: Sequence[str], hosts: Sequence[Host]) -> None:
        """One round of some sides over the links of one profile."""
        mbps = 0.0
        if self._shaping:
            lines = lines_of(profile, hosts)
            shape(self._shaping, lines)
            mbps = min(line.mbps for line in lines.values()) if profile != UNLIMITED else 0.0
        for side in sides:
            setting = setting_for(self._setting, side, mbps)
            if setting is not None:
                self._add(profile, mbps, side, setting, hosts)

    def _add(self, profile: str, mbps: float, side: str, setting: Setting, hosts: Sequence[Host]) -> None:
        rounds = self._result(profile, mbps)["sides"].setdefault(side, [])
        try:
            rounds.append(measure(side, setting, hosts))
            print(f"{profile}, {side}: {rounds[-1]['tokens_per_second']:.0f} tokens/s", file=sys.stderr, flush=True)
        except Failed as failure:
            rounds.append({"failure": str(failure)})
            print(f"wan: {profile}, {side}: {failure}", file=sys.stderr, flush=True)
        if self._path is not None:
            self._path.write_text(self.to_json())

    def _result(self, profile: str, mbps: float) -> dict[str, Any]:
        for result in self.results:
            if result["links"] == profile:
                return result
        self.results.append({"links": profile, "bound": bound(self._setting, mbps) if mbps else None, "sides": {}})
        return self.results[-1]

    def to_json(self) -> str:
        return json.dumps({"machine": machine(), "setting": dataclasses.asdict(self._setting), "results": self.results})

    @property
    def failed(self) -> bool:
        return any("failure" in one for result in self.results for rounds in result["sides"].values() for one in rounds)


def table(results: Sequence[dict[str, Any]]) -> str:
    """The figures for people, tokens a second; of Atoll's sides with stages x samples of a microbatch, as planned."""
    found = {result["links"]: result["sides"] for result in results}
    lines = [f"{'Mbps/ms':12} {'fp32 bound':>10} {'side':5} {'tokens/s':>8} {'of unlimited':>12}  each round"]
    for result in results:
        bounded = "-" if result["bound"] is None else f"{result['bound']:.0f}"
        for side, rounds in result["sides"].items():
            whole = [one for one in rounds if "failure" not in one]
            seconds = [second for one in whole for second in one["step_seconds"]]
            speed = f"{whole[0]['tokens'] / statistics.median(seconds):.0f}" if whole else "failed"
            share = share_of_unlimited(rounds, found.get(UNLIMITED, {}).get(side, ()))
            told = f"{share:.1%}" if share is not None else "-"
            lines.append(f"{result['links']:12} {bounded:>10} {side:5} {speed:>8} {told:>12}  {', '.join(map(_cell, rounds))}")
    return "\n".join(lines)


def share_of_unlimited(rounds: Sequence[dict[str, Any]], unlimited: Sequence[dict[str, Any]]) -> float | None:
    """The median of what each round had of the same round's unlimited rate; None where there is nothing to compare."""
    pairs = [
        (one, whole) for one, whole in zip(rounds, unlimited, strict=False) if not {"failure"} & (one.keys() | whole.keys())
    ]
    return statistics.median(one["tokens_per_second"] / whole["tokens_per_second"] for one, whole in pairs) if pairs else None


def _cell(measured: dict[str, Any]) -> str:
    if "failure" in measured:
        return "failed"
    plan = f" ({measured['stages']} x {measured['microbatch']})" if "stages" in measured else ""
    codecs = " ".join(sorted(set(measured.get("codecs", {}).values())))
    return f"{measured['tokens_per_second']:.0f}{plan} {codecs}".rstrip()


def links_and_sides(text: str, sides: Sequence[str]) -> dict[str, Sequence[str]]:
    """LINK or LINK=SIDE+SIDE, after commas. Raises Failed where there is no such link or side."""
    found: dict[str, Sequence[str]] = {}
    for word in text.split(","):
        link, equals, some = word.partition("=")
        found[link] = some.split("+") if equals else sides
    if unknown := [link for link in found if link not in (*PROFILES, AS_THEY_ARE)]:
        raise Failed(f"there are no links {', '.join(unknown)}; there are {', '.join(PROFILES)}")
    if strange := {side for some in found.values() for side in some} - set(SIDES):
        raise Failed(f"there are no sides {', '.join(sorted(strange))}; there are {', '.join(SIDES)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--links", default=",".join(PROFILES), help="which of the links to measure; LINK=SIDE+SIDE for some sides"
    )
    parser.add_argument("--sides", default=",".join(SIDES), help="which sides, where a link does not say so")
    parser.add_argument("--rounds", type=int, default=1, help="how often everything is measured, in turn")
    parser.add_argument("--shape", default="", help="the words of a command that makes a link; A B MBPS RTT_MS follow")
    parser.add_argument("--fixed", action="store_true", help="stages and microbatches of Atoll as torch has them")
    parser.add_argument("--results", type=Path, help="keep what was measured in this file, and add to it")
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
    try:
        wanted = links_and_sides(options.links if options.shape else AS_THEY_ARE, options.sides.split(","))
        comparison = Comparison(setting, shlex.split(options.shape), options.results)
    except Failed as failure:
        print(f"wan: {failure}", file=sys.stderr)
        return 2
    for _, (profile, sides) in itertools.product(range(options.rounds), wanted.items()):
        comparison.compare(profile, sides, hosts)
    print(table(comparison.results))
    print(comparison.to_json())
    return int(comparison.failed)


if __name__ == "__main__":
    sys.exit(main())
