"""What a person decides about a peer: the flags of ``atoll-peer join``, checked once."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from atoll.protocol.channel import Address, parse_address
from atoll.protocol.errors import JobError
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.hive import HivePlace, numeric
from atoll.protocol.quantities import parse_bytes, parse_rate, parse_seconds

ANSWER_SECONDS = 10.0
HAND_OVER_SECONDS = 30.0  # providers of spot instances give 30 s or more
ANY_PORT_LOOPBACK = "127.0.0.1:0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """With a coordinator that is not there yet, or lost, in seconds; they may be started in any order. ``longest_pause`` is
    well below what a restarted coordinator waits for its peers; a peer that is alone for ``keep`` writes its state to its
    disk, and ends after ``end``."""

    first_pause: float = 0.2
    longest_pause: float = 5.0
    between_logs: float = 60.0
    keep: float = 60.0
    end: float = 1800.0

    def words(self, coordinator: Address, problem: object) -> str:
        """For people: whom a peer that was in no run yet waits for."""
        return f"waiting for the coordinator at {coordinator}, up to {self.end:g} s (--wait): {problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """``listen`` and ``advertise`` None mean: fit for how the coordinator is reached. ``outbound_only``: nobody else dials this
    peer, which listens within its own machine alone. ``threads`` None: torch's default.

    ``flops_per_second`` declares a speed, where it is known better than a short measurement tells; None measures it.
    ``memory_bytes`` caps what this process takes in all; None means all that is free. ``answer_seconds`` is how long the
    coordinator may take to answer Join at first, and twice as long at each further attempt. What is measured is kept in the
    folder ``cache``, snapshots in ``snapshots``, or there too where that is None; both None keep nothing. ``max_upload`` and
    ``max_download``, in bytes a second, bound all that this peer sends and what others send to it. One that is asked to leave
    stays ``hand_over_seconds`` at most; ``notice_url`` is asked all the time whether this machine is about to be taken away.
    ``token`` is the operator's invitation, or it is in ``token_file``, once that is there; a peer that has been in the run
    before may do without. ``insecure``: in plain text, within one machine. ``chaos`` is what a fault plan has this peer do,
    ``patience`` is for a coordinator that is not there; ``whereabouts`` says where it is by then, for one that is found by its
    run's name, or raises AtollError. hivemind, where the run averages with it, listens on ``hive_port``, 0 for any. Prometheus
    is shown this peer's numbers at ``metrics``.
    """

    coordinator: Address
    name: str
    device: str = "cpu"
    threads: int | None = None
    flops_per_second: float | None = None
    memory_bytes: int | None = None
    listen: str | None = None
    advertise: str | None = None
    outbound_only: bool = False
    answer_seconds: float = ANSWER_SECONDS
    cache: Path | None = None
    snapshots: Path | None = None
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    insecure: bool = False
    max_upload: float | None = None
    max_download: float | None = None
    chaos: FaultPoints = field(default_factory=FaultPoints, compare=False, repr=False)
    hand_over_seconds: float = HAND_OVER_SECONDS
    notice_url: str | None = None
    patience: Patience = field(default_factory=Patience)
    hive_port: int = 0
    metrics: str | None = None
    whereabouts: Callable[[], Awaitable[Address]] | None = field(default=None, compare=False, repr=False)

    @property
    def listen_address(self) -> str:
        """Where to listen: loopback suffices when the coordinator is there too, and for what comes through a relay."""
        if self.outbound_only:
            return ANY_PORT_LOOPBACK
        if self.listen is not None:
            return self.listen
        if self.coordinator.is_loopback:
            return "[::1]:0" if self.coordinator.host == "::1" else ANY_PORT_LOOPBACK
        return "[::]:0" if ":" in self.coordinator.host else "0.0.0.0:0"

    def advertised_address(self, bound: str) -> str:
        """The address that other peers are told, given the one this peer is bound to; empty where there is none to tell."""
        if self.outbound_only:
            return ""
        if self.advertise is not None:
            address = parse_address(self.advertise, "--advertise")
            port = address.port or parse_address(bound).port
            return str(Address(address.host, port))
        address = parse_address(bound)
        if not address.is_unspecified:
            return bound
        return str(Address(_local_address_towards(self.coordinator), address.port))

    def hive_place(self, bound: str) -> HivePlace:
        """Where hivemind listens for the replicas of this peer's stage, given the address that the peer is bound to."""
        listening, told = parse_address(bound), parse_address(self.advertised_address(bound))
        return HivePlace(host=numeric(listening.host), port=self.hive_port, advertised=told.host)


def software_version() -> str:
    """The installed version of Atoll, for people."""
    try:
        return importlib.metadata.version("atoll")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "unknown"


def default_cache() -> Path:
    """Where this user's programs keep what they can make again, as the platform has it."""
    if sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        folder = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "atoll"


def default_name() -> str:
    """A name that is unique unless two machines share a host name."""
    return f"{socket.gethostname()}-{os.getpid()}"


def size_of_flag(text: str, flag: str) -> int:
    """``8GiB``, ``500MB``, ``1.5G`` in bytes; raises JobError that names the flag."""
    size = parse_bytes(text)
    if not size:
        raise JobError(flag, f"{text!r} is not a size; write for example 8GiB or 500MB")
    return size


def rate_of_flag(text: str, flag: str) -> float:
    """``20Mbps`` in bytes a second; raises JobError that names the flag."""
    rate = parse_rate(text)
    if not rate:
        raise JobError(flag, f"{text!r} is not a rate; write for example 20Mbps, bits a second and not bytes")
    return rate


def seconds_of_flag(text: str, flag: str) -> float:
    """``90s`` in seconds; raises JobError that names the flag."""
    seconds = parse_seconds(text)
    if not seconds:
        raise JobError(flag, f"{text!r} is not a time; write for example 1800s")
    return seconds


def _local_address_towards(coordinator: Address) -> str:
    """This machine's address on the way to the coordinator; asks the routing table, sends nothing."""
    family, kind, protocol, _, where = socket.getaddrinfo(coordinator.host, coordinator.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])
