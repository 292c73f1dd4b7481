"""What the soak takes for growth: a leak of one socket a kill, a line of memory that rises; and not what settles or swings."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from support.swarm import ROOT

KILLS = 30
MIB = 2**20


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, which is no part of a package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("soak")


def hour(soak: Any, **changed: Callable[[float], float]) -> Any:
    """Samples of an hour, all alike but for what is ``changed``: a value by the share of the hour that is over."""
    level = {"resident_bytes": 400.0 * MIB, "open_files": 25.0, "sockets": 12.0, "threads": 30.0, "log_bytes": 1e5}
    series = soak.Series()
    for sample in range(361):
        over = sample / 360
        series.add(10.0 * sample, **(level | {name: value(over) for name, value in changed.items()}))
    return series


def test_what_swings_does_not_grow(soak: Any) -> None:
    calm = hour(
        soak,
        resident_bytes=lambda over: 400.0 * MIB + 20.0 * MIB * (int(360 * over) % 2),
        sockets=lambda over: 12.0 + int(360 * over) % 5,
        log_bytes=lambda over: 1e5 + 6.0 * MIB * over,
    )
    assert list(soak.growing("ann", calm, KILLS)) == []


@pytest.mark.parametrize(
    ("quantity", "value", "words"),
    [
        ("resident_bytes", lambda over: (400.0 + 20.0 * over) * MIB, "ann: resident memory rose by 20.0 MiB in 60 minutes"),
        ("open_files", lambda over: 25.0 + KILLS * over, "ann: 30.0 open files more after 30 kills"),
        ("sockets", lambda over: 12.0 + KILLS * over, "ann: 30.0 sockets more after 30 kills"),
        ("threads", lambda over: 30.0 + KILLS * over, "ann: 30.0 threads more after 30 kills"),
        ("log_bytes", lambda over: 1e5 + 40.0 * MIB * over, "ann: logged 40.0 MiB in 60 minutes"),
    ],
)
def test_what_each_kill_leaves_is_told(soak: Any, quantity: str, value: Callable[[float], float], words: str) -> None:
    assert list(soak.growing("ann", hour(soak, **{quantity: value}), KILLS)) == [words]
