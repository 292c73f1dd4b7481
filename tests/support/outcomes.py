"""What a run came to, in all that must not depend on what happened to its processes."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from atoll.peer.snapshot_part import Part
from safetensors import safe_open


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


def snapshots_of(state: Path) -> dict[int, dict[str, set[str]]]:
    """The hashes of all tensors (weights and what the optimizer keeps of them) in the snapshots on the disks of a swarm's
    peers, by step. More than one of a tensor would say that two peers disagree."""
    found: dict[int, dict[str, set[str]]] = {}
    for path in (state / "cache").glob("**/snapshots/*/*/*.safetensors"):
        manifest = Part(path).manifest
        tensors = found.setdefault(manifest.step, {})
        for entry in manifest.tensors:
            tensors.setdefault(entry.name, set()).add(entry.digest)
    return found
