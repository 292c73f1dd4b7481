"""What a swarm costs beside the training itself: the time to its first step, and the memory of its processes.

    python benchmarks/footprint.py

Prints three tables and then, as the last line, the same as JSON:

- seconds from the start of `atoll swarm` to its first step, on the demo's model with four peers;
- for each peer of the benchmark's model, the peak of its resident memory and what of it lies beyond its shard (weights,
  gradients, optimizer state, activations in flight, messages in flight: what the plan predicted);
- the coordinator's resident memory over the steps of a long run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from contestants import ROOT, SOURCE_ROOTS
from pipeline import machine
from setting import Setting

SAMPLE_SECONDS = 0.05
LIMIT_SECONDS = 600.0
MEBIBYTE = 2**20


class Swarm:
    """`atoll swarm` on a job; samples the resident memory of each of its processes until it ends."""

    def __init__(self, job: Path, state: Path, peers: int, *settings: str) -> None:
        path = ":".join(str(ROOT / root) for root in SOURCE_ROOTS)
        words = [sys.executable, "-m", "atoll.coordinator", "swarm", str(job), "--peers", str(peers), "--state", str(state)]
        words += ["--json", *(word for setting in settings for word in ("--set", setting))]
        self.began = time.perf_counter()
        self._process = subprocess.Popen(
            ["env", f"PYTHONPATH={path}", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.peaks: dict[str, int] = {}
        self.resident: dict[str, int] = {}
        self._ended = threading.Event()

    def events(self) -> Iterator[dict[str, Any]]:
        """The run's events as they come; raises SystemExit when the swarm fails."""
        sampler = threading.Thread(target=self._sample)
        limit = threading.Timer(LIMIT_SECONDS, self._process.terminate)
        sampler.start()
        limit.start()
        try:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                yield json.loads(line)
            if self._process.wait() != 0:
                raise SystemExit(f"the swarm ended with exit status {self._process.returncode}")
        finally:
            self._process.terminate()
            self._process.wait()
            limit.cancel()
            self._ended.set()
            sampler.join()

    def _sample(self) -> None:
        swarm = psutil.Process(self._process.pid)
        while not self._ended.wait(SAMPLE_SECONDS):
            with contextlib.suppress(psutil.Error):
                for process in swarm.children(recursive=True):
                    self._look_at(process)

    def _look_at(self, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            name = words[words.index("--name") + 1] if "--name" in words else "coordinator" if "run" in words else ""
            resident = process.memory_info().rss
            self.resident[name] = resident
            self.peaks[name] = max(resident, self.peaks.get(name, 0))


def first_step_seconds(folder: Path) -> float:
    """Seconds from the command to the event of the first step."""
    swarm = Swarm(ROOT / "examples" / "gpt-bytes.yaml", folder, 4, "training.steps=2", "training.evaluate_every=null")
    for event in swarm.events():
        if event["event"] == "step" and event["step"] == 1:
            seconds = time.perf_counter() - swarm.began
    return seconds


def peer_memory(folder: Path) -> list[dict[str, Any]]:
    """For each peer of the benchmark's model its shard and its peak, in bytes."""
    job = folder / "job.yaml"
    job.write_text(yaml.safe_dump(Setting(steps=3).job()))
    swarm = Swarm(job, folder / "state", 4, "training.optimizer={name: adamw, learning_rate: 0.001}")
    stages: list[dict[str, Any]] = []
    for event in swarm.events():
        if event["event"] == "plan":
            stages = event["stages"]
    shards = {peer: stage["predicted_memory_bytes"] for stage in stages for peer in stage["peers"]}
    return [
        {"peer": peer, "shard_bytes": shard, "peak_bytes": swarm.peaks[peer], "beyond_bytes": swarm.peaks[peer] - shard}
        for peer, shard in shards.items()
    ]


def coordinator_memory(folder: Path, steps: int) -> list[dict[str, int]]:
    """The coordinator's resident bytes at a fifth, two fifths, ... of a long run of a tiny model."""
    tiny = Setting(layers=4, width=32, heads=2, context=32, microbatches=2, stages=2, warmup=0, steps=steps)
    job = folder / "job.yaml"
    job.write_text(yaml.safe_dump(tiny.job()))
    swarm = Swarm(job, folder / "state", 2)
    found: list[dict[str, int]] = []
    for event in swarm.events():
        if event["event"] == "step" and event["step"] % (steps // 5) == 0:
            found.append({"step": event["step"], "resident_bytes": swarm.resident["coordinator"]})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="starts of the swarm")
    parser.add_argument("--steps", type=int, default=1000, help="steps of the long run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="atoll-footprint-") as name:
        folder = Path(name)
        starts = [first_step_seconds(folder / f"start-{number}") for number in range(options.rounds)]
        print(f"first step after {statistics.median(starts):.1f} s (median of {', '.join(f'{one:.1f}' for one in starts)})")
        (folder / "peers").mkdir()
        peers = peer_memory(folder / "peers")
        for row in peers:
            sizes = [f"{row[key] / MEBIBYTE:8.0f} MiB" for key in ("shard_bytes", "peak_bytes", "beyond_bytes")]
            print(f"{row['peer']:10} shard {sizes[0]}, peak {sizes[1]}, beyond the shard {sizes[2]}")
        (folder / "long").mkdir()
        growth = coordinator_memory(folder / "long", options.steps)
        for entry in growth:
            print(f"coordinator at step {entry['step']:6}: {entry['resident_bytes'] / MEBIBYTE:8.1f} MiB")
    print(json.dumps({"machine": machine(), "first_step_seconds": starts, "peers": peers, "coordinator": growth}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
