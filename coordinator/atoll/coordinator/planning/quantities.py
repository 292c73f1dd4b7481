"""Bytes, rates and seconds for people; the way back is in ``atoll.protocol.quantities``."""

from __future__ import annotations


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
