"""Lists of names for sentences."""

from __future__ import annotations

from collections.abc import Iterable


def listed(names: Iterable[str], most: int = 4) -> str:
    """All of a few, the first of many: ``a, b and c``, ``a, b and 3 more``."""
    found = list(names)
    if len(found) > most:
        return first_of(found, most)
    return " and ".join(filter(None, (", ".join(found[:-1]), *found[-1:])))


def first_of(items: Iterable[str], most: int = 3, separator: str = ", ") -> str:
    """One after the other: ``a, b, c``, ``a, b, c and 2 more``."""
    found = list(items)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return f"{separator.join(found[:most])}{more}"
