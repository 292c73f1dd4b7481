"""A folder whose run did not come to its end: it is taken up where it stands, and nothing is told or counted twice."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.codec_choices import CodecChange
from atoll.coordinator.events import EvaluationEvent, StepEvent, VoidEvent
from atoll.coordinator.run.instructions import WriteCommit
from atoll.coordinator.run.journal import JOURNAL, Journal
from atoll.coordinator.run_files import JOB, METRICS
from atoll.coordinator.state_folder import StateFolder
from atoll.protocol.errors import JobError
from atoll.protocol.ids import Generation, PeerId, StepNumber
from atoll.protocol.job import Job, parse_job
from support.simulated_peers import make_plan

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def make_job(**training: Any) -> Job:
    values = {
        "name": "tiny",
        "model": {"builtin": "gpt", "options": {"layers": 1, "width": 8, "heads": 1, "context": 8}},
        "data": {"random": {"kind": "tokens"}, "sequence_length": 8, "validation": 0.1},
        "training": {"steps": 5, "batch": 2, **training},
    }
    return parse_job(values, Path())


def make_commit(step: int) -> WriteCommit:
    return WriteCommit(
        generation=Generation(7),
        step=StepNumber(step),
        loss=step / 3,
        grad_norm=1.5,
        clip_factor=0.5,
        learning_rate=1e-3,
        seconds=0.25,
        num_tokens=64,
        samples=f"samples of {step}",
        sample_ids=((step, step), (step, step)),
    )


def step_event(step: int) -> StepEvent:
    commit = make_commit(step)
    return StepEvent(
        step=step,
        loss=commit.loss,
        tokens=64,
        tokens_per_second=256.0,
        seconds=0.25,
        learning_rate=1e-3,
        grad_norm=1.5,
        generation=7,
        samples=commit.samples,
    )


def killed(path: Path, job: Job, commits: int = 2, told: int = 2) -> StateFolder:
    """A folder as a coordinator leaves it that was killed: opened, used, and never closed in order."""
    folder = StateFolder.claim(path, job)
    for step in range(1, commits + 1):
        folder.journal.write_commit(make_commit(step))
        if step <= told:
            folder.write_event(step_event(step))
    folder.close()
    return folder


def test_a_run_goes_on_where_it_stands(tmp_path: Path) -> None:
    first = StateFolder.claim(tmp_path, make_job())
    run_id = first.journal.run_id()
    assert first.resumption is None
    assert first.journal.reserve(Generation(1)) > 7
    first.journal.write_plan(Generation(3), make_plan([C], 1))
    first.journal.write_plan(Generation(7), make_plan([A, B, C], 2))
    changes = [("raw", 1), ("int8", 2)]
    first.journal.write_codecs(
        CodecChange(step=StepNumber(step), source=A, target=B, codec=codec, reason="r") for codec, step in changes
    )
    first.journal.write_commit(make_commit(1))
    first.journal.write_commit(make_commit(2))
    first.close()
    again = StateFolder.claim(tmp_path, make_job())
    assert again.journal.run_id() == run_id
    resumption = again.resumption
    assert resumption is not None
    assert resumption.generation >= first_reserved(tmp_path) > 7
    assert resumption.last == make_commit(2).without_samples()
    assert resumption.plan == make_plan([A, B, C], 2)
    assert resumption.codecs == {(A, B): "int8"}
    again.close()


def first_reserved(path: Path) -> int:
    connection = sqlite3.connect(path / JOURNAL)
    (reserved,) = connection.execute("SELECT reserved FROM run").fetchone()
    connection.close()
    return int(reserved)


def test_generations_only_ever_grow(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / JOURNAL, name="tiny", seed=0, job="", steps=5)
    used = Generation(0)
    for _ in range(3):
        begins = journal.resumption().generation
        assert begins >= used
        used = journal.reserve(Generation(begins + 1))
        journal.close()
        journal = Journal(tmp_path / JOURNAL)
    journal.close()


def test_steps_that_nobody_was_told_of_are_told(tmp_path: Path) -> None:
    killed(tmp_path, make_job(), commits=4, told=2)
    folder = StateFolder.claim(tmp_path, make_job())
    assert folder.untold == (step_event(3), step_event(4))
    for event in folder.untold:
        folder.write_event(event)
    folder.close()
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    again = StateFolder.claim(tmp_path, make_job())
    assert again.untold == ()
    again.close()


@pytest.mark.parametrize("torn", ['{"event": "st', "x" * 10_000, '{"event": "step", "step": 9}'])
def test_a_torn_last_line_is_cut(tmp_path: Path, torn: str) -> None:
    killed(tmp_path, make_job())
    whole = (tmp_path / METRICS).read_text()
    (tmp_path / METRICS).write_text(whole + torn)
    folder = StateFolder.claim(tmp_path, make_job())
    folder.write_event(VoidEvent(step=3, reason="r", peer="a", stage=0))
    folder.close()
    lines = (tmp_path / METRICS).read_text().splitlines(keepends=True)
    assert "".join(lines[:2]) == whole
    assert [json.loads(line)["event"] for line in lines] == ["step", "step", "void"]


def test_a_file_of_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    killed(tmp_path, make_job(), told=0)
    (tmp_path / METRICS).write_text("torn")
    folder = StateFolder.claim(tmp_path, make_job())
    assert (tmp_path / METRICS).read_text() == ""
    assert len(folder.untold) == 2
    folder.close()


@pytest.mark.parametrize(("every", "told", "owed"), [(2, 0, True), (2, 2, False), (3, 0, False), (None, 0, False)])
def test_an_evaluation_is_owed_until_it_was_told(tmp_path: Path, every: int | None, told: int, owed: bool) -> None:
    job = make_job(evaluate_every=every)
    folder = killed(tmp_path, job)
    if told:
        folder = StateFolder.claim(tmp_path, job)
        folder.write_event(EvaluationEvent(step=told, loss=1.0))
        folder.close()
    again = StateFolder.claim(tmp_path, job)
    assert again.resumption is not None
    assert again.resumption.owed_evaluation == owed
    again.close()


def test_another_job_is_refused_with_the_difference(tmp_path: Path) -> None:
    killed(tmp_path, make_job(clip_norm=1.0))
    with pytest.raises(JobError) as raised:
        StateFolder.claim(tmp_path, make_job(steps=9, clip_norm=2.0))
    sentence = str(raised.value)
    assert "holds a run of another job, 2 of 5 steps" in sentence
    assert "training.clip_norm was 1.0 and is 2.0; training.steps was 5 and is 9" in sentence
    assert "give the job as it was to go on with that run, or give another --state" in sentence


def test_what_is_said_by_default_makes_no_other_job(tmp_path: Path) -> None:
    killed(tmp_path, make_job())
    folder = StateFolder.claim(tmp_path, make_job(microbatch=make_job().training.microbatch, seed=0))
    assert folder.resumption is not None
    folder.close()


def test_the_microbatch_that_the_run_chose_is_kept(tmp_path: Path) -> None:
    job = make_job(microbatch="auto")
    folder = StateFolder.claim(tmp_path, job)
    folder.keep_job(job.with_microbatch(2))
    folder.journal.write_commit(make_commit(1))
    folder.close()
    again = StateFolder.claim(tmp_path, job)
    assert again.job.training.microbatch == 2
    again.close()
    with pytest.raises(JobError, match=r"training.microbatch was 2 and is 1"):
        StateFolder.claim(tmp_path, make_job(microbatch=1))


def test_a_finished_run_says_so_and_where_its_weights_are(tmp_path: Path) -> None:
    folder = StateFolder.claim(tmp_path, make_job())
    folder.journal.write_commit(make_commit(1))
    folder.journal.write_outcome("finished", "finished after 5 steps")
    folder.close()
    with pytest.raises(
        JobError, match=r"holds a finished run \(tiny, 5 steps\), its weights are in .*/weights.safetensors; give"
    ):
        StateFolder.claim(tmp_path, make_job())


@pytest.mark.parametrize("outcome", ["stopped", "failed"])
def test_a_run_that_ended_early_is_taken_up(tmp_path: Path, outcome: str) -> None:
    folder = killed(tmp_path, make_job())
    folder = StateFolder.claim(tmp_path, make_job())
    folder.journal.write_outcome(outcome, "that is how it ended")
    folder.close()
    again = StateFolder.claim(tmp_path, make_job())
    assert again.resumption is not None
    assert again.journal.outcome() is None
    again.close()


def test_another_job_takes_the_place_of_a_run_that_committed_nothing(tmp_path: Path) -> None:
    first = StateFolder.claim(tmp_path, make_job())
    run_id = first.journal.run_id()
    first.write_event(VoidEvent(step=1, reason="r", peer="a", stage=0))
    first.close()
    same = StateFolder.claim(tmp_path, make_job())
    assert same.journal.run_id() == run_id
    same.close()
    other = StateFolder.claim(tmp_path, make_job(steps=9))
    assert other.journal.run_id() != run_id
    assert other.resumption is None
    assert (tmp_path / METRICS).read_text() == ""
    assert "steps: 9" in (tmp_path / JOB).read_text()
    other.close()


def test_a_journal_that_was_not_made_whole_makes_room(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / JOURNAL).close()
    folder = StateFolder.claim(tmp_path, make_job())
    assert folder.resumption is None
    assert folder.journal.last_step() == 0
    folder.close()


@pytest.mark.parametrize("spoil", ["DROP TABLE run", "PRAGMA user_version = 1"])
def test_a_journal_that_cannot_be_read_is_refused(tmp_path: Path, spoil: str) -> None:
    killed(tmp_path, make_job())
    connection = sqlite3.connect(tmp_path / JOURNAL)
    connection.execute(spoil)
    connection.close()
    with pytest.raises(JobError, match=r"holds a journal that cannot be read .*; give another --state"):
        StateFolder.claim(tmp_path, make_job())
