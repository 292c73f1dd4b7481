"""Numbers as people read them."""

from __future__ import annotations

import pytest

from atoll.coordinator.cli import formatting


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3.25 * 2**20, "3.2 MiB"), (7 * 2**50, "7168.0 TiB")],
)
def test_sizes(number: float, text: str) -> None:
    assert formatting.size(number) == text


@pytest.mark.parametrize(("number", "text"), [(999, "999"), (3_600_000, "3.6 M"), (7e9, "7.0 G")])
def test_counts(number: float, text: str) -> None:
    assert formatting.count(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (754, "12:34"), (11_110, "3:05:10")])
def test_durations(seconds: float, text: str) -> None:
    assert formatting.duration(seconds) == text
