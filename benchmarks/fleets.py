"""What a plan predicts beside what then happens, over varied fleets of real processes.

    python benchmarks/fleets.py                            fleets of this machine; with ATOLL_TEST_HOSTS those of several hosts
    python benchmarks/fleets.py --fleets one,two           some of them; --list names them all

For each fleet a coordinator and peers start, train a GPT for a dozen steps, and end. Prints a row for each fleet and then, as
the last line, the same as JSON. Measured is the median of the steps under the plan in force, the first two of them left out;
predicted is what that plan's event said. Memory is by how much a peer's process grew, beside what its stage was to need.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from atoll.coordinator.cli.invite import invite_for_swarm
from contestants import Failed, Processes, address_of
from fleet_list import FLEETS, WIDTH, BenchmarkFleet, Placed, place
from pipeline import machine
from setting import Host, hosts_of_environment

WARM_UP_STEPS = 2
BUSY = 0.3
"""Of the cores, before anything of ours has started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """Bytes that a stage was predicted to need, and by how much its peer's process grew."""

    peer: str
    predicted_bytes: float
    measured_bytes: float

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1.0 if self.measured_bytes else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A fleet that ran. ``error`` is positive where the step was predicted too long."""

    fleet: str
    stages: int
    predicted_seconds: float
    measured_seconds: float
    steps: tuple[float, ...]
    memory: tuple[StageResult, ...]

    @property
    def error(self) -> float:
        return self.predicted_seconds / self.measured_seconds - 1.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "fleet": self.fleet,
            "stages": self.stages,
            "predicted_step_seconds": self.predicted_seconds,
            "measured_step_seconds": self.measured_seconds,
            "error": self.error,
            "steps": self.steps,
            "memory": [
                {"peer": one.peer, "predicted_bytes": one.predicted_bytes, "measured_bytes": one.measured_bytes}
                for one in self.memory
            ],
        }


def measure(fleet: BenchmarkFleet, hosts: Sequence[Host], options: argparse.Namespace, folder: Path) -> Result:
    """Run the fleet to its end. Raises Failed with what its processes said last."""
    state = folder / "state"
    (folder / "job.yaml").write_text(yaml.safe_dump(fleet.job(options.steps, options.width)))
    placed = place(fleet, hosts)
    first = hosts[0]
    words = ["-m", "atoll.coordinator", "run", str(folder / "job.yaml"), "--state", str(state), "--json"]
    words += ["--listen", f"{first.address}:0", "--min-peers", str(len(placed))]
    processes = Processes(folder)
    with processes.limited():
        coordinator = processes.start("coordinator", first, words, threads=1)
        address = address_of(state, coordinator, processes)
        (folder / "token").write_text(invite_for_swarm(state))
        for peer in placed:
            _start(processes, peer, address, folder)
        assert coordinator.stdout is not None
        events = [json.loads(line) for line in coordinator.stdout]
    if not events or events[-1]["event"] != "finished":
        raise processes.failure(f"{fleet.name} did not finish its {options.steps} steps")
    return result_of(fleet.name, events)


def _start(processes: Processes, peer: Placed, address: str, folder: Path) -> None:
    words = ["-m", "atoll.peer", "join", address, "--device", "cpu", "--listen", f"{peer.host.address}:0", *peer.words]
    # Each fleet measures anew: what another one measured must not help it.
    words += ["--cache", str(folder / "cache" / peer.name), "--token-file", str(folder / "token")]
    processes.start(peer.name, peer.host, words, threads=peer.threads)


def result_of(fleet: str, events: Sequence[dict[str, Any]]) -> Result:
    """What the events of a finished run say of the plan that it followed for most of its steps."""
    seconds: dict[int, list[float]] = {event["generation"]: [] for event in events if event["event"] == "plan"}
    for event in events:
        if event["event"] == "step":
            seconds[_plan_of(event["generation"], seconds)].append(event["seconds"])
    generation = max(seconds, key=lambda one: (len(seconds[one]), one))
    plan = next(event for event in events if event["event"] == "plan" and event["generation"] == generation)
    steps = seconds[generation][WARM_UP_STEPS:] or seconds[generation]
    memory = {
        event["peer"]: StageResult(
            peer=event["peer"], predicted_bytes=event["predicted"], measured_bytes=max(0.0, event["measured"])
        )
        for event in events
        if event["event"] == "prediction" and event["what"] == "memory_bytes"
    }
    holders = [peer for stage in plan["stages"] for peer in stage["peers"]]
    return Result(
        fleet=fleet,
        stages=len(plan["stages"]),
        predicted_seconds=plan["predicted_step_seconds"],
        measured_seconds=statistics.median(steps),
        steps=tuple(steps),
        memory=tuple(memory[peer] for peer in holders if peer in memory),
    )


def _plan_of(generation: int, plans: Iterable[int]) -> int:
    """A void step grows the generation without a new plan."""
    return max(plan for plan in plans if plan <= generation)


def table(results: Sequence[Result], skipped: Sequence[tuple[str, str]]) -> str:
    """The figures for people."""
    lines = [
        f"{'fleet':22} {'stages':>6} {'predicted':>10} {'measured':>10} {'error':>7}   memory of each stage, predicted/measured"
    ]
    for one in results:
        memory = ", ".join(
            f"{stage.predicted_bytes / 2**20:.0f}/{stage.measured_bytes / 2**20:.0f} MiB {stage.error:+.0%}"
            for stage in one.memory
        )
        times = f"{one.predicted_seconds:8.3f} s {one.measured_seconds:8.3f} s"
        lines.append(f"{one.fleet:22} {one.stages:6} {times} {one.error:+7.1%}   {memory}")
    lines += [f"{name:22} skipped: {reason}" for name, reason in skipped]
    if results:
        errors = [abs(one.error) for one in results]
        within = sum(error <= 0.1 for error in errors)
        lines.append(
            f"{within} of {len(results)} fleets within 10 %; largest {max(errors):.1%}, median {statistics.median(errors):.1%}"
        )
    return "\n".join(lines)


def run(
    fleets: Sequence[BenchmarkFleet], hosts: Sequence[Host], options: argparse.Namespace
) -> tuple[list[Result], list[tuple[str, str]]]:
    """Every fleet, one after the other; those that cannot run here, or fail, with the reason."""
    results, skipped = [], []
    for fleet in fleets:
        reason = fleet.why_not(hosts)
        if reason:
            skipped.append((fleet.name, reason))
            continue
        folder = Path(tempfile.mkdtemp(prefix=f"atoll-fleet-{fleet.name}-"))
        try:
            found = measure(fleet, fleet.hosts_of(hosts), options, folder)
        except Failed as failure:
            skipped.append((fleet.name, str(failure)))
            continue
        shutil.rmtree(folder)  # kept, for its logs, when the run failed
        results.append(found)
        said = f"predicted {found.predicted_seconds:.3f} s, measured {found.measured_seconds:.3f} s, {found.error:+.1%}"
        print(f"{fleet.name}: {said}", file=sys.stderr, flush=True)
    return results, skipped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleets", help="names of fleets, joined by commas; all by default")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=WIDTH, help="of the model; a step takes as the square of it")
    parser.add_argument("--list", action="store_true", help="say which fleets there are, and end")
    options = parser.parse_args()
    names = options.fleets.split(",") if options.fleets else list(FLEETS)
    unknown = [name for name in names if name not in FLEETS]
    if unknown:
        parser.error(f"there is no fleet {unknown[0]!r}; write some of {', '.join(FLEETS)}")
    if options.list:
        print("\n".join(f"{fleet.name:22} {fleet.about}" for fleet in FLEETS.values()))
        return 0
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * cores:
        print(f"fleets: the machine is busy (a load of {load:.1f} on {cores} cores): figures mean little", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no process outlives this one
    results, skipped = run([FLEETS[name] for name in names], hosts_of_environment(), options)
    print(table(results, skipped))
    listed = [{"fleet": name, "reason": reason} for name, reason in skipped]
    figures = [one.as_dict() for one in results]
    print(json.dumps({"machine": {**machine(), "load": load}, "results": figures, "skipped": listed}))
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main())
