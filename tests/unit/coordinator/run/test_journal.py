"""The journal and the state folder: what is committed is kept, a full disk is a sentence, a used folder is refused."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path

import pytest

from atoll.coordinator.cli.snapshots import as_line, lines
from atoll.coordinator.events import VoidEvent
from atoll.coordinator.run.instructions import NoteSnapshot, WriteCommit
from atoll.coordinator.run.journal import JOURNAL, Journal
from atoll.coordinator.run.replay import CommittedStep, compare, difference, is_alarming
from atoll.coordinator.run.snapshots import Moment, Part
from atoll.coordinator.run_files import ADDRESS, METRICS
from atoll.coordinator.state_folder import StateFolder
from atoll.protocol.errors import JobError, ResourceError
from atoll.protocol.ids import Generation, PeerId, StepNumber
from atoll.protocol.job import Job, parse_job
from support.simulated_peers import make_plan


def make_job() -> Job:
    values = {
        "name": "tiny",
        "model": {"builtin": "gpt", "options": {"layers": 1, "width": 8, "heads": 1, "context": 8}},
        "data": {"random": {"kind": "tokens"}, "sequence_length": 8},
        "training": {"steps": 5, "batch": 2},
    }
    return parse_job(values, Path())


def make_commit(step: int, ids: tuple[tuple[int, ...], ...] = ((1, 2), (3, 4))) -> WriteCommit:
    return WriteCommit(
        generation=Generation(1),
        step=StepNumber(step),
        loss=0.1 + 0.2,
        grad_norm=1.5,
        clip_factor=0.5,
        learning_rate=1e-3,
        seconds=0.25,
        num_tokens=64,
        samples="abc",
        sample_ids=ids,
    )


def make_journal(path: Path) -> Journal:
    return Journal.create(path, name="tiny", seed=3, job="name: tiny", steps=5)


def test_commits_and_their_ledger_are_kept(tmp_path: Path) -> None:
    journal = make_journal(tmp_path / JOURNAL)
    journal.write_plan(Generation(1), make_plan([PeerId("a"), PeerId("b")], 2))
    journal.write_commit(make_commit(1))
    journal.write_commit(make_commit(2, ((2**62,), (0, -1))))
    journal.close()
    again = Journal(tmp_path / JOURNAL)
    assert again.last_step() == 2
    assert again.run() == ("tiny", 5)
    assert again.losses() == [(1, 0.1 + 0.2), (2, 0.1 + 0.2)]
    assert again.sample_ids(StepNumber(2)) == [(2**62,), (0, -1)]
    again.close()


def test_another_process_sees_a_commit_at_once(tmp_path: Path) -> None:
    """Nothing of a commit waits in this process: a kill after the call loses nothing."""
    journal = make_journal(tmp_path / JOURNAL)
    journal.write_commit(make_commit(1))
    reader = sqlite3.connect(tmp_path / JOURNAL)
    assert reader.execute("SELECT count(*) FROM commits").fetchone() == (1,)
    assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    reader.close()
    journal.close()


def test_a_step_is_committed_once(tmp_path: Path) -> None:
    journal = make_journal(tmp_path / JOURNAL)
    journal.write_commit(make_commit(1))
    with pytest.raises(ResourceError, match="cannot be used"):
        journal.write_commit(make_commit(1))
    assert journal.last_step() == 1
    journal.close()


def test_a_full_disk_is_a_sentence_and_leaves_no_half_commit(tmp_path: Path) -> None:
    journal = make_journal(tmp_path / JOURNAL)
    # SQLite's own way to run out of room.
    (pages,) = journal._connection.execute("PRAGMA page_count").fetchone()
    journal._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(ResourceError, match="is full: free some space or give another --state"):
        journal.write_commit(make_commit(1, (tuple(range(100_000)),)))
    assert journal.last_step() == 0
    journal.close()


def test_a_folder_in_use_is_refused_and_names_the_process(tmp_path: Path) -> None:
    folder = StateFolder.claim(tmp_path, make_job())
    folder.write_address("127.0.0.1:1234")
    with pytest.raises(JobError, match=f"is used by a run in process {os.getpid()}"):
        StateFolder.claim(tmp_path, make_job())
    folder.close()


@pytest.mark.parametrize(("listens", "written"), [("0.0.0.0:7", "127.0.0.1:7"), ("[::]:7", "[::1]:7"), ("[::1]:7", "[::1]:7")])
def test_the_address_can_be_dialled_from_this_machine(tmp_path: Path, listens: str, written: str) -> None:
    folder = StateFolder.claim(tmp_path, make_job())
    folder.write_address(listens)
    assert json.loads((tmp_path / ADDRESS).read_text())["address"] == written
    folder.close()


def test_the_small_files(tmp_path: Path) -> None:
    folder = StateFolder.claim(tmp_path, make_job())
    folder.write_address("127.0.0.1:1234")
    folder.write_event(VoidEvent(step=1, reason="r", peer="a", stage=None))
    written = json.loads((tmp_path / ADDRESS).read_text())
    assert (written["address"], written["pid"], written["insecure"]) == ("127.0.0.1:1234", os.getpid(), False)
    assert json.loads((tmp_path / METRICS).read_text())["event"] == "void"
    folder.close()


def test_metrics_on_a_full_disk_are_a_sentence(tmp_path: Path) -> None:
    folder = StateFolder.claim(tmp_path, make_job())
    folder._metrics.close()
    folder._metrics = open("/dev/full", "a")  # noqa: SIM115
    with pytest.raises(ResourceError, match="is full"):
        folder.write_event(VoidEvent(step=1, reason="r", peer="a", stage=None))
    with pytest.raises(ResourceError, match="is full"):
        folder.close()


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="give another --state"):
        StateFolder.claim(tmp_path / "file" / "run", make_job())


def test_snapshots_are_kept_until_they_are_dropped(tmp_path: Path) -> None:
    journal = make_journal(tmp_path / JOURNAL)
    older, newer = Moment(step=StepNumber(4)), Moment(step=StepNumber(6), line=1)
    for moment, noted in ((older, 100.0), (newer, 160.0)):
        journal.write_snapshot(NoteSnapshot(moment=moment), noted)
        for peer in ("a", "b"):
            journal.write_part(PeerId(peer), Part(moment=moment, names=frozenset({peer}), num_bytes=1 << 20))
    journal.write_part(PeerId("a"), Part(moment=older, names=frozenset({"b"}), num_bytes=1 << 20))
    journal.write_snapshot(NoteSnapshot(moment=older, complete=True, num_bytes=2 << 20, seconds=1.5), 101.0)
    journal.write_snapshot(NoteSnapshot(moment=older, complete=True, safe=True), 102.0)
    journal.close()
    again = Journal(tmp_path / JOURNAL)
    first, second = again.snapshots()
    assert (first.moment, first.complete, first.safe, first.peers) == (newer, False, False, ("a", "b"))
    assert (second.moment, second.complete, second.safe, second.num_bytes, second.noted) == (older, True, True, 2 << 20, 100.0)
    parts = {(peer, part.moment): part for peer, part in again.snapshot_parts()}
    assert parts[PeerId("a"), older] == Part(moment=older, names=frozenset({"a", "b"}), num_bytes=2 << 20)
    assert [line.split() for line in lines([first, second], 165.0)] == [
        ["step", "age", "size", "state", "on", "the", "disks", "of"],
        ["6", "0:05", "-", "incomplete", "a,", "b"],
        ["4", "1:05", "2.0", "MiB", "safe", "a,", "b"],
    ]
    assert json.loads(as_line(second))["safe"] is True
    again.keep_snapshots([newer.step])
    assert [row.moment for row in again.snapshots()] == [newer]
    assert {part.moment for _, part in again.snapshot_parts()} == {newer}
    again.close()


def test_a_step_that_is_done_again_is_compared_with_what_was_committed(tmp_path: Path) -> None:
    journal = make_journal(tmp_path / JOURNAL)
    journal.write_commit(make_commit(1))
    assert journal.committed(StepNumber(1)) == CommittedStep(loss=0.1 + 0.2, grad_norm=1.5, samples="abc")
    journal.close()
    committed = CommittedStep(loss=0.3, grad_norm=1.5, samples="abc")
    again = compare(make_commit(1), committed)
    assert (again.step, again.equal) == (1, False)
    assert "has loss 0.30000000000000004" in difference(make_commit(1), committed)
    other = CommittedStep(loss=0.1 + 0.2, grad_norm=1.5, samples="xyz")
    assert "with other samples" in difference(make_commit(1), other)
    assert is_alarming(make_commit(1), committed, lossless=True)
    assert not is_alarming(make_commit(1), committed, lossless=False), "codecs that lose bits may well differ"
    assert is_alarming(make_commit(1), other, lossless=False)
