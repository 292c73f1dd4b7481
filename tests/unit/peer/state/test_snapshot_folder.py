"""Snapshots on a disk: whole or not there, rotated, and never mistaken for another run's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from atoll.peer.state import snapshot_folder
from atoll.peer.state.snapshot_folder import KEPT_SECONDS, SnapshotFolder, StoredState
from atoll.peer.state.snapshot_part import Part, PartWriter
from atoll.protocol.errors import DamagedSnapshot, ResourceError
from atoll.protocol.ids import PeerId, StepNumber
from atoll.protocol.state import split_name
from support.states import assert_same_state, state_of

ANN, BOB = PeerId("ann"), PeerId("bob")
RUN, OTHER = "a" * 32, "b" * 32
FIVE, NINE = StepNumber(5), StepNumber(9)
STATE = state_of("first", "second")
NAMES = sorted({split_name(name)[0] for name in STATE})


def begin(folder: SnapshotFolder, run: str = RUN, step: StepNumber = FIVE, peer: PeerId = ANN, source: str = "") -> PartWriter:
    return folder.new_part(run, step, peer, NAMES, 1000, source=source)


def write(
    folder: SnapshotFolder,
    state: dict[str, torch.Tensor] = STATE,
    run: str = RUN,
    step: StepNumber = FIVE,
    peer: PeerId = ANN,
    source: str = "",
) -> Path:
    """A whole part."""
    part = begin(folder, run, step, peer, source)
    for name, tensor in sorted(state.items(), key=lambda item: -item[1].itemsize):
        part.add(name, tensor)
    part.complete()
    return part.path


def read(folder: SnapshotFolder, run: str = RUN, step: StepNumber = FIVE) -> dict[str, torch.Tensor]:
    return read_all(folder.open(run, step))


def read_all(stored: StoredState) -> dict[str, torch.Tensor]:
    return {key: value for name in stored.names for key, value in stored.read(name).items()}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path / "not" / "there" / "yet")
    write(folder)
    assert_same_state(read(folder), STATE)
    (held,) = folder.held()
    assert (held.run_id, held.step, sorted(held.names)) == (RUN, FIVE, NAMES)
    assert held.num_bytes == sum(value.numel() * value.itemsize for value in STATE.values())


def test_a_part_is_a_file_that_safetensors_reads(tmp_path: Path) -> None:
    path = write(SnapshotFolder(tmp_path))
    with safe_open(path, framework="pt") as file:
        assert_same_state({name: file.get_tensor(name) for name in file.keys()}, STATE)  # noqa: SIM118 - no mapping
        assert file.metadata()["step"] == "5"


def test_until_it_is_complete_there_is_nothing(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    part = begin(folder)
    part.add("counter", STATE["counter"])
    assert folder.held() == []
    folder.clean(now=0.0)
    part.complete()
    assert folder.open(RUN, FIVE).names == ("counter",)


def test_what_was_abandoned_leaves_nothing(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    part = begin(folder)
    part.add("first", STATE["first"])
    part.abandon()
    assert [path for path in folder.path.rglob("*") if path.is_file()] == []


def test_parts_of_several_peers_are_one_snapshot_and_a_new_one_replaces_its_own(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    first = {name: value for name, value in STATE.items() if name.startswith("first")}
    rest = {name: value for name, value in STATE.items() if name not in first}
    write(folder, first)
    write(folder, rest, peer=BOB)
    assert_same_state(read(folder), STATE)
    other = state_of("first", "second", seed=1)
    write(folder, {name: other[name] for name in first})
    assert_same_state(read(folder), {**rest, **{name: other[name] for name in first}})


def test_every_copy_gets_a_file_of_its_own(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    paths = {write(folder, {"counter": STATE["counter"]}, source=source) for source in ("bob", "bob", "cid")}
    assert len(paths) == 3


def test_copies_of_a_former_doing_of_a_step_are_not_mixed_with_what_is_written_now(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    write(folder, {"counter": STATE["counter"]}, source="bob")
    write(folder, {"half": STATE["half"]}, peer=BOB)
    write(folder, {"first": STATE["first"]})
    assert sorted(folder.open(RUN, FIVE).names) == ["first", "half"]


def test_runs_and_steps_are_kept_apart_and_rotated(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    for run, step in ((RUN, FIVE), (RUN, NINE), (OTHER, FIVE)):
        write(folder, run=run, step=step)
    assert [(held.run_id, held.step) for held in folder.held()] == [(RUN, 5), (RUN, 9), (OTHER, 5)]
    folder.keep_only(RUN, {NINE, StepNumber(12)})
    assert [(held.run_id, held.step) for held in folder.held()] == [(RUN, 9), (OTHER, 5)]
    folder.keep_only(RUN, ())
    assert not (folder.path / RUN).exists()
    assert folder.steps(OTHER) == [FIVE]


def test_a_file_in_another_place_than_its_own_is_refused(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    path = write(folder)
    elsewhere = folder.path / OTHER / "5" / path.name
    elsewhere.parent.mkdir(parents=True)
    path.rename(elsewhere)
    assert folder.open(OTHER, FIVE).names == ()


@pytest.mark.parametrize("where", ["length", "manifest", "first byte", "last byte", "short"])
def test_damage_is_found_told_and_removed(tmp_path: Path, where: str) -> None:
    told: list[tuple[str, StepNumber, str]] = []
    folder = SnapshotFolder(tmp_path, lambda *what: told.append(what))
    path = write(folder)
    whole = path.read_bytes()
    begin_of_data = len(whole) - Part(path).manifest.num_bytes
    place = {"length": 1, "manifest": whole.index(b"counter"), "first byte": begin_of_data, "last byte": len(whole) - 1}
    if where == "short":
        path.write_bytes(whole[:-1])
    else:
        damaged = bytearray(whole)
        damaged[place[where]] ^= 0x10
        path.write_bytes(damaged)
    stored = folder.open(RUN, FIVE)
    if where.endswith("byte"):
        assert sorted(stored.names) == NAMES
        with pytest.raises(DamagedSnapshot, match="do not agree with their hash"):
            read_all(stored)
    else:
        assert stored.names == ()
    assert [(run, step) for run, step, _ in told] == [(RUN, FIVE)]
    assert str(path) in told[0][2]
    assert folder.held() == []


def test_what_was_rotated_away_meanwhile_is_no_damage(tmp_path: Path) -> None:
    told: list[object] = []
    folder = SnapshotFolder(tmp_path, lambda *what: told.append(what))
    write(folder)
    stored = folder.open(RUN, FIVE)
    folder.keep_only(RUN, ())
    with pytest.raises(DamagedSnapshot, match="cannot be read"):
        stored.read("counter")
    assert told == []


def test_leftovers_go_and_what_is_being_written_stays(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    writing = begin(folder)
    left = folder.path / RUN / "5" / "dead.safetensors.partial"
    left.write_bytes(b"half")
    SnapshotFolder(tmp_path).clean(now=0.0)
    assert not left.exists()
    writing.add("counter", STATE["counter"])
    writing.complete()
    assert folder.open(RUN, FIVE).names == ("counter",)


def test_two_that_write_the_same_part_are_told_apart(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    writing = begin(folder)
    with pytest.raises(ResourceError, match="name of its own"):
        begin(folder)
    writing.complete()
    assert folder.open(RUN, FIVE).names == ()


def test_runs_that_are_long_over_make_room(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    write(folder)
    write(folder, run=OTHER)
    for path in (folder.path / OTHER, folder.path / OTHER / "5"):
        os.utime(path, (1000.0, 1000.0))
    folder.clean(now=1000.0 + KEPT_SECONDS - 1.0)
    assert len(folder.held()) == 2
    folder.clean(now=1000.0 + KEPT_SECONDS + 1.0)
    assert [held.run_id for held in folder.held()] == [RUN]


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_folder, "free_disk_bytes", lambda path: snapshot_folder.FREE_BYTES + 999)
    folder = SnapshotFolder(tmp_path)
    with pytest.raises(ResourceError, match=r"--cache"):
        begin(folder)
    assert not folder.path.exists()


def test_what_is_no_id_of_a_run_touches_no_disk(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="no run's id"):
        begin(SnapshotFolder(tmp_path), run="../../elsewhere")


def test_a_name_is_there_with_all_its_moments_or_not_at_all(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    part = begin(folder)
    part.add_group([("counter", STATE["counter"])])
    with pytest.raises(AttributeError):
        part.add_group([("first", STATE["first"]), ("first@step", None)])  # type: ignore[list-item]  # fails half-way
    part.add_group([("half", STATE["half"])])
    part.complete()
    assert_same_state(read(folder), {name: STATE[name] for name in ("counter", "half")})
