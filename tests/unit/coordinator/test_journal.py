"""The journal and the state folder: what is committed is kept, a full disk is a sentence, a used folder is refused."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path

import pytest

from atoll.coordinator.events import VoidEvent
from atoll.coordinator.run.instructions import WriteCommit
from atoll.coordinator.run.journal import JOURNAL, Journal
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


def test_a_folder_that_holds_a_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = StateFolder.claim(tmp_path / "run", make_job())
    folder.journal.write_commit(make_commit(1))
    folder.close()
    with pytest.raises(JobError, match=r"already holds a run \(tiny, 1 of 5 steps\); give another folder or remove this one"):
        StateFolder.claim(tmp_path / "run", make_job())


def test_a_folder_in_use_is_refused_and_names_the_process(tmp_path: Path) -> None:
    folder = StateFolder.claim(tmp_path, make_job())
    folder.write_address("127.0.0.1:1234")
    with pytest.raises(JobError, match=f"is used by a run in process {os.getpid()}"):
        StateFolder.claim(tmp_path, make_job())
    folder.close()


def test_a_run_that_committed_nothing_makes_room(tmp_path: Path) -> None:
    first = StateFolder.claim(tmp_path, make_job())
    first.write_event(VoidEvent(step=1, reason="r", peer="a", stage=0))
    first.close()
    second = StateFolder.claim(tmp_path, make_job())
    assert (tmp_path / METRICS).read_text() == ""
    second.close()


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
    assert json.loads((tmp_path / ADDRESS).read_text()) == {"address": "127.0.0.1:1234", "pid": os.getpid()}
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
