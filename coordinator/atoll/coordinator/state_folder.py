"""The folder that holds all of a run: who may use it, and the small files in it.

``journal.sqlite`` (its own module), ``metrics.jsonl`` (events, one a line), ``job.yaml``, ``address.json`` (where the
coordinator listens, and its process), ``weights.safetensors`` at the end, ``cache/`` for tokenized text. A folder whose run did
not come to its end is taken up where it stands."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import TextIO

from atoll.coordinator.events import Event
from atoll.coordinator.run.journal import JOURNAL, Journal
from atoll.coordinator.run_files import ADDRESS, FLAG, JOB, METRICS, TIME, disk_error, write_whole
from atoll.coordinator.taking_up import TakenUp, take_up
from atoll.protocol.channel import Address, parse_address
from atoll.protocol.errors import JobError
from atoll.protocol.job import Job, dump_job

LOCK = ".lock"


class StateFolder:
    """An open folder, claimed for this run; :meth:`close` gives the files back. ``job`` is what the run has decided of its job,
    ``resumption`` where it goes on if it began before, ``untold`` are steps that were committed and not told of."""

    def __init__(self, path: Path, journal: Journal, lock: int, job: Job, taken_up: TakenUp | None) -> None:
        self.path = path
        self.journal = journal
        self.job = taken_up.job if taken_up is not None else job
        self.resumption = taken_up.resumption if taken_up is not None else None
        self.untold = taken_up.untold if taken_up is not None else ()
        self._lock = lock
        self._metrics = _opened(path / METRICS)

    @classmethod
    def claim(cls, path: Path, job: Job) -> StateFolder:
        """Take the folder for a new run, or to go on with the one in it. Raises JobError when that is another run or has come
        to its end, ResourceError when the folder cannot be written.

        A run of another job that never committed a step has left nothing worth keeping; its files make room.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
        except OSError as error:
            raise disk_error(error, path) from error
        try:
            taken_up = take_up(path, job)
            journal = taken_up.journal if taken_up is not None else _new_journal(path, job)
            return cls(path, journal, lock, job, taken_up)
        except BaseException:
            os.close(lock)
            raise

    def keep_job(self, job: Job) -> None:
        """Write down what the run has decided of its job, in the journal and beside it: it must hold to the run's end."""
        text = dump_job(job)
        self.journal.write_job(text)
        write_whole(self.path / JOB, text)

    def write_address(self, bound: str, *, insecure: bool = False) -> None:
        """Say where the coordinator listens, for commands on this machine and for invitations, and whether in plain text;
        readers see the whole file or none."""
        address = bound
        listens = parse_address(address)
        if listens.is_unspecified:
            address = str(Address("::1" if ":" in listens.host else "127.0.0.1", listens.port))
        entry = {"address": address, "pid": os.getpid(), "listens": bound, "insecure": insecure}
        write_whole(self.path / ADDRESS, json.dumps(entry) + "\n")

    @property
    def listened(self) -> int | None:
        """The port on which the coordinator of this run listened last."""
        try:
            return parse_address(json.loads((self.path / ADDRESS).read_text(encoding="utf-8"))["address"]).port
        except (OSError, ValueError, KeyError, TypeError, JobError):
            return None

    def write_event(self, event: Event) -> None:
        """Append a line to the metrics, with the time of day."""
        try:
            self._metrics.write(event.to_json(**{TIME: time.time()}) + "\n")
            self._metrics.flush()
        except OSError as error:
            raise disk_error(error, self.path) from error

    def close(self) -> None:
        """Close the files and let go of the folder."""
        try:
            self.journal.close()
            self._metrics.close()
        except OSError as error:
            raise disk_error(error, self.path) from error
        finally:
            os.close(self._lock)


def _new_journal(path: Path, job: Job) -> Journal:
    text = dump_job(job)
    try:
        for name in (JOURNAL, f"{JOURNAL}-wal", f"{JOURNAL}-shm", METRICS, ADDRESS):
            (path / name).unlink(missing_ok=True)
        (path / JOB).write_text(text, encoding="utf-8")
    except OSError as error:
        raise disk_error(error, path) from error
    return Journal.create(path / JOURNAL, name=job.name, seed=job.training.seed, job=text, steps=job.training.steps)


def _opened(path: Path) -> TextIO:
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise disk_error(error, path.parent) from error


def _lock(path: Path) -> int:
    """Hold the folder as long as this process lives; the system lets go of it however the process ends."""
    file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise JobError(FLAG, f"{path} is used by a run{_process(path)}; stop that run or give another folder") from None
    return file


def _process(path: Path) -> str:
    try:
        return f" in process {int(json.loads((path / ADDRESS).read_text(encoding='utf-8'))['pid'])}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
