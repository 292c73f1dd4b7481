"""The two sides of the comparison, each started as processes and measured once: Atoll and torch.distributed.pipelining."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from atoll.coordinator.cli.invite import invite_for_swarm
from setting import Host, Setting, free_port

ROOT = Path(__file__).resolve().parents[1]
SOURCE_ROOTS = ("coordinator", "peer", "protocol", "compression", "benchmarks")
LIMIT_SECONDS = 900.0
ADDRESS_SECONDS = 60.0
POLL_SECONDS = 0.05
POLITE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One round of one side: the seconds of its steps after the warm-up, and of all from the first process to the last.
    ``events`` is what Atoll told of its run."""

    step_seconds: tuple[float, ...]
    total_seconds: float
    events: tuple[dict[str, Any], ...] = ()


class Failed(Exception):
    """A side that did not finish; the message ends with what its processes said last."""


class Processes:
    """The processes of one round; none outlives it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[tuple[str, subprocess.Popen[str]]] = []

    def start(
        self, name: str, host: Host, words: Sequence[str], *, threads: int = 1, stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        """Starts a Python command on ``host``; what it says on standard error goes to ``NAME.log``."""
        path = os.pathsep.join([str(ROOT / root) for root in SOURCE_ROOTS])
        variables = [f"PYTHONPATH={path}", f"OMP_NUM_THREADS={threads}", f"MKL_NUM_THREADS={threads}"]
        with open(self._folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                [*host.exec, "env", *variables, sys.executable, *words],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                process_group=0,
            )
        self._started.append((name, process))
        return process

    @contextlib.contextmanager
    def limited(self, seconds: float = LIMIT_SECONDS) -> Iterator[None]:
        """Ends every process after the limit, so that no read from one waits for ever, and at the end in any case."""
        timer = threading.Timer(seconds, self.kill)
        timer.start()
        patience = 0.0
        try:
            yield
            patience = POLITE_SECONDS
        finally:
            timer.cancel()
            for _, process in self._started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience)
            self.kill()

    def kill(self) -> None:
        """Ends every process at once."""
        for _, process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()

    def failure(self, what: str) -> Failed:
        """The error of a round that did not finish."""
        said = []
        for name, process in self._started:
            lines = (self._folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
            said.append(f"  {name} (exit status {process.poll()}): {lines[-1] if lines else 'said nothing'}")
        return Failed("\n".join([f"{what}; logs are in {self._folder}", *said]))


def measure_atoll(setting: Setting, hosts: Sequence[Host], folder: Path) -> Measured:
    """A coordinator on the first host, a peer on each of the others in turn (or all on the one there is)."""
    began = time.perf_counter()
    state = folder / "state"
    (folder / "job.yaml").write_text(yaml.safe_dump(setting.job()))
    processes = Processes(folder)
    peer_hosts = list(hosts[1:]) or list(hosts)
    words = ["-m", "atoll.coordinator", "run", str(folder / "job.yaml"), "--state", str(state), "--json"]
    words += ["--listen", f"{hosts[0].address}:0", "--min-peers", str(setting.stages)]
    ends: list[float] = []
    with processes.limited():
        coordinator = processes.start("coordinator", hosts[0], words, threads=setting.threads)
        address = address_of(state, coordinator, processes)
        (folder / "token").write_text(invite_for_swarm(state))
        for number in range(setting.stages):
            host = peer_hosts[number % len(peer_hosts)]
            join = ["-m", "atoll.peer", "join", address, "--name", f"peer-{number + 1}", "--device", "cpu"]
            join += ["--threads", str(setting.threads), "--listen", f"{host.address}:0", "--cache", str(folder / "cache")]
            join += ["--token-file", str(folder / "token")]
            processes.start(f"peer-{number + 1}", host, join, threads=setting.threads)
        assert coordinator.stdout is not None
        events = []
        for line in coordinator.stdout:
            events.append(json.loads(line))
            if events[-1]["event"] == "step":
                ends.append(time.perf_counter())
            if len(ends) == setting.warmup + setting.steps:
                processes.kill()  # writing the weights would take minutes where links are slow, and is no step
                break
    if len(ends) != setting.warmup + setting.steps:
        raise processes.failure(f"Atoll finished {len(ends)} of {setting.warmup + setting.steps} steps")
    seconds = [end - before for before, end in itertools.pairwise(ends)]
    total = time.perf_counter() - began
    return Measured(step_seconds=tuple(seconds[-setting.steps :]), total_seconds=total, events=tuple(events))


def address_of(state: Path, coordinator: subprocess.Popen[str], processes: Processes) -> str:
    deadline = time.monotonic() + ADDRESS_SECONDS
    while time.monotonic() < deadline and coordinator.poll() is None:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            return str(json.loads((state / "address.json").read_text())["address"])
        time.sleep(POLL_SECONDS)
    raise processes.failure("Atoll's coordinator did not begin to listen")


def measure_torch(setting: Setting, hosts: Sequence[Host], folder: Path) -> Measured:
    """A rank on each host in turn, the first one left out where there are several, as it is Atoll's coordinator's."""
    began = time.perf_counter()
    rank_hosts = list(hosts[1:]) or list(hosts)
    rendezvous = f"{rank_hosts[0].address}:{free_port()}"
    processes = Processes(folder)
    with processes.limited():
        ranks = []
        for rank in range(setting.stages):
            host = rank_hosts[rank % len(rank_hosts)]
            words = [str(ROOT / "benchmarks" / "torch_baseline.py"), "--setting", setting.to_json(), "--rank", str(rank)]
            words += ["--address", host.address, "--rendezvous", rendezvous]
            ranks.append(processes.start(f"rank-{rank}", host, words, threads=setting.threads))
        assert ranks[0].stdout is not None
        output = ranks[0].stdout.read().strip()
    if not output:
        raise processes.failure("torch.distributed.pipelining did not finish")
    return Measured(step_seconds=tuple(json.loads(output)["step_seconds"]), total_seconds=time.perf_counter() - began)
