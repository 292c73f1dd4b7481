"""Who is connected: admission, leases and what each peer last said of itself. Pure; the state machine decides what follows.

A peer holds a lease, renewed by any message. The clock is handed in. Where the coordinator itself stands still or crawls (its
process was stopped, its machine is overloaded), what peers sent is still to be read; so of the time between two looks at the
leases only as much counts as lies between two looks of a coordinator in good health.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from atoll.compression.policy import Rung
from atoll.coordinator.run.snapshots import HeldPart
from atoll.protocol.channel import PROTOCOL_VERSION, Address, parse_address
from atoll.protocol.errors import JobError
from atoll.protocol.ids import PEER_NAME, PeerId

LEASE_SECONDS = 10.0
LOOKS_PER_LEASE = 20


class Reach(StrEnum):
    """Whether others can dial a peer: as the coordinator found when it did."""

    UNKNOWN = "unknown"
    REACHABLE = "reachable"
    OUTBOUND_ONLY = "outbound-only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What a peer says of itself when it joins; its ``address`` is empty where it accepts no connection. Peers of one
    ``machine`` (empty: it has none in common with others) share its ``cores``; the owner's caps are None where there are none.
    ``snapshots`` are what it has on its disk, by the id of the run. ``instance`` is the process's own: whoever says the same
    one is that peer, come back."""

    protocol_version: int
    version: str
    name: str
    address: str
    device: str
    threads: int
    memory_bytes: int
    flops_per_second: float
    machine: str = ""
    cores: int = 0
    disk_bytes: int = 0
    handling_seconds: float = 0.0
    max_upload_bytes_per_second: float | None = None
    max_download_bytes_per_second: float | None = None
    codecs: tuple[Rung, ...] = ()
    snapshots: Mapping[str, tuple[HeldPart, ...]] = field(default_factory=dict)
    instance: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a peer may not join, and what to do; ``again``: trying later may help."""

    reason: str
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The name is another one's, whom we believe to be here; ``same_process``: it is the newcomer itself, come back."""

    holder: Member
    same_process: bool

    @property
    def refusal(self) -> Refusal:
        """What to say to the newcomer if the holder is here indeed."""
        said = self.holder.introduction
        who = f"a peer named {said.name} is in the run already (at {said.address or 'no address'})"
        return Refusal(reason=f"{who}; give this one another name with --name")


@dataclass(slots=True, kw_only=True)
class Member:
    """A connected peer; ``unreached`` is why it cannot be dialled."""

    introduction: Introduction
    heard: float
    phase: str = ""
    waiting_for: str = ""
    resident_bytes: int = 0
    resident_at_join: int = 0
    fetched_bytes: int = 0
    bytes_sent: dict[tuple[str, str], int] = field(default_factory=dict)
    reach: Reach = Reach.UNKNOWN
    unreached: str = ""

    @property
    def name(self) -> PeerId:
        return PeerId(self.introduction.name)


class Membership:
    """The connected peers by name."""

    def __init__(self, now: float, lease_seconds: float = LEASE_SECONDS) -> None:
        self.lease_seconds = lease_seconds
        self._members: dict[PeerId, Member] = {}
        self._barred: set[str] = set()
        self._looked = now

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def find(self, peer: PeerId) -> Member | None:
        return self._members.get(peer)

    def bar(self, name: str) -> None:
        """Nobody of that name may join until :meth:`allow`."""
        self._barred.add(name)

    def allow(self, name: str) -> bool:
        """The name may join again; False when it was not barred."""
        barred = name in self._barred
        self._barred.discard(name)
        return barred

    @staticmethod
    def barred_reason(name: str) -> str:
        """What is told to a peer that was removed."""
        return f"have the operator run `atoll peers allow {name}`, or give this peer another name with --name"

    def admit(self, introduction: Introduction, came_from: str, version: str, now: float) -> Member | Refusal | Taken:
        """Let the peer in, or say why not. ``came_from`` is the address of its connection as gRPC writes it, ``version`` is
        ours."""
        refusal = _wrong_version(introduction, version) or _wrong_name(introduction) or _wrong_numbers(introduction)
        refusal = refusal or _wrong_address(introduction, came_from) or self._removed(introduction)
        verdict = refusal or self._taken(introduction)
        if verdict is not None:
            return verdict
        member = Member(introduction=introduction, heard=now)
        self._members[member.name] = member
        return member

    def remove(self, member: Member) -> None:
        if self._members.get(member.name) is member:
            del self._members[member.name]

    def expired(self, now: float) -> list[Member]:
        """The members whose lease is over; to be asked LOOKS_PER_LEASE times in a lease, or more often."""
        unobserved = now - self._looked - self.lease_seconds / LOOKS_PER_LEASE
        self._looked = now
        if unobserved > 0:
            for member in self._members.values():
                member.heard += unobserved
        return [member for member in self._members.values() if now - member.heard >= self.lease_seconds]

    def _removed(self, introduction: Introduction) -> Refusal | None:
        name = introduction.name
        if name not in self._barred:
            return None
        return Refusal(reason=f"the operator removed {name} from this run; {self.barred_reason(name)}")

    def _taken(self, introduction: Introduction) -> Taken | None:
        holder = self._members.get(PeerId(introduction.name))
        if holder is None:
            return None
        same = bool(introduction.instance) and introduction.instance == holder.introduction.instance
        return Taken(holder=holder, same_process=same)


def _wrong_version(introduction: Introduction, version: str) -> Refusal | None:
    if introduction.protocol_version == PROTOCOL_VERSION:
        return None
    older = "the peer" if introduction.protocol_version < PROTOCOL_VERSION else "the coordinator"
    return Refusal(
        reason=(
            f"the coordinator speaks protocol {PROTOCOL_VERSION} (atoll {version}), the peer protocol "
            f"{introduction.protocol_version} (atoll {introduction.version or 'unknown'}); "
            f"install the same version of atoll on both, {older} is the older one"
        )
    )


def _wrong_name(introduction: Introduction) -> Refusal | None:
    if PEER_NAME.fullmatch(introduction.name):
        return None
    shown = introduction.name[:80]
    return Refusal(reason=f"{shown!r} is not a name; give --name up to 64 letters, digits, dots, hyphens and underscores")


def _wrong_numbers(introduction: Introduction) -> Refusal | None:
    speed = introduction.flops_per_second
    if not math.isfinite(speed) or speed <= 0:
        return Refusal(reason=f"a speed of {speed} FLOP/s cannot be planned with; see what atoll-peer bench measures")
    if not 0.0 <= introduction.handling_seconds < math.inf:
        return Refusal(reason=f"a message cannot take {introduction.handling_seconds} s; see what atoll-peer bench measures")
    if introduction.memory_bytes <= 0:
        return Refusal(reason="the peer offers no memory; raise --max-memory")
    return None


def _wrong_address(introduction: Introduction, came_from: str) -> Refusal | None:
    """Whether other peers could dial the address at all, where there is one."""
    if not introduction.address:
        return None
    try:
        address = parse_address(introduction.address)
    except JobError as error:
        return Refusal(reason=f"{error}; give --advertise HOST:PORT")
    if address.is_unspecified or address.port == 0:
        return Refusal(
            reason=f"other peers cannot dial {address}; give --advertise with the address where they reach this peer"
        )
    remote = _host_of(came_from)
    if address.is_loopback and remote is not None and not remote.is_loopback:
        return Refusal(
            reason=(
                f"the peer connects from {remote.host} but says that others reach it at {address}, on its own machine alone; "
                f"give --listen 0.0.0.0:0 and --advertise {remote.host}:PORT"
            )
        )
    return None


def _host_of(came_from: str) -> Address | None:
    """The host in ``ipv4:1.2.3.4:5`` or ``ipv6:[::1]:5`` (gRPC may escape the brackets); None for what is no such address."""
    scheme, _, rest = came_from.partition(":")
    if scheme not in ("ipv4", "ipv6"):
        return None
    try:
        found = parse_address(rest.replace("%5B", "[").replace("%5D", "]"))
    except JobError:
        return None
    mapped = found.host.removeprefix("::ffff:")
    return Address(mapped, found.port)
