"""Sizes, rates, speeds and durations as people write and read them."""

from __future__ import annotations

import re

_SIZES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGTP]?I?)B?", re.IGNORECASE)
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:bps|bit/s|bits/s)", re.IGNORECASE)
_FLOPS = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGTP]?)(?:flops|flop/s)?", re.IGNORECASE)
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(us|ms|s|m|h|d)")


def parse_bytes(text: str) -> int | None:
    """``8GiB``, ``500MB``, ``1.5G`` in bytes; None for anything else."""
    match = _SIZE.fullmatch(text.strip())
    return None if match is None or match[2].upper() not in _SIZES else int(float(match[1]) * _SIZES[match[2].upper()])


def parse_rate(text: str) -> float | None:
    """``20Mbps``, ``1 Gbit/s`` in bytes a second; None for anything else. ``MB/s`` is refused, for it is mistaken for
    Mbit/s."""
    match = _RATE.fullmatch(text.strip())
    return None if match is None else float(match[1]) * _SIZES[match[2].upper()] / 8.0


def parse_flops(text: str) -> float | None:
    """``4.5TFLOPS``, ``900G`` in operations a second; None for anything else."""
    match = _FLOPS.fullmatch(text.strip())
    return None if match is None else float(match[1]) * _SIZES[match[2].upper()]


def parse_seconds(text: str) -> float | None:
    """``30ms``, ``0.2s``, ``24h`` in seconds; None for anything else."""
    match = _DURATION.fullmatch(text.strip())
    return None if match is None else float(match[1]) * _SECONDS[match[2]]


def format_bytes(count: float) -> str:
    """``3.2 GiB``, ``512.0 KiB``; bytes are shown whole. The one way in which sizes are written."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024.0**power:
            return f"{count / 1024.0**power:.1f} {unit}"
    return f"{count:.0f} B"


def format_rate(bytes_per_second: float) -> str:
    """``20 Mbit/s``."""
    bits = 8.0 * bytes_per_second
    if bits == float("inf"):
        return "no limit"
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{_three_digits(bits / size)} {unit}"
    return f"{_three_digits(bits)} bit/s"


def format_seconds(seconds: float) -> str:
    """``1.25 s``, ``40 ms``, ``4.4 us``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us" if seconds else "0 s"


def _three_digits(value: float) -> str:
    """Never in powers of ten: ``1250``, ``12.5``, ``0.125``."""
    return f"{value:.0f}" if value >= 100.0 else f"{value:.3g}"
