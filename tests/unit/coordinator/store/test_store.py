"""Snapshots in a store: complete or not there, rotated, refused when damaged; in a folder and behind a URL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from atoll.coordinator.store import store as store_module
from atoll.coordinator.store.store import Store, StoredSnapshot, StoredState
from atoll.protocol.errors import DamagedSnapshot, JobError, ResourceError
from atoll.protocol.ids import StepNumber
from atoll.protocol.state import grouped
from support.states import assert_same_state, state_of

RUN, OTHER = "a" * 32, "b" * 32
FIELD = "durability.store"
STATE = state_of("first", "second", "third")


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A place of either kind, empty."""
    if request.param == "folder":
        yield str(tmp_path / "store")
        return
    yield "memory://atoll-test"
    fsspec.filesystem("memory").store.clear()


def write(url: str, step: int, run: str = RUN, state: dict[str, torch.Tensor] = STATE, saved: float = 0.0) -> StoredSnapshot:
    writer = Store(url, FIELD).writer(run, StepNumber(step), "job")
    for group in grouped(state).values():
        writer.add(group)
    return writer.complete(saved or float(step))


def read(url: str, snapshot: StoredSnapshot) -> dict[str, torch.Tensor]:
    stored = StoredState(Store(url, FIELD), snapshot)
    return {name: stored.tensor(name) for name in stored.tensor_names(stored.names)}


def test_what_was_written_is_read_in_parts_of_some_size(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PART_BYTES", 200)
    written = write(url, 5)
    (found,) = Store(url, FIELD).snapshots()
    assert (found.run_id, found.step, found.job, found.num_bytes) == (RUN, 5, "job", written.num_bytes)
    assert len(found.parts) > 1
    assert_same_state(read(url, found), STATE)
    stored = StoredState(Store(url, FIELD), found)
    assert stored.names == {"first", "second", "third", "half", "counter"}
    assert set(stored.tensor_names(["first"])) == {name for name in STATE if name.startswith("first")}
    assert stored.specs()["half"] == (torch.bfloat16, (3,))


def test_a_store_that_is_empty_or_not_there_has_nothing(url: str) -> None:
    assert Store(url, FIELD).snapshots() == []


def test_until_it_is_complete_there_is_nothing_and_the_next_attempt_begins_anew(url: str) -> None:
    writer = Store(url, FIELD).writer(RUN, StepNumber(5), "job")
    for group in grouped(STATE).values():
        writer.add(group)
    assert Store(url, FIELD).snapshots() == []
    other = state_of("first", seed=1)
    write(url, 5, state=other)
    (found,) = Store(url, FIELD).snapshots()
    assert_same_state(read(url, found), other)


def test_one_run_or_one_snapshot_can_be_named(url: str) -> None:
    for run, step in ((RUN, 5), (OTHER, 6), (RUN, 7)):
        write(url, step, run)
    assert [found.step for found in Store(url, FIELD).snapshots()] == [5, 6, 7]
    assert [found.step for found in Store(f"{url}/{RUN}", FIELD).snapshots()] == [5, 7]
    (found,) = Store(f"{url}/{RUN}/5", FIELD).snapshots()
    assert found.step == 5
    assert_same_state(read(f"{url}/{RUN}/5", found), STATE)


def test_the_last_good_ones_stay_whatever_came_to_nothing_since(url: str) -> None:
    for step in (1, 2, 3, 4):
        write(url, step)
        Store(url, FIELD).rotate(RUN)
    write(url, 1, OTHER)
    left = Store(url, FIELD).writer(RUN, StepNumber(9), "job")
    left.add([("counter", STATE["counter"])])
    Store(url, FIELD).rotate(RUN)
    assert sorted((found.run_id, found.step) for found in Store(url, FIELD).snapshots()) == [(RUN, 3), (RUN, 4), (OTHER, 1)]
    left.complete(9.0)
    Store(url, FIELD).rotate(RUN)
    assert [found.step for found in Store(url, FIELD).snapshots() if found.run_id == RUN] == [4, 9]


@pytest.mark.parametrize("place", ["first", "header", "last"])
def test_damage_is_refused_with_a_sentence(url: str, place: str) -> None:
    found = write(url, 5)
    files, _ = fsspec.core.url_to_fs(url)
    path = Store(url, FIELD).snapshots()[0].parts[0]
    damaged = bytearray(files.cat_file(path))
    damaged[{"first": 7, "header": damaged.index(b"counter"), "last": -1}[place]] ^= 1
    files.pipe_file(path, bytes(damaged))
    with pytest.raises(DamagedSnapshot, match=r"part-0.safetensors is damaged"):
        read(url, Store(url, FIELD).snapshots()[0])
    assert found.step == 5


def test_a_summary_that_cannot_be_read_counts_as_none(tmp_path: Path) -> None:
    write(str(tmp_path), 5)
    write(str(tmp_path), 6)
    (tmp_path / RUN / "6" / store_module.SUMMARY).write_text("{", encoding="utf-8")
    assert [found.step for found in Store(str(tmp_path), FIELD).snapshots()] == [5]


def test_what_is_no_store_is_told(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"durability.store: .*nowhere"):
        Store("nowhere://bucket/x", FIELD)
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ResourceError, match=r"durability.store: cannot write to"):
        write(str(tmp_path / "file" / "below"), 1)
