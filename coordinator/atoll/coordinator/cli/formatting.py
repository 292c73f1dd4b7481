"""Numbers as people read them: sizes, counts, durations."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.protocol.quantities import format_bytes, format_rate, format_seconds

_COUNT_UNITS = ("", " K", " M", " G", " T")


def size(num_bytes: float) -> str:
    """``3.2 MiB``; bytes are shown whole."""
    return format_bytes(num_bytes)


def rate(bytes_per_second: float) -> str:
    """``20 Mbit/s``: what crosses a link, in the unit of the flags."""
    return format_rate(bytes_per_second)


def seconds(value: float) -> str:
    """``1.25 s``, ``40 ms``: how long one thing takes."""
    return format_seconds(value)


def count(number: float) -> str:
    """``3.6 M``; counts below a thousand are shown whole."""
    power = 0
    while abs(number) >= 1000.0 and power < len(_COUNT_UNITS) - 1:
        number /= 1000.0
        power += 1
    return f"{number:.1f}{_COUNT_UNITS[power]}" if power else f"{number:.0f}"


def duration(seconds: float) -> str:
    """``0:45``, ``12:03`` or ``3:05:10``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines with the columns of ``rows`` below one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
