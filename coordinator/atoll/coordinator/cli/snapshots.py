"""`atoll snapshots`: which states of a run are on its peers' disks, by the run's journal; the run may be over or not."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from atoll.coordinator.cli import formatting
from atoll.coordinator.cli.exits import UsageError
from atoll.coordinator.cli.options import AsJson, ExistingState
from atoll.coordinator.cli.state import newest_state

if TYPE_CHECKING:
    from atoll.coordinator.run.journal import SnapshotRow

COLUMNS = ("step", "age", "size", "state", "on the disks of")


def snapshots(state: ExistingState = None, as_json: AsJson = False) -> None:
    """Lists the snapshots of a run that its peers keep, the newest first."""
    from atoll.coordinator.run.journal import JOURNAL, Journal  # slow to import

    path = (newest_state() if state is None else state) / JOURNAL
    if not path.exists():
        raise UsageError(f"there is no run in {path.parent}: {path} is missing; give --state the folder of a run")
    journal = Journal(path)
    try:
        rows = journal.snapshots()
    finally:
        journal.close()
    print("\n".join(map(as_line, rows) if as_json else lines(rows, time.time())))


def as_line(row: SnapshotRow) -> str:
    """One snapshot as JSON."""
    return json.dumps(
        {
            "event": "snapshot",
            "step": row.moment.step,
            "bytes": row.num_bytes,
            "seconds": row.seconds,
            "complete": row.complete,
            "safe": row.safe,
            "peers": list(row.peers),
            "taken": row.noted,
        }
    )


def lines(rows: list[SnapshotRow], now: float) -> list[str]:
    """A table for people, at ``now`` (the time of day)."""
    if not rows:
        return ["no snapshot is kept"]
    return formatting.table([COLUMNS, *(_cells(row, now) for row in rows)])


def _cells(row: SnapshotRow, now: float) -> tuple[str, ...]:
    standing = "safe" if row.safe else "complete" if row.complete else "incomplete"
    return (
        str(row.moment.step),
        formatting.duration(max(0.0, now - row.noted)),
        formatting.size(row.num_bytes) if row.complete else "-",
        standing,
        ", ".join(row.peers) or "-",
    )
