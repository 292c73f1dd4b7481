"""A process that is killed while it writes a snapshot, and one whose disk is full: what was good stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from atoll.peer.state.snapshot_folder import SnapshotFolder
from atoll.peer.state.snapshot_part import PARTIAL_SUFFIX
from atoll.protocol.ids import StepNumber
from support.snapshot_process import NAME, NUM_ELEMENTS, RUN
from support.states import assert_same_state, state_of
from support.waiting import assert_eventually

ONE, TWO = StepNumber(1), StepNumber(2)


def begin(cache: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "support.snapshot_process", str(cache), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])


def assert_first_is_good(folder: SnapshotFolder) -> None:
    assert [held.step for held in folder.held()] == [ONE]
    stored = folder.open(RUN, ONE)
    found = {key: value for name in stored.names for key, value in stored.read(name).items()}
    assert_same_state(found, state_of(NAME, num_elements=1000, seed=1))


async def test_sigkill_in_the_middle_of_writing_leaves_the_former_snapshot(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    with begin(tmp_path) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "1 complete\n"
            partial = folder.path / RUN / "2" / f"ann.safetensors{PARTIAL_SUFFIX}"
            await assert_eventually(lambda: partial.exists() and partial.stat().st_size > 2**16, within_seconds=60)
        finally:
            process.kill()
        assert process.stdout.read() == ""
    assert 0 < partial.stat().st_size < 4 * NUM_ELEMENTS
    assert_first_is_good(folder)
    folder.clean(now=0.0)
    assert not partial.exists(), "what a dead process left is removed at the next start"
    assert_first_is_good(folder)


async def test_a_full_disk_is_told_and_harmless(tmp_path: Path) -> None:
    with begin(tmp_path, str(2**20)) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    first, second = output.splitlines()
    assert first == "1 complete"
    assert second.startswith("2 the disk that holds")
    assert "--cache" in second
    folder = SnapshotFolder(tmp_path)
    assert_first_is_good(folder)
    assert list(folder.path.rglob(f"*{PARTIAL_SUFFIX}")) == []
