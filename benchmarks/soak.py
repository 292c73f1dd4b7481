"""A swarm that runs for an hour while peers are killed and come back: does anything grow?

    python benchmarks/soak.py                                        an hour, a kill every two minutes
    python benchmarks/soak.py --minutes 4 --kill-every 20 --sample-every 2

A coordinator with its page, and peers, one more than there are stages, train a small GPT. Every so often, when all are there,
the one of two peers that holds a stage is killed with SIGKILL and started again at once; the others are never touched. All
the while one stream of the page is read, another comes and goes, and Prometheus' numbers are fetched. Measured of each
process that lives all along, from the first step on: resident memory, open files, sockets, threads and what it has logged.
Slopes are of a straight line through the samples after the first tenth, but not after less than 90 s or more than ten minutes.
Then comes what is found to grow (exit status 1), or that nothing does. The last line is JSON; how far it is goes to standard
error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from atoll.coordinator.cli.invite import invite_for_swarm
from atoll.protocol.folders import paths_in
from contestants import Failed, Processes, address_of
from pipeline import machine
from setting import LOOPBACK

COORDINATOR = "coordinator"
VICTIMS = ("peer-1", "peer-2")
"""Who is killed. With one peer more than stages, one of them holds a stage."""
SETTLING_SECONDS = 600.0
SETTLING_SHARE = 0.1
IDLE_SECONDS = 90.0
"""A connection that nobody uses any more is there for a minute at most (``grpc.max_connection_idle_ms``)."""
PAGE_SECONDS = 60.0
START_SECONDS = 300.0
QUANTITIES = ("resident_bytes", "open_files", "sockets", "threads", "log_bytes")
FLAT_SHARE_AN_HOUR = 0.03
"""By how much of what is resident at first the line may rise in an hour: noise of an allocator that reuses what it frees."""
FLAT_BYTES = 8 * 2**20
"""Less than that is no growth either, however short it was looked."""
HELD_A_KILL, FEW = 0.1, 3.0
"""Files, sockets, threads that may be more at the end of the line: what is left of each kill would be one at least."""
LOGGED_BYTES_AN_HOUR = 16 * 2**20
"""A file's worth of the coordinator's log, which keeps four."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How long, and on what model."""

    minutes: float = 60.0
    kill_every: float = 120.0
    sample_every: float = 10.0
    stages: int = 3
    width: int = 64
    layers: int = 4
    context: int = 64

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(f"peer-{number}" for number in range(1, self.stages + 2))

    @property
    def settling_seconds(self) -> float:
        seconds = 60.0 * self.minutes
        return min(SETTLING_SECONDS, max(IDLE_SECONDS, SETTLING_SHARE * seconds), seconds / 2)

    def job(self) -> dict[str, Any]:
        options = {"layers": self.layers, "width": self.width, "heads": 2, "context": self.context, "vocabulary": 256}
        return {
            "name": "soak",
            "model": {"builtin": "gpt", "options": options},
            "data": {"random": {"kind": "tokens", "vocabulary": 256}, "sequence_length": self.context},
            "training": {"steps": 10**6, "batch": 8, "microbatch": 2, "evaluate_every": None},
            "network": {"compression": "raw"},
            "durability": {"snapshot_every": 200, "copies": 1},
            "plan": {"stages": self.stages},
        }


@dataclass(slots=True, kw_only=True)
class Series:
    """What was seen of one process: moments, and for each quantity a value a moment."""

    moments: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in QUANTITIES})

    def add(self, moment: float, **values: float) -> None:
        self.moments.append(moment)
        for name, value in values.items():
            self.values[name].append(value)

    def after(self, seconds: float) -> Series:
        """Without what was seen before."""
        first = sum(moment < seconds for moment in self.moments)
        return Series(moments=self.moments[first:], values={name: kept[first:] for name, kept in self.values.items()})

    def slope_an_hour(self, name: str) -> float:
        """Of the straight line with the least squares."""
        if len(self.moments) < 2:
            return 0.0
        return 3600.0 * statistics.linear_regression(self.moments, self.values[name]).slope

    def rise(self, name: str) -> float:
        """Of that line, from the first sample to the last."""
        return self.slope_an_hour(name) * (self.moments[-1] - self.moments[0]) / 3600.0

    def figures(self, name: str) -> dict[str, float]:
        values = self.values[name]
        return {"first": values[0], "last": values[-1], "most": max(values), "an_hour": self.slope_an_hour(name)}


def growing(name: str, series: Series, kills: int) -> Iterator[str]:
    """What of a process grows beyond measure, in sentences; ``kills`` is how often another one was killed meanwhile."""
    hours = (series.moments[-1] - series.moments[0]) / 3600.0
    resident = series.rise("resident_bytes")
    if resident > max(FLAT_BYTES, FLAT_SHARE_AN_HOUR * hours * series.values["resident_bytes"][0]):
        yield f"{name}: resident memory rose by {resident / 2**20:.1f} MiB in {60.0 * hours:.0f} minutes"
    for held in ("open_files", "sockets", "threads"):
        if series.rise(held) > max(FEW, HELD_A_KILL * kills):
            yield f"{name}: {series.rise(held):.1f} {LABELS[held]} more after {kills} kills"
    if series.rise("log_bytes") > LOGGED_BYTES_AN_HOUR * max(hours, 0.1):
        yield f"{name}: logged {series.rise('log_bytes') / 2**20:.1f} MiB in {60.0 * hours:.0f} minutes"


class Soak:
    """One swarm, from its start to its end."""

    def __init__(self, options: Options, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._state = folder / "state"
        self._processes = Processes(folder)
        self._living: dict[str, subprocess.Popen[str]] = {}
        self._holders: frozenset[str] = frozenset()
        self._here: frozenset[str] = frozenset()
        self._series: dict[str, Series] = {}
        self.counts: Counter[str] = Counter()
        self.stream_bytes = 0

    def run(self) -> dict[str, Any]:
        """Trains, kills and measures; raises Failed when the swarm ends, or a process that nobody killed does."""
        with self._processes.limited(60.0 * self._options.minutes + 600.0):
            address = self._start_coordinator()
            for name in self._options.peers:
                self._start_peer(name, address)
            page = self._page()
            self._await_training()
            threading.Thread(target=self._follow, args=(page,), daemon=True).start()
            began = time.monotonic()
            kills = self._go_on(address, page, began)
            seconds = time.monotonic() - began
            self._living[COORDINATOR].send_signal(signal.SIGINT)
        return self._result(seconds, kills)

    def _start_coordinator(self) -> str:
        job = self._folder / "job.yaml"
        job.write_text(yaml.safe_dump(self._options.job()))
        words = ["-m", "atoll.coordinator", "run", str(job), "--state", str(self._state), "--json", "--page", "127.0.0.1:0"]
        words += ["--listen", "127.0.0.1:0", "--min-peers", str(len(self._options.peers))]
        coordinator = self._living[COORDINATOR] = self._processes.start(COORDINATOR, LOOPBACK, words)
        threading.Thread(target=self._read, args=(coordinator,), daemon=True).start()
        address = address_of(self._state, coordinator, self._processes)
        (self._folder / "token").write_text(invite_for_swarm(self._state))
        return address

    def _start_peer(self, name: str, address: str) -> None:
        words = ["-m", "atoll.peer", "join", address, "--name", name, "--device", "cpu", "--threads", "1"]
        words += ["--cache", str(self._folder / "cache" / name), "--token-file", str(self._folder / "token")]
        self._living[name] = self._processes.start(name, LOOPBACK, words)

    def _read(self, coordinator: subprocess.Popen[str]) -> None:
        """Counts events; nothing of them is kept but who holds stages, and who is here."""
        assert coordinator.stdout is not None
        for line in coordinator.stdout:
            event = json.loads(line)
            self.counts[event["event"]] += 1
            if event["event"] == "plan":
                self._holders = frozenset(peer for stage in event["stages"] for peer in stage["peers"])
            elif event["event"] == "peer" and event["state"] == "joined":
                self._here |= {event["name"]}
            elif event["event"] == "peer" and event["state"] in ("lost", "left"):
                self._here -= {event["name"]}

    def _page(self) -> str:
        """Where the page is, as the coordinator tells people."""
        log = self._folder / f"{COORDINATOR}.log"
        deadline = time.monotonic() + PAGE_SECONDS
        while time.monotonic() < deadline:
            if found := re.search(r"the run's page is (\S+)", log.read_text()):
                return found[1]
            time.sleep(0.1)
        raise self._processes.failure("there is no page")

    def _await_training(self) -> None:
        """Returns once a step is committed."""
        deadline = time.monotonic() + START_SECONDS
        while not self.counts["step"]:
            self._check()
            if time.monotonic() > deadline:
                raise self._processes.failure(f"no step was committed within {START_SECONDS:g} s")
            time.sleep(0.1)

    def _follow(self, page: str) -> None:
        """Reads the page's stream all along."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{page}api/stream", timeout=600.0) as stream:
            for line in stream:
                self.stream_bytes += len(line)

    def _look_in(self, page: str) -> None:
        """What a browser that comes and goes does, and Prometheus."""
        with urllib.request.urlopen(f"{page}api/stream", timeout=60.0) as stream:
            stream.readline()
        with urllib.request.urlopen(f"{page}metrics", timeout=60.0) as numbers:
            numbers.read()

    def _go_on(self, address: str, page: str, began: float) -> int:
        """Samples and kills until the time is over; how many were killed."""
        options, kills = self._options, 0
        next_sample, next_kill = began, began + options.kill_every
        while (now := time.monotonic()) - began < 60.0 * options.minutes:
            self._check()
            self._look_in(page)
            self._sample(now - began)
            if now >= next_kill and self._here >= set(options.peers):
                kills += 1
                self._kill(kills, address)
                next_kill = max(next_kill, now - options.kill_every) + options.kill_every
            next_sample += options.sample_every
            time.sleep(max(0.0, next_sample - time.monotonic()))
        return kills

    def _check(self) -> None:
        for name, process in self._living.items():
            if process.poll() is not None:
                raise self._processes.failure(f"{name} ended, and nobody had killed it")

    def _kill(self, number: int, address: str) -> None:
        """SIGKILL to a victim that holds a stage, the one and the other in turn where both do."""
        turn = VICTIMS[number % 2 :] + VICTIMS[: number % 2]
        victim = next((name for name in turn if name in self._holders), turn[0])
        self._living[victim].kill()
        self._living[victim].wait()
        say(f"kill {number}: {victim}, after {self.counts['step']} steps")
        self._start_peer(victim, address)

    def _sample(self, moment: float) -> None:
        for name, process in self._living.items():
            if name in VICTIMS:
                continue
            seen = psutil.Process(process.pid)
            self._series.setdefault(name, Series()).add(
                moment,
                resident_bytes=seen.memory_info().rss,
                open_files=seen.num_fds(),
                sockets=len(seen.net_connections("all")),
                threads=seen.num_threads(),
                log_bytes=self._logged(name),
            )

    def _logged(self, name: str) -> int:
        """What a process has written for people."""
        files = [*paths_in(self._folder, f"{name}.log"), *paths_in(self._state / "logs", f"{name}.log*")]
        return sum(file.stat().st_size for file in files)

    def _result(self, seconds: float, kills: int) -> dict[str, Any]:
        settled = {name: series.after(self._options.settling_seconds) for name, series in self._series.items()}
        return {
            "machine": machine(),
            "seconds": seconds,
            "kills": kills,
            "counts": dict(self.counts),
            "stream_bytes": self.stream_bytes,
            "state_bytes": sum(file.stat().st_size for file in self._state.rglob("*") if file.is_file()),
            "growing": [line for name, series in settled.items() for line in growing(name, series, kills)],
            "processes": {
                name: {quantity: series.figures(quantity) for quantity in QUANTITIES} for name, series in settled.items()
            },
            "resident_bytes": {name: series.values["resident_bytes"] for name, series in self._series.items()},
        }


def say(what: str) -> None:
    """How far it is."""
    print(what, file=sys.stderr, flush=True)


def table(result: dict[str, Any]) -> Iterator[str]:
    """The figures for people."""
    counts = result["counts"]
    yield (
        f"{result['seconds'] / 60.0:.0f} minutes, {result['kills']} kills, {counts.get('step', 0)} steps, "
        f"{counts.get('recovered', 0)} recoveries, {counts.get('plan', 0)} plans"
    )
    yield f"{'process':14} {'':16} {'first':>10} {'last':>10} {'most':>10} {'an hour':>10}"
    for name, quantities in result["processes"].items():
        for quantity, figures in quantities.items():
            unit = 2**20 if quantity == "resident_bytes" else 2**10 if quantity == "log_bytes" else 1
            shown = " ".join(f"{figures[key] / unit:10.1f}" for key in ("first", "last", "most", "an_hour"))
            yield f"{name:14} {LABELS[quantity]:16} {shown}"
    yield from result["growing"] or ["nothing grows: memory is flat, and no file, socket or thread is left of a kill"]


LABELS = {
    "resident_bytes": "resident, MiB",
    "open_files": "open files",
    "sockets": "sockets",
    "threads": "threads",
    "log_bytes": "logged, KiB",
}


def options_of(words: Sequence[str] | None = None) -> Options:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Options()
    for name in Options.__slots__:
        value = getattr(defaults, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default {value}")
    return Options(**vars(parser.parse_args(words)))


def main() -> int:
    """Measures and prints."""
    options = options_of()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no process outlives this one
    folder = Path(tempfile.mkdtemp(prefix="atoll-soak-"))
    try:
        result = Soak(options, folder).run()
    except Failed as failure:
        say(str(failure))
        return 1
    shutil.rmtree(folder)  # kept, for its logs, when the run failed
    print("\n".join(table(result)))
    print(json.dumps(result))
    return 1 if result["growing"] else 0


if __name__ == "__main__":
    sys.exit(main())
