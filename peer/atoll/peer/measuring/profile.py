"""What this peer can do, measured: speed, memory. A short real forward and backward, not a table of devices."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from atoll.compression.registry import codec, codec_names
from atoll.compression.speed import CodecSpeed, measure_speed
from atoll.peer.stage.memory_use import MemoryUse
from atoll.peer.stage.warming import warm_up
from atoll.peer.state.free_disk import free_disk_bytes
from atoll.protocol.codec_names import LADDER
from atoll.protocol.errors import JobError
from atoll.protocol.machine import machine_name, usable_cores

_WIDTH = {"cpu": 256, "cuda": 2048, "mps": 1024}  # large enough to keep the device busy, small enough to end in a moment
_ROWS = {
    "cpu": 64,
    "cuda": 4096,
    "mps": 2048,
}  # on the CPU a few milliseconds, less than the scheduler's slice on a busy machine
_EXPANSION = 4  # as in the feed-forward part of a transformer
_SECONDS = 0.3
_FEWEST_REPETITIONS = 10
_CODED_ELEMENTS = 2**17
_CODED_REPETITIONS = 3
_PROCESSORS = Path("/proc/cpuinfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USE = Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """``memory_bytes`` is what a stage may take beside ``resident_bytes``, which the process takes already: the cap is on both
    together. ``flops_per_second`` counts forward and backward in fp32.

    Peers that name the same ``machine`` share its ``cores``; a peer that computes on a device of its own names none.
    ``disk_bytes`` are free where the peer keeps its cache."""

    device: str
    threads: int
    flops_per_second: float
    memory_bytes: int
    resident_bytes: int
    machine: str
    cores: int
    disk_bytes: int
    codecs: Mapping[str, CodecSpeed] = field(default_factory=dict)
    """What was measured of codecs; nothing where the speed of the peer is declared."""


def choose_device(text: str | None) -> str:
    """The device to compute on: the given one when it exists here, else the best there is; raises JobError."""
    if text is None:
        return "cuda:0" if torch.cuda.is_available() else "mps" if _has_mps() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError:
        raise JobError("--device", f"{text!r} is not a device; write cpu, cuda:0 or mps") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise JobError("--device", f"{text} is not here: torch sees {torch.cuda.device_count()} CUDA devices; try --device cpu")
    if device.type == "mps" and not _has_mps():
        raise JobError("--device", "this machine has no MPS device; try --device cpu")
    if device.type not in ("cpu", "cuda", "mps"):
        raise JobError("--device", f"{text!r} is not supported; write cpu, cuda:0 or mps")
    return "cuda:0" if text == "cuda" else text


def _has_mps() -> bool:
    return torch.backends.mps.is_available()


def measure(
    device: str,
    *,
    threads: int | None = None,
    memory_cap_bytes: int | None = None,
    declared_flops: float | None = None,
    cache: Path | None = None,
) -> Profile:
    """Measures for a third of a second, or at once where the speed is declared."""
    if threads is not None:
        torch.set_num_threads(threads)
    warm_up(device)
    speed = flops_per_second(device) if declared_flops is None else declared_flops
    used = MemoryUse(device).now_bytes()
    return Profile(
        device=device,
        threads=torch.get_num_threads(),
        flops_per_second=speed,
        memory_bytes=offered_bytes(free_memory_bytes(device), used, memory_cap_bytes),
        resident_bytes=used,
        machine=machine_name() if torch.device(device).type == "cpu" else "",
        cores=usable_cores(),
        disk_bytes=free_disk_bytes(cache),
        codecs=codec_speeds() if declared_flops is None else {},
    )


def codec_speeds() -> dict[str, CodecSpeed]:
    """How fast the codecs are that a coordinator may choose from; some tenths of a second. They work beside computing, in one
    thread, and so they are measured."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        names = [name for name in LADDER[1:] if name in codec_names()]
        return {
            name: measure_speed(codec(name), time.perf_counter, num_elements=_CODED_ELEMENTS, repetitions=_CODED_REPETITIONS)
            for name in names
        }
    finally:
        torch.set_num_threads(threads)


def offered_bytes(free: int, used: int, cap: int | None) -> int:
    """What a stage may take: what is ``free``, and of a ``cap`` on the whole process what is not ``used`` yet.

    Raises JobError when the cap leaves nothing.
    """
    if cap is None:
        return free
    if cap <= used:
        taken = f"{used / 2**20:.0f} MiB without any layers"
        raise JobError("--max-memory", f"{cap / 2**20:.0f} MiB are too few: this process takes {taken}; allow some GiB more")
    return min(free, cap - used)


def flops_per_second(device: str, *, seconds: float = _SECONDS) -> float:
    """The best of several forward and backward passes: an interruption by another process makes one slow, not all."""
    kind = torch.device(device).type
    width, rows = _WIDTH.get(kind, 256), _ROWS.get(kind, 64)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, width, generator=generator).to(device).requires_grad_()
    first = torch.randn(width * _EXPANSION, width, generator=generator).div_(width).to(device).requires_grad_()
    second = torch.randn(width, width * _EXPANSION, generator=generator).div_(width).to(device).requires_grad_()
    flops = 3 * 2 * 2 * rows * width * width * _EXPANSION  # two products, forward and two backward each, 2 FLOPs a term
    best = float("inf")
    repetitions, deadline = 0, time.perf_counter() + seconds
    while repetitions <= _FEWEST_REPETITIONS or time.perf_counter() < deadline:
        started = time.perf_counter()
        hidden = torch.nn.functional.gelu(torch.nn.functional.linear(inputs, first))
        torch.autograd.grad(torch.nn.functional.linear(hidden, second).sum(), (inputs, first, second))
        synchronise(torch.device(device))
        if repetitions > 0:  # the first one warms up
            best = min(best, time.perf_counter() - started)
        repetitions += 1
    return flops / best


def free_memory_bytes(device: str) -> int:
    """What may still be allocated on the device; on the CPU the container's limit counts as well."""
    kind = torch.device(device).type
    if kind == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if kind == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    free = int(psutil.virtual_memory().available)
    limit = _container_free_bytes()
    return free if limit is None else min(free, limit)


def _container_free_bytes() -> int | None:
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
        used = int(_CGROUP_USE.read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def synchronise(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def device_name(device: torch.device) -> str:
    """What the device is called: devices of one name are equally fast."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        models = {
            line.partition(":")[2].strip() for line in _PROCESSORS.read_text().splitlines() if line.startswith("model name")
        }
    except OSError:
        models = set()
    return " ".join((device.type, *sorted(models or {platform.processor() or platform.machine()})))
