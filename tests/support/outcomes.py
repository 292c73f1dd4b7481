"""What a run came to, in all that must not depend on what happened to its processes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from atoll.peer.state.snapshot_part import Part
from atoll.protocol.errors import DamagedSnapshot
from atoll.protocol.folders import paths_in

LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """``weights`` are hashes by name; ``told`` is what the events said of steps, ``losses`` and ``ledger`` what the journal
    has."""

    weights: dict[str, str]
    told: list[tuple[int, float, str]]
    losses: list[tuple[int, float]]
    ledger: list[tuple[int, int, bytes]]


def outcome_of(state: Path) -> RunOutcome:
    """Of the finished run that ``state`` is the folder of."""
    weights: dict[str, str] = {}
    with safe_open(state / "weights.safetensors", framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            weights[name] = hashlib.blake2b(file.get_tensor(name).tobytes()).hexdigest()
    events = [json.loads(line) for line in (state / "metrics.jsonl").read_text().splitlines()]
    with closing(sqlite3.connect(state / "journal.sqlite")) as journal:
        losses = journal.execute("SELECT step, loss FROM commits ORDER BY step").fetchall()
        ledger = journal.execute("SELECT step, microbatch, sample_ids FROM ledger ORDER BY step, microbatch").fetchall()
    return RunOutcome(
        weights=weights,
        told=[(event["step"], event["loss"], event["samples"]) for event in events if event["event"] == "step"],
        losses=losses,
        ledger=ledger,
    )


class SnapshotWatch:
    """The hashes of all tensors (weights and what the optimizer keeps of them) in the snapshots that a swarm's peers write, by
    step. They are looked at while the run goes on, for a finished run keeps none. More than one hash of a tensor would say that
    two peers, or two doings of a step, disagree."""

    def __init__(self, state: Path) -> None:
        self.found: dict[int, dict[str, set[str]]] = {}
        self._cache = state / "cache"
        self._seen: set[tuple[Path, int]] = set()

    def look(self) -> None:
        """Takes in what is new on the disks."""
        for path in paths_in(self._cache, "*/snapshots/*/*/*.safetensors"):
            with suppress(OSError, DamagedSnapshot):  # it is being rotated away this moment
                version = path, path.stat().st_mtime_ns
                if version not in self._seen:
                    self._add(path)
                    self._seen.add(version)

    def _add(self, path: Path) -> None:
        manifest = Part(path).manifest
        tensors = self.found.setdefault(manifest.step, {})
        for entry in manifest.tensors:
            tensors.setdefault(entry.name, set()).add(entry.digest)

    async def watch(self) -> None:
        """Looks again and again, until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)


@asynccontextmanager
async def watched_snapshots(state: Path) -> AsyncIterator[SnapshotWatch]:
    """Watches the disks of a swarm's peers."""
    watch = SnapshotWatch(state)
    task = asyncio.create_task(watch.watch())
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
