"""Throughput with two replicas of the stage that holds the pipeline back, beside one: predicted, and with processes.

    python benchmarks/replicas.py [--replicas 2] [--factor 12] [--steps 12] [--only simulator|processes]

Two stages, the last one of which has nearly all the work and cannot be cut. Each peer computes FACTOR times longer than a
core of this machine would: a fault plan has them sleep, so that they take no processor from each other, which shows what
replicas do where each has a machine. The simulator is asked for peers of equal speed. Both say the middle of the steps'
seconds, the first ones left out, and how many times faster steps are with the replicas; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from contestants import ROOT

STAGES = ("--set", "plan.stages=2", "--set", "plan.replicas=auto")
WARMING = 3
"""Steps whose seconds do not count."""
GPT = {"layers": 1, "width": 64, "heads": 2, "context": 128, "vocabulary": 8192, "tied": False}
"""Nearly all of it is the head, which no cut divides."""


def job(folder: Path, options: argparse.Namespace) -> Path:
    """Microbatches enough to share, on made-up tokens."""
    path = folder / "job.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model": {"builtin": "gpt", "options": GPT},
                "data": {"random": {"kind": "tokens", "vocabulary": 8192}, "sequence_length": 128},
                "training": {"steps": options.steps, "batch": 16, "microbatch": 1},
                "network": {"compression": "raw"},
                "durability": {"snapshot_every": 1000},
            }
        )
    )
    return path


def pins(count: int) -> str:
    """The first peer has stage 0, the others stage 1."""
    return f"plan.pin={{0: [peer-1], 1: [{', '.join(f'peer-{2 + index}' for index in range(count))}]}}"


def predicted(folder: Path, count: int, options: argparse.Namespace) -> float:
    """Seconds of a step, by the simulator."""
    fleet = folder / f"fleet-{count}.yaml"
    speeds = [10.0 / options.factor] * (1 + count)
    peers = [
        {"name": f"peer-{number}", "flops": f"{speed:g}GFLOPS", "memory": "8GiB", "upload": "1Gbps", "download": "1Gbps"}
        for number, speed in enumerate(speeds, 1)
    ]
    fleet.write_text(yaml.safe_dump({"peers": peers}))
    told = _atoll("plan", job(folder, options), "--fleet", fleet, *STAGES, "--json")
    plans: list[dict[str, Any]] = [event for event in told if "predicted_step_seconds" in event]
    return float(plans[-1]["predicted_step_seconds"])


def measured(folder: Path, count: int, options: argparse.Namespace) -> float:
    """Seconds of a step, by processes."""
    chaos = folder / f"chaos-{count}.yaml"
    slow = [
        {"fault": "slow", "peer": f"peer-{1 + index}", "step": 1, "phase": "forward", "factor": options.factor}
        for index in range(1 + count)
    ]
    chaos.write_text(yaml.safe_dump({"faults": slow}))
    state = folder / f"state-{count}"
    words = ("--peers", str(1 + count), "--set", pins(count), "--chaos", chaos, "--state", state, "--json")
    steps = [event for event in _atoll("swarm", job(folder, options), *words) if event["event"] == "step"]
    return float(statistics.median(event["seconds"] for event in steps[WARMING:]))


def _atoll(*words: str | Path) -> list[dict[str, Any]]:
    """The events that a command prints; raises SystemExit, with what it said, when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "atoll.coordinator", *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        raise SystemExit(f"atoll {words[0]} failed: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--factor", type=float, default=12.0, help="how many times longer peers compute")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", choices=("simulator", "processes"))
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="atoll-benchmark-replicas-") as name:
        for what, seconds in (("simulator", predicted), ("processes", measured)):
            if options.only in (None, what):
                alone, together = (seconds(Path(name), count, options) for count in (1, options.replicas))
                found[what] = {"one": alone, "several": together, "gain": alone / together}
                print(f"{what}: {alone:.3f} s a step with 1, {together:.3f} s with {options.replicas}: {alone / together:.2f}x")
    print(json.dumps(found | {"replicas": options.replicas, "factor": options.factor}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
