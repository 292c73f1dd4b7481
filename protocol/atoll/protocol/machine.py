"""Which machine a process runs on, so that a plan knows who shares processors with whom."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import psutil

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_name() -> str:
    """The same text in every process that may run on the same processors of this machine, containers included; tells nothing
    else about it. Processes that are confined to different processors disturb one another little and count as apart."""
    try:
        identity = _BOOT_ID.read_text().strip()
    except OSError:
        identity = f"{platform.node()} {psutil.boot_time():.0f}"
    return hashlib.blake2b(f"{identity} {_processors()}".encode(), digest_size=8).hexdigest()


def usable_cores() -> int:
    """How many processors this process may run on."""
    return len(_processors()) or psutil.cpu_count() or 1


def _processors() -> list[int]:
    """The processors that this process may run on, empty where the system does not tell."""
    process = psutil.Process()
    return sorted(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else []
