"""The fleets of `fleets.py`: which peers, where, under which caps, and what is asked of the plan."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from setting import LOOPBACK, Host

WIDTH = 256
MODEL = {"layers": 8, "heads": 4, "context": 128, "vocabulary": 256, "dropout": 0.0, "tied": False}
"""A step of 16 sequences takes one thread of a present processor one to two seconds."""
TASKSET = "taskset"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMember:
    """A peer: its threads, and what its owner caps, in the words of `atoll-peer join`."""

    threads: int = 1
    caps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkFleet:
    """``cores`` confines all processes to so many of them, so that figures mean the same on a larger machine. ``num_hosts``
    are the hosts that the peers are spread over, besides the coordinator's; 0 is this machine. ``plan`` and ``training`` are
    sections of the job."""

    name: str
    about: str
    members: tuple[FleetMember, ...]
    cores: int = 2
    num_hosts: int = 0
    plan: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    def job(self, steps: int, width: int = WIDTH) -> dict[str, Any]:
        """The job as it is written to a file."""
        training = {"steps": steps, "batch": 16, "microbatch": 2, "optimizer": {"name": "adamw"}, **self.training}
        return {
            "name": "fleets",
            "model": {"builtin": "gpt", "options": {**MODEL, "width": width}},
            "data": {"random": {"kind": "tokens", "vocabulary": MODEL["vocabulary"]}, "sequence_length": MODEL["context"]},
            "training": training,
            "network": {"compression": "raw"},
            # As many stages as peers, so that the fleet is what is measured and not the planner's taste.
            "plan": {"stages": len(self.members), **self.plan},
        }

    def why_not(self, hosts: Sequence[Host]) -> str:
        """Why it cannot run here; empty when it can."""
        if self.num_hosts and len(self._named(hosts)) < self.num_hosts + 1:
            wanted = f"a coordinator's host and {self.num_hosts} more"
            return f"it wants {wanted} in ATOLL_TEST_HOSTS, named {self.name}-... or any"
        if not self.num_hosts and shutil.which(TASKSET) is None:
            return f"there is no {TASKSET} to confine processes to {self.cores} cores"
        return ""

    def hosts_of(self, hosts: Sequence[Host]) -> list[Host]:
        """The coordinator's host and then the peers'."""
        if self.num_hosts:
            return self._named(hosts)[: self.num_hosts + 1]
        confined = (TASKSET, "--cpu-list", f"0-{self.cores - 1}")
        return [replace(LOOPBACK, exec=confined)]

    def _named(self, hosts: Sequence[Host]) -> list[Host]:
        """The first host, for the coordinator, and those named after the fleet; all where none is."""
        own = [host for host in hosts[1:] if host.name.startswith(f"{self.name}-")]
        return [*hosts[:1], *(own or hosts[1:])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A peer with its name and host."""

    name: str
    host: Host
    threads: int
    words: tuple[str, ...]


def place(fleet: BenchmarkFleet, hosts: Sequence[Host]) -> list[Placed]:
    """The peers on the hosts after the first in turn, or all on the one there is."""
    there = list(hosts[1:]) or list(hosts)
    return [
        Placed(
            name=f"peer-{number + 1}",
            host=there[number % len(there)],
            threads=member.threads,
            words=("--name", f"peer-{number + 1}", "--threads", str(member.threads), *member.caps),
        )
        for number, member in enumerate(fleet.members)
    ]


ONE = FleetMember()
TWO_THREADS = FleetMember(threads=2)


def _capped(*caps: str) -> FleetMember:
    return FleetMember(caps=caps)


_ALL = (
    BenchmarkFleet(name="one", about="a peer of one thread", members=(ONE,)),
    BenchmarkFleet(name="one-wide", about="a peer of two threads", members=(TWO_THREADS,)),
    BenchmarkFleet(name="two", about="two peers of one thread, a core each", members=(ONE, ONE)),
    BenchmarkFleet(name="three-on-two", about="three peers of one thread on two cores", members=(ONE,) * 3),
    BenchmarkFleet(name="four-on-two", about="four peers of one thread on two cores", members=(ONE,) * 4),
    BenchmarkFleet(name="uneven", about="a peer of two threads and one of one, on two cores", members=(TWO_THREADS, ONE)),
    BenchmarkFleet(
        name="upload-50",
        about="two peers that send at most 50 Mbps",
        members=(_capped("--max-upload", "50Mbps"),) * 2,
    ),
    BenchmarkFleet(
        name="upload-8",
        about="two peers that send at most 8 Mbps: the links hold the pipeline back",
        members=(_capped("--max-upload", "8Mbps"),) * 2,
    ),
    BenchmarkFleet(
        name="recomputing",
        about="two peers that offer little memory and compute activations again",
        members=(_capped("--max-memory", "540MiB"),) * 2,
        plan={"recompute": True},
    ),
    BenchmarkFleet(
        name="large-microbatches",
        about="two peers, two microbatches of 8 sequences: filling the pipeline is most of the step",
        members=(ONE, ONE),
        training={"microbatch": 8},
    ),
    BenchmarkFleet(
        name="pinned",
        about="two peers, cut so that the second has three quarters of the layers",
        members=(ONE, ONE),
        plan={"pin": {"blocks.1": "peer-1", "blocks.2": "peer-2"}},
    ),
    BenchmarkFleet(name="two-hosts", about="two hosts", members=(ONE,) * 2, num_hosts=2),
    BenchmarkFleet(name="three-hosts", about="three hosts", members=(ONE,) * 3, num_hosts=3),
    BenchmarkFleet(name="four-hosts", about="four hosts", members=(ONE,) * 4, num_hosts=4),
)
FLEETS = {fleet.name: fleet for fleet in _ALL}
