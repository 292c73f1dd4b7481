"""Taking up a run that a folder holds: whether it may be, where it goes on, and what its files lack of what was committed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from atoll.coordinator.events import EvaluationEvent, StepEvent
from atoll.coordinator.run.journal import JOURNAL, Journal
from atoll.coordinator.run.resuming import Committed, Resumption
from atoll.coordinator.run_files import FLAG, METRICS, WEIGHTS, disk_error
from atoll.protocol.errors import AtollError, JobError
from atoll.protocol.job import Job, parse_job
from atoll.protocol.wording import first_of

SHOWN = 3
"""Differences between two jobs that one sentence names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenUp:
    """An unfinished run: its open journal, its ``job`` with what it has decided of it, where it goes on, and the events of
    committed steps that nobody was told of."""

    journal: Journal
    job: Job
    resumption: Resumption
    untold: tuple[StepEvent, ...]


def take_up(path: Path, job: Job) -> TakenUp | None:
    """The unfinished run that ``path`` holds, ready to go on; None where a new one may begin. Raises JobError for a run that is
    finished, is of another job, or cannot be read; ResourceError where the disk refuses."""
    if not (path / JOURNAL).exists():
        return None
    journal = _opened(path)
    try:
        taken_up = _taken_up(path, journal, job)
    except BaseException:
        journal.close()
        raise
    if taken_up is None:
        journal.close()
    return taken_up


def _opened(path: Path) -> Journal:
    try:
        return Journal(path / JOURNAL)
    except AtollError as error:
        raise _unreadable(path, error) from error


def _taken_up(path: Path, journal: Journal, job: Job) -> TakenUp | None:
    try:
        if not journal.holds_a_run:
            return None
        kept, outcome, (name, steps) = parse_job(yaml.safe_load(journal.job()), path), journal.outcome(), journal.run()
        resumption = journal.resumption()
    except AtollError as error:
        raise _unreadable(path, error) from error
    step = resumption.last.step if resumption.last is not None else 0
    if outcome == "finished":
        where = path / WEIGHTS
        raise JobError(FLAG, f"{path} holds a finished run ({name}, {steps} steps), its weights are in {where}; {_ELSEWHERE}")
    different = differences(kept, job)
    if different and step == 0:
        return None
    if different:
        raise JobError(
            FLAG,
            f"{path} holds a run of another job, {step} of {steps} steps: {first_of(different, SHOWN, '; ')}; "
            f"give the job as it was to go on with that run, or {_ELSEWHERE}",
        )
    journal.begin_again()
    told = _Told.of(path / METRICS)
    untold = tuple(_step_event(commit) for commit in journal.commits(after=told.step))
    owed = resumption.last is not None and told.evaluation < step and _evaluated(step, job)
    return TakenUp(journal=journal, job=kept, resumption=replace(resumption, owed_evaluation=owed), untold=untold)


_ELSEWHERE = f"give another {FLAG} for a new run"


def differences(kept: Job, given: Job) -> list[str]:
    """In what a job differs from the one that a run was begun with, a sentence each; not in what the run was free to choose."""
    before, now = (dict(_leaves(job.model_dump(mode="json"))) for job in (kept, given))
    if now.get("training.microbatch") == "auto":
        now["training.microbatch"] = before.get("training.microbatch")
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return [f"{key} was {_shown(before.get(key))} and is {_shown(now.get(key))}" for key in keys]


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _leaves(part, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unreadable(path: Path, error: AtollError) -> JobError:
    return JobError(FLAG, f"{path} holds a journal that cannot be read ({error}); {_ELSEWHERE}")


def _evaluated(step: int, job: Job) -> bool:
    every = job.training.evaluate_every
    return every is not None and (step % every == 0 or step == job.training.steps)


def _step_event(commit: Committed) -> StepEvent:
    """What would have been told of a step; what the model returned beside its loss is not known any more."""
    return StepEvent(
        step=commit.step,
        loss=commit.loss,
        tokens=commit.num_tokens,
        tokens_per_second=commit.num_tokens / commit.seconds if commit.seconds > 0 else 0.0,
        seconds=commit.seconds,
        learning_rate=commit.learning_rate,
        grad_norm=commit.grad_norm,
        generation=commit.generation,
        samples=commit.samples,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """The last step and the last evaluation that ``metrics.jsonl`` tells of."""

    step: int = 0
    evaluation: int = 0

    @classmethod
    def of(cls, path: Path) -> _Told:
        """What the file tells; a last line that was not written to its end is cut off."""
        try:
            _cut_torn_line(path)
            last: dict[str, int] = {}
            with path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    kind, step = _kind_and_step(line)
                    last[kind] = max(last.get(kind, 0), step)
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise disk_error(error, path.parent) from error
        return cls(step=last.get(StepEvent.kind, 0), evaluation=last.get(EvaluationEvent.kind, 0))


def _kind_and_step(line: str) -> tuple[str, int]:
    try:
        entry = json.loads(line)
        return str(entry["event"]), int(entry.get("step", 0))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", 0  # somebody else wrote into the file


def _cut_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        block = 4096
        while end > 0:
            start = max(0, end - block)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                file.truncate(start + found + 1)
                return
            end = start
        file.truncate(0)
