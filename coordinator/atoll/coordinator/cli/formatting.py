"""Numbers as people read them: sizes, counts, durations."""

from __future__ import annotations

from collections.abc import Sequence

_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_COUNT_UNITS = ("", " K", " M", " G", " T")


def size(num_bytes: float) -> str:
    """``3.2 MiB``; bytes are shown whole."""
    return _scaled(num_bytes, 1024.0, _SIZE_UNITS, separator=" ")


def count(number: float) -> str:
    """``3.6 M``; counts below a thousand are shown whole."""
    return _scaled(number, 1000.0, _COUNT_UNITS, separator="")


def duration(seconds: float) -> str:
    """``0:45``, ``12:03`` or ``3:05:10``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def seconds(value: float) -> str:
    """``1.25 s``, ``40 ms``: how long one thing takes."""
    return f"{value:.3g} s" if value >= 1.0 else f"{value * 1e3:.3g} ms"


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines with the columns of ``rows`` below one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _scaled(value: float, step: float, units: tuple[str, ...], separator: str) -> str:
    power = 0
    while abs(value) >= step and power < len(units) - 1:
        value /= step
        power += 1
    digits = f"{value:.1f}" if power else f"{value:.0f}"
    return f"{digits}{separator}{units[power]}"
