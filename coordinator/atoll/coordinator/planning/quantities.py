"""Bytes, rates and seconds for people, and back."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """``3.2 GB``, ``512 kB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def format_rate(bytes_per_second: float) -> str:
    """``20 Mbit/s``."""
    bits = 8.0 * bytes_per_second
    if bits == float("inf"):
        return "no limit"
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits:.3g} bit/s"


def format_seconds(seconds: float) -> str:
    """``1.25 s``, ``40 ms``."""
    if seconds >= 1.0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"
