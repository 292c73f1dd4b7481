"""The journal of a run: an SQLite file in which a step is committed before any peer hears of it.

Tables: ``run`` (one row: name, seed, the job, how it ended, what it is called for ever, and up to which number generations are
reserved: a killed coordinator may have used them), ``plans`` (by generation), ``commits`` (by step) and ``ledger``
(which samples each committed step consumed), ``predictions`` (beside what was measured), ``codecs`` (of each link, from which
step on, and why), ``snapshots`` (by step and line of steps) and ``snapshot_parts`` (what is on whose disk), ``origin`` (the
snapshot that a run goes on from), ``stores`` (where its own are put). Written ahead (WAL) and synchronised at each commit, so
neither a killed process nor a power cut loses a step that a peer was told of.

All calls are made from one thread at a time. A full or failing disk raises ResourceError.
"""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from atoll.coordinator.codec_choices import CodecChange
from atoll.coordinator.planning.plan import Plan
from atoll.coordinator.run.instructions import NoteSnapshot, WriteCommit
from atoll.coordinator.run.replay import CommittedStep
from atoll.coordinator.run.resuming import Committed, Resumption
from atoll.coordinator.run.snapshots import Moment, Part
from atoll.coordinator.transactions import transaction
from atoll.protocol.errors import ResourceError
from atoll.protocol.ids import Generation, PeerId, StepNumber

JOURNAL = "journal.sqlite"

SNAPSHOT_SCHEMA = """
CREATE TABLE origin (step INTEGER NOT NULL, url TEXT NOT NULL);
CREATE TABLE stores (url TEXT NOT NULL PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE snapshots (step INTEGER NOT NULL, line INTEGER NOT NULL, complete INTEGER NOT NULL, safe INTEGER NOT NULL,
num_bytes INTEGER NOT NULL, seconds REAL NOT NULL, noted REAL NOT NULL, PRIMARY KEY (step, line)) WITHOUT ROWID;
CREATE TABLE snapshot_parts (peer TEXT NOT NULL, step INTEGER NOT NULL, line INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
names TEXT NOT NULL, PRIMARY KEY (peer, step)) WITHOUT ROWID;
"""

VERSION = 2
"""Of the tables; a journal of another version is not taken up."""
RESERVED = 1000
"""Generations at a time: a run has few in an hour, and each block is one write."""

_SCHEMA = """
CREATE TABLE run (name TEXT NOT NULL, seed INTEGER NOT NULL, job TEXT NOT NULL, steps INTEGER NOT NULL, outcome TEXT,
reason TEXT, run_id TEXT NOT NULL, reserved INTEGER NOT NULL);
CREATE TABLE plans (generation INTEGER PRIMARY KEY, plan TEXT NOT NULL);
CREATE TABLE commits (step INTEGER PRIMARY KEY, generation INTEGER NOT NULL, loss REAL NOT NULL, grad_norm REAL NOT NULL,
clip_factor REAL NOT NULL, learning_rate REAL NOT NULL, seconds REAL NOT NULL, num_tokens INTEGER NOT NULL,
samples TEXT NOT NULL);
CREATE TABLE ledger (step INTEGER NOT NULL REFERENCES commits (step), microbatch INTEGER NOT NULL, sample_ids BLOB NOT NULL,
PRIMARY KEY (step, microbatch)) WITHOUT ROWID;
CREATE TABLE predictions (what TEXT NOT NULL, peer TEXT NOT NULL, step INTEGER NOT NULL, predicted REAL NOT NULL,
measured REAL NOT NULL);
CREATE TABLE codecs (step INTEGER NOT NULL, source TEXT NOT NULL, target TEXT NOT NULL, codec TEXT NOT NULL,
reason TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRow:
    """A snapshot as the journal knows it: ``noted`` when it was ordered, as time of day, ``peers`` who has a part of it."""

    moment: Moment
    complete: bool
    safe: bool
    num_bytes: int
    seconds: float
    noted: float
    peers: tuple[PeerId, ...]


class Journal:
    """One open journal. ``sample_ids`` in the ledger are little-endian 64-bit integers, in the order of the microbatch."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._spoken():
            # Isolation level None: transactions are opened where they are needed, not by the driver's guess.
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")

    @classmethod
    def create(cls, path: Path, *, name: str, seed: int, job: str, steps: int) -> Journal:
        """A new journal for a run; ``path`` must not exist."""
        journal = cls(path)
        with journal._spoken():
            # One transaction: a kill in the middle leaves an empty file, which makes room for another run.
            journal._connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} {SNAPSHOT_SCHEMA} PRAGMA user_version = {VERSION};")
            row = (name, seed, job, steps, uuid.uuid4().hex)
            journal._connection.execute("INSERT INTO run VALUES (?, ?, ?, ?, NULL, NULL, ?, 0)", row)
            journal._connection.execute("COMMIT")
        return journal

    def close(self) -> None:
        self._connection.close()

    def write_plan(self, generation: Generation, plan: Plan) -> None:
        text = json.dumps(asdict(plan))
        with self._spoken():
            self._connection.execute("INSERT INTO plans VALUES (?, ?)", (generation, text))

    def write_commit(self, commit: WriteCommit) -> None:
        """The step and its ledger, both or neither."""
        with self._spoken(), transaction(self._connection):
            self._connection.execute(
                "INSERT INTO commits VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    commit.step,
                    commit.generation,
                    commit.loss,
                    commit.grad_norm,
                    commit.clip_factor,
                    commit.learning_rate,
                    commit.seconds,
                    commit.num_tokens,
                    commit.samples,
                ),
            )
            self._connection.executemany(
                "INSERT INTO ledger VALUES (?, ?, ?)",
                ((commit.step, index, _packed(ids)) for index, ids in enumerate(commit.sample_ids)),
            )

    def write_prediction(self, what: str, peer: str, step: StepNumber, predicted: float, measured: float) -> None:
        with self._spoken():
            self._connection.execute("INSERT INTO predictions VALUES (?, ?, ?, ?, ?)", (what, peer, step, predicted, measured))

    def write_codecs(self, changes: Iterable[CodecChange]) -> None:
        """What links encode with, from which step on; until the next entry of the link."""
        rows = [(change.step, change.source, change.target, change.codec, change.reason) for change in changes]
        with self._spoken(), transaction(self._connection):
            self._connection.executemany("INSERT INTO codecs VALUES (?, ?, ?, ?, ?)", rows)

    def write_snapshot(self, snapshot: NoteSnapshot, noted: float) -> None:
        """How a snapshot stands now; ``noted`` is the time of day. What was known of it stays where nothing new is said."""
        moment = snapshot.moment
        with self._spoken():
            self._connection.execute(
                "INSERT INTO snapshots VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (step, line) DO UPDATE SET "
                "complete = max(complete, excluded.complete), safe = max(safe, excluded.safe), "
                "num_bytes = max(num_bytes, excluded.num_bytes), seconds = max(seconds, excluded.seconds)",
                (moment.step, moment.line, snapshot.complete, snapshot.safe, snapshot.num_bytes, snapshot.seconds, noted),
            )

    def write_part(self, peer: PeerId, part: Part) -> None:
        """A peer has this on its disk, as one with what it has of that snapshot already."""
        with self._spoken(), transaction(self._connection):
            query = "SELECT names, num_bytes FROM snapshot_parts WHERE peer = ? AND step = ? AND line = ?"
            row = self._connection.execute(query, (peer, part.moment.step, part.moment.line)).fetchone()
            older, num_bytes = (json.loads(row[0]), row[1]) if row is not None else ((), 0)
            names = json.dumps(sorted(part.names.union(older)))
            values = (peer, part.moment.step, part.moment.line, part.num_bytes + num_bytes, names)
            self._connection.execute("INSERT OR REPLACE INTO snapshot_parts VALUES (?, ?, ?, ?, ?)", values)

    def keep_snapshots(self, steps: Iterable[StepNumber]) -> None:
        """Forget all other snapshots."""
        kept = json.dumps(sorted(steps))
        with self._spoken(), transaction(self._connection):
            for table in ("snapshots", "snapshot_parts"):
                self._connection.execute(f"DELETE FROM {table} WHERE step NOT IN (SELECT value FROM json_each(?))", (kept,))

    def snapshots(self) -> list[SnapshotRow]:
        """The snapshots that peers were told to keep, the newest first."""
        with self._spoken():
            rows = self._connection.execute(
                "SELECT step, line, complete, safe, num_bytes, seconds, noted FROM snapshots ORDER BY step DESC, line DESC"
            ).fetchall()
        parts = self.snapshot_parts()
        return [
            SnapshotRow(
                moment=Moment(step=StepNumber(step), line=line),
                complete=bool(complete),
                safe=bool(safe),
                num_bytes=num_bytes,
                seconds=seconds,
                noted=noted,
                peers=tuple(peer for peer, part in parts if part.moment == Moment(step=StepNumber(step), line=line)),
            )
            for step, line, complete, safe, num_bytes, seconds, noted in rows
        ]

    def snapshot_parts(self) -> list[tuple[PeerId, Part]]:
        """What was on whose disk when it was last heard of."""
        with self._spoken():
            rows = self._connection.execute(
                "SELECT peer, step, line, num_bytes, names FROM snapshot_parts ORDER BY step, peer"
            ).fetchall()
        return [
            (
                PeerId(peer),
                Part(
                    moment=Moment(step=StepNumber(step), line=line),
                    names=frozenset(json.loads(names)),
                    num_bytes=num_bytes,
                ),
            )
            for peer, step, line, num_bytes, names in rows
        ]

    def write_job(self, text: str) -> None:
        """The job with what the run itself has decided of it."""
        with self._spoken():
            self._connection.execute("UPDATE run SET job = ?", (text,))

    def write_origin(self, step: StepNumber, url: str) -> None:
        """The run goes on from the snapshot of ``step`` that lies at ``url``: its own steps come after it."""
        with self._spoken():
            self._connection.execute("INSERT INTO origin VALUES (?, ?)", (step, url))

    def origin(self) -> tuple[StepNumber, str] | None:
        """Which snapshot the run goes on from, None for a run that began with first values."""
        with self._spoken():
            row = self._connection.execute("SELECT step, url FROM origin").fetchone()
        return None if row is None else (StepNumber(row[0]), str(row[1]))

    def write_store(self, url: str) -> None:
        """This run's snapshots are put there as well."""
        with self._spoken():
            self._connection.execute("DELETE FROM stores")
            self._connection.execute("INSERT INTO stores VALUES (?)", (url,))

    def store(self) -> str | None:
        """Where this run's snapshots are put, None for a run without a store."""
        with self._spoken():
            row = self._connection.execute("SELECT url FROM stores").fetchone()
        return None if row is None else str(row[0])

    def write_outcome(self, outcome: str, reason: str) -> None:
        """``outcome`` is the last state of the run."""
        with self._spoken():
            self._connection.execute("UPDATE run SET outcome = ?, reason = ?", (outcome, reason))

    def reserve(self, generation: Generation) -> Generation:
        """Before ``generation`` is used: the last one that may be used from now on without asking again."""
        reserved = Generation(generation + RESERVED)
        with self._spoken():
            self._connection.execute("UPDATE run SET reserved = ?", (reserved,))
        return reserved

    def begin_again(self) -> None:
        """The run goes on: how it ended before is no longer how it ended."""
        with self._spoken():
            self._connection.execute("UPDATE run SET outcome = NULL, reason = NULL")

    @property
    def holds_a_run(self) -> bool:
        """Whether it was made whole; raises ResourceError for one of another version."""
        with self._spoken():
            (version,) = self._connection.execute("PRAGMA user_version").fetchone()
            (tables,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and version != VERSION:
            raise ResourceError(f"its tables are of version {version}, and this version of Atoll reads {VERSION}")
        return bool(tables)

    def run_id(self) -> str:
        """What this run alone is called, for ever."""
        with self._spoken():
            (run_id,) = self._connection.execute("SELECT run_id FROM run").fetchone()
        return str(run_id)

    def outcome(self) -> str | None:
        """``finished``, ``stopped``, ``failed``, or None: it was killed, or it runs."""
        with self._spoken():
            (outcome,) = self._connection.execute("SELECT outcome FROM run").fetchone()
        return None if outcome is None else str(outcome)

    def commits(self, after: int) -> list[Committed]:
        """The commits of the steps after ``after``, in order."""
        columns = "step, generation, loss, grad_norm, clip_factor, learning_rate, seconds, num_tokens, samples"
        with self._spoken():
            rows = self._connection.execute(f"SELECT {columns} FROM commits WHERE step > ? ORDER BY step", (after,)).fetchall()
        names = columns.split(", ")
        return [Committed(**dict(zip(names, row, strict=True))) for row in rows]

    def resumption(self) -> Resumption:
        """Where a coordinator that takes the run up begins."""
        with self._spoken():
            (reserved,) = self._connection.execute("SELECT reserved FROM run").fetchone()
            row = self._connection.execute("SELECT plan FROM plans ORDER BY generation DESC LIMIT 1").fetchone()
        last = self.commits(after=self.last_step() - 1)
        codecs = {(PeerId(source), PeerId(target)): codec for _, source, target, codec, _ in self.codecs()}
        return Resumption(
            generation=Generation(reserved),
            last=last[0] if last else None,
            plan=_plan(row[0]) if row is not None else None,
            codecs=codecs,
            snapshots=tuple(row.moment for row in self.snapshots()),
            parts=tuple(self.snapshot_parts()),
        )

    def last_step(self) -> StepNumber:
        """The last committed step; before the run's first the one that it began at, which is 0 unless it was resumed."""
        with self._spoken():
            query = "SELECT coalesce(max(step), 0) FROM (SELECT step FROM commits UNION ALL SELECT step FROM origin)"
            (step,) = self._connection.execute(query).fetchone()
        return StepNumber(step)

    def committed(self, step: StepNumber) -> CommittedStep:
        """What a committed step came to."""
        with self._spoken():
            query = "SELECT loss, grad_norm, samples FROM commits WHERE step = ?"
            loss, grad_norm, samples = self._connection.execute(query, (step,)).fetchone()
        return CommittedStep(loss=loss, grad_norm=grad_norm, samples=samples)

    def run(self) -> tuple[str, int]:
        """The run's name and how many steps it was to have."""
        with self._spoken():
            name, steps = self._connection.execute("SELECT name, steps FROM run").fetchone()
        return name, steps

    def job(self) -> str:
        """The job as YAML."""
        with self._spoken():
            (text,) = self._connection.execute("SELECT job FROM run").fetchone()
        return str(text)

    def codecs(self) -> list[tuple[StepNumber, str, str, str, str]]:
        """Step, source, target, codec and reason of each choice, in order."""
        with self._spoken():
            return self._connection.execute("SELECT step, source, target, codec, reason FROM codecs ORDER BY rowid").fetchall()

    def losses(self) -> list[tuple[StepNumber, float]]:
        with self._spoken():
            return self._connection.execute("SELECT step, loss FROM commits ORDER BY step").fetchall()

    def sample_ids(self, step: StepNumber) -> list[tuple[int, ...]]:
        """What a committed step consumed, a tuple for each microbatch."""
        with self._spoken():
            rows = self._connection.execute(
                "SELECT sample_ids FROM ledger WHERE step = ? ORDER BY microbatch", (step,)
            ).fetchall()
        return [_unpacked(blob) for (blob,) in rows]

    @contextmanager
    def _spoken(self) -> Iterator[None]:
        """SQLite's errors as sentences for people."""
        try:
            yield
        except (sqlite3.OperationalError, sqlite3.DatabaseError) as error:
            folder = self._path.parent
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise ResourceError(f"the disk that holds {folder} is full: free some space or give another --state") from error
            cure = f"check the disk and the rights of {folder}"
            raise ResourceError(f"the journal {self._path} cannot be used: {error}; {cure}") from error


def _plan(text: str) -> Plan | None:
    """A plan as it was written; None for one of another version, which is made anew."""
    try:
        return TypeAdapter(Plan).validate_json(text)
    except ValidationError:
        return None


def _packed(ids: tuple[int, ...]) -> bytes:
    return b"".join(one.to_bytes(8, "little", signed=True) for one in ids)


def _unpacked(blob: bytes) -> tuple[int, ...]:
    return tuple(int.from_bytes(blob[start : start + 8], "little", signed=True) for start in range(0, len(blob), 8))
