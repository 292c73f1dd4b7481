"""What was measured once is known in the next run, unless something about it changed or the file did."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.peer.measuring.measurement_cache import MeasurementCache, MeasurementKey
from atoll.peer.stage.work_seconds import WorkSeconds

KEY = MeasurementKey(kind="0123abcd", device="cpu Thing 9000", threads=2, torch="2.13.0", version=1)
SECONDS = WorkSeconds(forward=0.25, backward=0.5, accumulate=0.0, update=0.125)


def test_what_is_kept_is_found_by_another_process(tmp_path: Path) -> None:
    MeasurementCache(tmp_path / "new").keep(KEY, SECONDS)
    assert MeasurementCache(tmp_path / "new").find(KEY) == SECONDS


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, kind="ffff"),
        replace(KEY, device="cpu Thing 9001"),
        replace(KEY, threads=1),
        replace(KEY, torch="2.14.0"),
        replace(KEY, version=2),
    ],
)
def test_nothing_is_found_for_anything_else(tmp_path: Path, other: MeasurementKey) -> None:
    cache = MeasurementCache(tmp_path)
    cache.keep(KEY, SECONDS)
    assert cache.find(other) is None


def test_without_a_folder_nothing_is_kept() -> None:
    cache = MeasurementCache(None)
    cache.keep(KEY, SECONDS)
    assert cache.find(KEY) is None


def changed(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: "",
        lambda text: "[]",
        lambda text: "{}",
        lambda text: "\x00\xff",
        changed(lambda content: content["seconds"].update(forward=float("nan"))),
        changed(lambda content: content["seconds"].update(forward=-1.0)),
        changed(lambda content: content["seconds"].update(forward="quick")),
        changed(lambda content: content["seconds"].pop("update")),
        changed(lambda content: content["key"].update(threads=8)),
    ],
)
def test_a_damaged_file_is_ignored_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[str], str]
) -> None:
    cache = MeasurementCache(tmp_path)
    cache.keep(KEY, SECONDS)
    (path,) = tmp_path.rglob("*.json")
    path.write_text(damage(path.read_text()))
    with caplog.at_level(logging.WARNING):
        assert cache.find(KEY) is None
    assert str(path) in caplog.text
    cache.keep(KEY, SECONDS)
    assert cache.find(KEY) == SECONDS


def test_a_folder_that_cannot_be_made_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = MeasurementCache(tmp_path / "file")
    with caplog.at_level(logging.WARNING):
        cache.keep(KEY, SECONDS)
    assert "--cache" in caplog.text


def test_nothing_but_whole_files_is_left(tmp_path: Path) -> None:
    cache = MeasurementCache(tmp_path)
    for _ in range(3):
        cache.keep(KEY, SECONDS)
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".json"]
