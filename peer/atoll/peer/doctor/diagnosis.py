"""What `atoll-peer doctor` makes of what it finds: a verdict each, and what mends it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum

from atoll.protocol.channel import PROTOCOL_VERSION
from atoll.protocol.probe_client import LinkSpeed
from atoll.protocol.v1 import examination_pb2

SKEW_SECONDS = 60.0
"""By how much two clocks may differ before it is told."""
FEW_BYTES = 2**30
"""Of memory: less holds hardly a stage. Of the disk: less holds hardly a snapshot."""
SLOW_BYTES_PER_SECOND = 125_000.0
"""A megabit a second: below, links are what all others wait for, whatever is compressed."""
LONG_SECONDS = 0.3
"""A round trip that makes small messages dear."""
SET_THE_CLOCK = "timedatectl set-ntp true"
BE_INVITED = "on the coordinator's machine: atoll invite; then here: --token atoll1-..."


class Verdict(StrEnum):
    """GOOD; POOR: it will work, but not well; BAD: it will not; UNKNOWN: it could not be looked at."""

    GOOD = "good"
    POOR = "poor"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Of one ``subject``: what was found, and the command or flag that mends it (empty: nothing is to be mended)."""

    subject: str
    verdict: Verdict
    found: str
    mend: str = ""

    def as_json(self) -> str:
        """One line, with the event's name as every line of a command has it."""
        return json.dumps({"event": "examined", **asdict(self)})


def is_fit(findings: Iterable[Finding]) -> bool:
    """Whether a peer would work here."""
    return all(finding.verdict is not Verdict.BAD for finding in findings)


def not_looked_at(subject: str, why: str) -> Finding:
    """Something before it is bad."""
    return Finding(subject=subject, verdict=Verdict.UNKNOWN, found=why)


def of_clock(difference_seconds: float) -> Finding:
    """This machine's clock minus the coordinator's."""
    way = "ahead of" if difference_seconds > 0.0 else "behind"
    found = f"{abs(difference_seconds):.1f} s {way} the coordinator's"
    if abs(difference_seconds) <= SKEW_SECONDS:
        return Finding(subject="clock", verdict=Verdict.GOOD, found=found)
    return Finding(subject="clock", verdict=Verdict.POOR, found=f"{found}; certificates stand an hour", mend=SET_THE_CLOCK)


def of_protocol(reply: examination_pb2.ExamineReply, version: str) -> Finding:
    """``version`` is this software's."""
    found = f"{PROTOCOL_VERSION} (atoll {version}); the coordinator's {reply.protocol_version} (atoll {reply.version})"
    if reply.protocol_version == PROTOCOL_VERSION:
        return Finding(subject="protocol", verdict=Verdict.GOOD, found=found)
    older = "this machine" if reply.protocol_version > PROTOCOL_VERSION else "the coordinator's machine"
    return Finding(subject="protocol", verdict=Verdict.BAD, found=found, mend=f"on {older}: pip install --upgrade atoll")


def of_reachability(reply: examination_pb2.ExamineReply, address: str) -> Finding:
    """A peer that cannot be dialled dials others itself."""
    if not reply.unreachable:
        return Finding(subject="reachability", verdict=Verdict.GOOD, found=f"the coordinator connects to {address}")
    return Finding(
        subject="reachability",
        verdict=Verdict.POOR,
        found=f"others cannot connect to this machine: {reply.unreachable}",
        mend="forward a port of the router, then: --listen 0.0.0.0:7001 --advertise PUBLIC-ADDRESS:7001",
    )


def of_link(speed: LinkSpeed) -> Finding:
    """The line to the coordinator."""
    up, down = speed.upload_bytes_per_second or 0.0, speed.download_bytes_per_second or 0.0
    trip = speed.round_trip_seconds
    found = f"{8e-6 * up:.1f} Mbps up, {8e-6 * down:.1f} Mbps down, {1e3 * trip:.1f} ms there and back"
    if min(up, down) < SLOW_BYTES_PER_SECOND:
        mend = "a cable instead of Wi-Fi, and nothing else on the line"
        return Finding(subject="throughput", verdict=Verdict.POOR, found=found, mend=mend)
    if trip > LONG_SECONDS:
        return Finding(subject="throughput", verdict=Verdict.POOR, found=found, mend="a cable instead of Wi-Fi, or no VPN")
    return Finding(subject="throughput", verdict=Verdict.GOOD, found=found)


def of_disk(free_bytes: int, folder: str) -> Finding:
    """Where the cache lies."""
    found = f"{free_bytes / 2**30:.1f} GiB free in {folder}"
    if free_bytes >= FEW_BYTES:
        return Finding(subject="disk", verdict=Verdict.GOOD, found=found)
    mend = "--cache DIR on a disk with more room"
    return Finding(subject="disk", verdict=Verdict.POOR, found=f"{found}: too little for snapshots", mend=mend)


def of_memory(free_bytes: int, device: str) -> Finding:
    """What a stage could take on the device."""
    found = f"{free_bytes / 2**30:.1f} GiB free on {device}"
    if free_bytes >= FEW_BYTES:
        return Finding(subject="memory", verdict=Verdict.GOOD, found=found)
    mend = "end other programs that use it (nvidia-smi shows them)" if device.startswith("cuda") else "end other programs"
    return Finding(subject="memory", verdict=Verdict.POOR, found=f"{found}: hardly a layer fits", mend=mend)
