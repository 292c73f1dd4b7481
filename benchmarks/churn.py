"""What losing a peer costs: Atoll's way on with a spare, beside a run that is started again from its last snapshot.

    python benchmarks/churn.py                    30 kills, 3 restarts of everything, twice two minutes: about ten in all
    python benchmarks/churn.py --kills 3 --restarts 1 --width 32 --minutes 0
    python benchmarks/churn.py --kills 0 --restarts 0 --minutes 10 --every 10     one failure in ten minutes, counted

A swarm trains a GPT while a fault plan kills with SIGKILL the peer of one stage after the other, in the middle of a step, and
starts it again; so there is always a spare. Measured is the time from each kill to the next step that is committed for the
first time, and what Atoll says of its parts. The baseline is the same job and the same snapshots: everything is killed, and
started again at once on the same folder. Goodput is what is left of the time when such a failure happens every minute, or every
ten: worked out from these times, and, with ``--minutes``, counted. Then both run for that long with a failure every ``--every``
minutes, the first after half of that, and their steps a second are compared with those of a minute in which nothing fails. The
last line is JSON; how far it is goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from pipeline import machine

PARTS = ("noticed", "planned", "moved", "replayed", "step")
FIRST_KILL = 10
"""A step by which a plan is settled, and a snapshot taken."""
PATIENCE_SECONDS = 180.0
"""For whatever comes next in a swarm; then the benchmark fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """An event of a swarm, and when it came."""

    seconds: float
    event: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.event["event"])


def say(what: str) -> None:
    """How far it is."""
    print(what, file=sys.stderr, flush=True)


class Swarm:
    """A running `atoll swarm --json`."""

    def __init__(self, job: Path, state: Path, peers: int, *words: str) -> None:
        command = [sys.executable, "-m", "atoll.coordinator", "swarm", str(job), "--state", str(state), "--peers", str(peers)]
        self._log = state.with_suffix(".log").open("ab")
        self._process = subprocess.Popen([*command, "--json", *words], stdout=subprocess.PIPE, stderr=self._log, text=True)
        self.lines: list[Line] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            line = Line(seconds=time.time(), event=json.loads(text))
            if line.kind == "recovered":
                say(f"recovered in {line.event['seconds']:.2f} s, at step {line.event['step']}")
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def of(self, kind: str) -> list[Line]:
        return [line for line in self.lines if line.kind == kind]

    @property
    def step(self) -> int:
        """The last step that was committed."""
        return max((line.event["step"] for line in self.of("step")), default=0)

    def until_step(self, step: int, within_seconds: float = PATIENCE_SECONDS) -> None:
        """Waits for a step; raises RuntimeError when it does not come in time."""
        with self._news:
            self._news.wait_for(lambda: self.step >= step or not self._reader.is_alive(), within_seconds)
        if self.step < step:
            raise RuntimeError(f"step {step} did not come; the swarm is at step {self.step}, see {self._log.name}")

    def until_ended(self, within_seconds: float) -> None:
        """Waits for the end; raises RuntimeError when it fails, or takes longer."""
        self._reader.join(within_seconds)
        if self._reader.is_alive() or self._process.wait(PATIENCE_SECONDS) != 0:
            raise RuntimeError(f"the swarm did not finish: see {self._log.name}")

    def kill(self) -> None:
        """SIGKILL to every process of it."""
        try:
            itself = psutil.Process(self._process.pid)
            family = [itself, *itself.children(recursive=True)]
        except psutil.NoSuchProcess:
            family = []
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        self._log.close()


@contextmanager
def started(job: Path, state: Path, peers: int, *words: str) -> Iterator[Swarm]:
    swarm = Swarm(job, state, peers, *words)
    try:
        yield swarm
    finally:
        swarm.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured, and on what model."""

    kills: int = 30
    restarts: int = 3
    minutes: float = 2.0
    every: float = 1.0
    apart: int = 25
    width: int = 128
    layers: int = 6
    context: int = 128
    stages: int = 3
    spares: int = 2
    snapshot_every: str = "auto"

    @property
    def peers(self) -> int:
        return self.stages + self.spares

    @property
    def failures(self) -> list[float]:
        """When something fails in the minutes that are counted, in seconds since they began."""
        every = 60.0 * self.every
        return [(number + 0.5) * every for number in range(max(1, round(self.minutes / self.every)))]

    def job(self, folder: Path, steps: int) -> Path:
        every = self.snapshot_every if self.snapshot_every == "auto" else int(self.snapshot_every)
        options = {"layers": self.layers, "width": self.width, "heads": 2, "context": self.context, "vocabulary": 256}
        path = folder / f"churn-{steps}.yaml"
        job = {
            "name": "churn",
            "model": {"builtin": "gpt", "options": options},
            "data": {"random": {"kind": "tokens", "vocabulary": 256}, "sequence_length": self.context},
            "training": {"steps": steps, "batch": 8, "microbatch": 2, "evaluate_every": None},
            "network": {"compression": "raw"},
            "durability": {"snapshot_every": every, "copies": 1},
            "plan": {"stages": self.stages},
        }
        path.write_text(yaml.safe_dump(job))
        return path


@dataclass(slots=True, kw_only=True)
class Losses:
    """Seconds from each kill to the next step that was committed for the first time; ``parts`` of them, where known."""

    seconds: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    step_seconds: float = 0.0

    def goodput(self, interval_seconds: float) -> float:
        """What is left of the time with such a failure every ``interval_seconds``."""
        lost = statistics.mean(self.seconds) - self.step_seconds
        return max(0.0, 1.0 - lost / interval_seconds)


def fault_plan(options: Options, path: Path, steps: Sequence[int]) -> Path:
    """SIGKILL to the peer of one stage after the other, each in the middle of one of ``steps``; it starts again at once."""
    faults = [
        {"fault": "kill", "stage": number % options.stages, "step": step, "phase": "backward", "restart_after": 0.0}
        for number, step in enumerate(steps)
    ]
    path.write_text(yaml.safe_dump({"faults": faults}))
    return path


def kills(options: Options, folder: Path) -> Losses:
    """A kill every so many steps."""
    steps = [FIRST_KILL + number * options.apart for number in range(options.kills)]
    plan = fault_plan(options, folder / "kills.yaml", steps)
    job = options.job(folder, FIRST_KILL + options.kills * options.apart)
    with started(job, folder / "kills", options.peers, "--chaos", str(plan)) as swarm:
        swarm.until_ended(PATIENCE_SECONDS + options.kills * 60.0)
        return losses_of(swarm.lines)


def losses_of(lines: Sequence[Line]) -> Losses:
    """What the kills of a swarm cost."""
    found = Losses(parts={part: [] for part in PARTS})
    kill: float | None = None
    for line in lines:
        match line.kind:
            case "chaos":
                kill = line.event["time"] if kill is None else kill
            case "step" if kill is not None:
                found.seconds.append(line.seconds - kill)
                kill = None
            case "recovered":
                for part in PARTS:
                    found.parts[part].append(line.event[f"{part}_seconds"])
    found.step_seconds = statistics.median(line.event["seconds"] for line in lines if line.kind == "step")
    return found


def restarts(options: Options, folder: Path) -> Losses:
    """SIGKILL to everything, and a new start from the last snapshot."""
    job, state = options.job(folder, 10**6), folder / "restarts"
    found, steps = Losses(), list[float]()
    target = FIRST_KILL
    for number in range(options.restarts + 1):
        killed = time.time()
        with started(job, state, options.peers) as swarm:
            if number:
                swarm.until_step(target + 1)
                found.seconds.append(next(line for line in swarm.of("step") if line.event["step"] > target).seconds - killed)
                say(f"started again in {found.seconds[-1]:.2f} s, at step {target}")
            swarm.until_step(swarm.step + options.apart)
            steps += [line.event["seconds"] for line in swarm.of("step")]
            target = swarm.step
    found.step_seconds = statistics.median(steps)
    return found


def steps_undisturbed(options: Options, folder: Path) -> float:
    """Steps a second while nothing fails, for a minute at most."""
    minutes = min(1.0, options.minutes)
    say(f"{minutes:g} minutes without a failure")
    with started(options.job(folder, 10**6), folder / "minutes-undisturbed", options.peers) as swarm:
        swarm.until_step(FIRST_KILL)
        return count(swarm, 60.0 * minutes) / (60.0 * minutes)


def steps_with_kills(options: Options, folder: Path, steps_per_second: float) -> float:
    """Steps a second while the peer of a stage is killed in the middle of the step at which a failure is due."""
    say(f"{options.minutes:g} minutes, one kill in {options.every:g}")
    due = [FIRST_KILL + round(seconds * steps_per_second) for seconds in options.failures]
    plan = fault_plan(options, folder / "minutes.yaml", due)
    with started(options.job(folder, 10**6), folder / "minutes", options.peers, "--chaos", str(plan)) as swarm:
        swarm.until_step(FIRST_KILL)
        return count(swarm, 60.0 * options.minutes) / (60.0 * options.minutes)


def steps_with_restarts(options: Options, folder: Path) -> float:
    """Steps a second while everything is killed when a failure is due, and started again from the last snapshot."""
    say(f"{options.minutes:g} minutes, one restart of everything in {options.every:g}")
    job, state, done = options.job(folder, 10**6), folder / "minutes-restarts", 0
    ends = [*options.failures, 60.0 * options.minutes]
    for number, (begin, end) in enumerate(zip([0.0, *ends[:-1]], ends, strict=True)):
        with started(job, state, options.peers) as swarm:
            if not number:
                swarm.until_step(FIRST_KILL)
            count(swarm, end - begin)
            done = max(done, swarm.step)
    return (done - FIRST_KILL) / (60.0 * options.minutes)


def count(swarm: Swarm, seconds: float) -> int:
    """Steps that are committed in that time."""
    before, end = swarm.step, time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.1)
    return swarm.step - before


def spread(values: Sequence[float]) -> dict[str, float]:
    """From the least to the most; empty where nothing was measured."""
    if not values:
        return {}
    ordered = sorted(values)
    nine_tenths = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return {"least": ordered[0], "median": statistics.median(ordered), "nine_tenths": nine_tenths, "most": ordered[-1]}


def table(result: dict[str, Any]) -> Iterator[str]:
    """The figures for people."""
    rows = {}
    if result["kills"]:
        rows = {"Atoll, with a spare": result["kills"], **{f"  {part}": result["parts"][part] for part in result["parts"]}}
    if result["restarts"]:
        rows["everything started again from a snapshot"] = result["restarts"]
    if rows:
        yield f"{'seconds from SIGKILL to the next step':42} {'least':>8} {'median':>8} {'9 of 10':>8} {'most':>8}"
        for name, values in rows.items():
            yield f"{name:42} " + " ".join(f"{values[key]:8.2f}" for key in ("least", "median", "nine_tenths", "most"))
        yield f"\n{'goodput at one failure in, by these times':42} {'1 min':>8} {'10 min':>8}"
        for name, values in result["goodput"].items():
            yield f"{name:42} " + " ".join(f"{value:8.1%}" for value in values.values())
    if counted := result.get("counted"):
        title = f"counted, one failure in {result['every_minutes']:g} min"
        yield f"\n{title:42} {'steps/s':>8} {'goodput':>8}"
        for name, value in counted.items():
            yield f"{name:42} {value:8.2f} {value / counted['undisturbed']:8.1%}"


def counted(options: Options, folder: Path) -> dict[str, float]:
    """Steps a second without failures, and with them on either side."""
    undisturbed = steps_undisturbed(options, folder)
    return {
        "undisturbed": undisturbed,
        "Atoll": steps_with_kills(options, folder, undisturbed),
        "started again from a snapshot": steps_with_restarts(options, folder),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Options()
    for name in Options.__slots__:
        value = getattr(defaults, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default {value}")
    options = Options(**vars(parser.parse_args()))
    with tempfile.TemporaryDirectory(prefix="atoll-churn-") as name:
        folder = Path(name)
        ours = kills(options, folder) if options.kills else Losses()
        theirs = restarts(options, folder) if options.restarts else Losses()
        sides = {"Atoll": ours, "started again from a snapshot": theirs}
        result: dict[str, Any] = {
            "machine": machine(),
            "step_seconds": ours.step_seconds,
            "kills": spread(ours.seconds),
            "num_kills": len(ours.seconds),
            "seconds_of_kills": ours.seconds,
            "parts": {part: spread(values) for part, values in ours.parts.items() if values},
            "restarts": spread(theirs.seconds),
            "goodput": {
                name: {"60": one.goodput(60.0), "600": one.goodput(600.0)} for name, one in sides.items() if one.seconds
            },
        }
        if options.minutes:
            result |= {"every_minutes": options.every, "counted": counted(options, folder)}
    print("\n".join(table(result)))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
