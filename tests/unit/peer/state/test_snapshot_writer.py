"""Writing beside training: nothing changes before it is read, and a disk that is slow or full costs a snapshot, not the run."""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from atoll.peer.stage.events import SnapshotWritten
from atoll.peer.state import snapshot_part
from atoll.peer.state.snapshot_folder import SnapshotFolder
from atoll.peer.state.snapshot_writer import SnapshotWriter
from atoll.protocol.ids import PeerId, StepNumber
from support.states import assert_same_state, state_of

RUN = "c" * 32
STEP = StepNumber(4)
WAIT_SECONDS = 20.0


class Writing:
    """A writer, its disk, and what it said."""

    def __init__(self, cache: Path) -> None:
        self.said: queue.SimpleQueue[SnapshotWritten] = queue.SimpleQueue()
        self.folder = SnapshotFolder(cache)
        self.writer = SnapshotWriter(self.folder, PeerId("ann"), self.said.put)
        self.writer.run_id = RUN

    def answer(self) -> SnapshotWritten:
        return self.said.get(timeout=WAIT_SECONDS)

    def read(self, step: StepNumber = STEP) -> dict[str, torch.Tensor]:
        stored = self.folder.open(RUN, step)
        return {key: value for name in stored.names for key, value in stored.read(name).items()}


@contextmanager
def writing(cache: Path) -> Iterator[Writing]:
    found = Writing(cache)
    found.writer.start()
    yield found
    found.writer.stop()
    assert found.writer.join(WAIT_SECONDS)


class SlowDisk:
    """Stands still at each write until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.let_go = threading.Event()
        write_all = snapshot_part._write_all

        def slow(file: int, data: memoryview, offset: int) -> None:
            self.reached.set()
            assert self.let_go.wait(WAIT_SECONDS)
            write_all(file, data, offset)

        monkeypatch.setattr(snapshot_part, "_write_all", slow)


def test_the_state_is_on_the_disk_and_may_change_once_it_is_read(tmp_path: Path) -> None:
    state = state_of("one", "two")
    wanted = {name: value.clone() for name, value in state.items()}
    with writing(tmp_path) as disk:
        disk.writer.write(STEP, state)
        disk.writer.wait_until_read()
        for value in state.values():
            value.zero_()
        answer = disk.answer()
        assert answer.failure == ""
        assert (answer.step, sorted(answer.names)) == (STEP, ["counter", "half", "one", "two"])
        assert answer.num_bytes == sum(value.numel() * value.itemsize for value in wanted.values())
        assert answer.seconds >= answer.stalled_seconds >= 0.0
        assert_same_state(disk.read(), wanted)


def test_an_update_waits_for_the_disk_and_the_wait_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowDisk(monkeypatch)
    with writing(tmp_path) as disk:
        disk.writer.write(STEP, state_of("one"))
        assert slow.reached.wait(WAIT_SECONDS)
        waiting = threading.Thread(target=disk.writer.wait_until_read)
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        slow.let_go.set()
        waiting.join(WAIT_SECONDS)
        assert not waiting.is_alive()
        answer = disk.answer()
        assert answer.failure == ""
        assert answer.stalled_seconds > 0.0


def test_a_disk_that_stands_still_costs_the_snapshot_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowDisk(monkeypatch)
    with writing(tmp_path) as disk:
        state = state_of("one")
        disk.writer.write(STEP, state)
        assert slow.reached.wait(WAIT_SECONDS)
        disk.writer.wait_until_read(within_seconds=0.05)
        state["one"].zero_()  # training goes on
        slow.let_go.set()
        assert "the disk took longer than 0.05 s" in disk.answer().failure
        assert disk.folder.held() == []
        disk.writer.write(STEP, state)
        assert disk.answer().failure == ""


def test_what_waits_behind_a_disk_that_stands_still_is_given_up_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowDisk(monkeypatch)
    with writing(tmp_path) as disk:
        disk.writer.write(STEP, state_of("one"))
        disk.writer.write(StepNumber(5), state_of("one"))
        disk.writer.wait_until_read(within_seconds=0.05)
        slow.let_go.set()
        assert [(answer.step, bool(answer.failure)) for answer in (disk.answer(), disk.answer())] == [(4, True), (5, True)]


def test_a_disk_that_fails_is_told_and_what_was_good_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = state_of("one")
    with writing(tmp_path) as disk:
        disk.writer.write(STEP, good)
        assert disk.answer().failure == ""

        def full(file: int, data: memoryview, offset: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(snapshot_part, "_write_all", full)
        disk.writer.write(StepNumber(5), state_of("one", seed=1))
        disk.writer.wait_until_read()
        answer = disk.answer()
        assert "is full" in answer.failure
        assert "--cache" in answer.failure
        assert [held.step for held in disk.folder.held()] == [STEP]
        assert_same_state(disk.read(), good)


def test_a_run_without_an_id_keeps_nothing(tmp_path: Path) -> None:
    with writing(tmp_path) as disk:
        disk.writer.run_id = ""
        disk.writer.write(STEP, state_of("one"))
        assert "no run's id" in disk.answer().failure
