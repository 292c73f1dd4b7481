"""The snapshots under a peer's cache folder: ``snapshots/RUN/STEP/PART.safetensors``. Blocking; any thread may call it.

Peers of one machine may share a cache, and so may runs: parts carry the name of the peer that writes them, folders that of the
run. What lies there belongs to all peers of a run alike. Files whose hashes disagree count as not there, and are removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from atoll.peer.state.free_disk import free_disk_bytes
from atoll.peer.state.snapshot_part import PARTIAL_SUFFIX, Part, PartWriter, lock
from atoll.protocol.errors import DamagedSnapshot, ResourceError
from atoll.protocol.folders import paths_in
from atoll.protocol.ids import PeerId, StepNumber
from atoll.protocol.quantities import format_bytes
from atoll.protocol.snapshot_format import PART_SUFFIX

FOLDER = "snapshots"
KEPT_SECONDS = 4 * 7 * 24 * 3600.0
"""Snapshots of other runs that nothing was added to for this long are removed."""
FREE_BYTES = 2**26
"""What a snapshot leaves free on the disk: for the measurements and logs of this program, and for other programs."""

_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_log = logging.getLogger("atoll.peer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What is on the disk of one step of a run."""

    run_id: str
    step: StepNumber
    names: tuple[str, ...]
    num_bytes: int


class StoredState:
    """State as of one step on the disk, by name. ``discard`` is told of a file that turns out to be damaged."""

    def __init__(self, parts: Mapping[str, Part], discard: Callable[[Path, DamagedSnapshot], None]) -> None:
        self._parts = parts
        self._discard = discard

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._parts)

    @property
    def num_bytes(self) -> int:
        return sum({part.path: part.manifest.num_bytes for part in self._parts.values()}.values())

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """All that a name stands for, hash-checked. Raises DamagedSnapshot, after which what is damaged is gone."""
        part = self._parts.get(name)
        if part is None:
            raise DamagedSnapshot(f"no part of this snapshot has {name}")
        try:
            return part.read(name)
        except DamagedSnapshot as error:
            self._discard(part.path, error)
            raise


class SnapshotFolder:
    """``cache`` is the peer's cache folder; it need not exist yet. ``on_damage`` hears, on whatever thread finds it, of the
    run, the step and what is wrong, when a file had to be removed."""

    def __init__(self, cache: Path, on_damage: Callable[[str, StepNumber, str], None] = lambda run_id, step, why: None) -> None:
        self.path = cache / FOLDER
        self._on_damage = on_damage

    def clean(self, now: float) -> None:
        """Removes what dead processes left half-written, and snapshots of runs that are long over. ``now`` is the wall clock's
        time, as files have it."""
        for partial in paths_in(self.path, f"*/*/*{PARTIAL_SUFFIX}"):
            with contextlib.suppress(OSError):
                _remove_leftover(partial)
        for run in self._folders(self.path):
            with contextlib.suppress(OSError):
                if now - max(path.stat().st_mtime for path in (run, *run.iterdir())) > KEPT_SECONDS:
                    _log.info("removing the snapshots of run %s, which nothing was added to for weeks", run.name)
                    shutil.rmtree(run)

    def held(self) -> list[Held]:
        """What is whole, of any run."""
        found = (self._held(run.name, step) for run in self._folders(self.path) for step in self.steps(run.name))
        return [held for held in found if held.names]

    def steps(self, run_id: str) -> list[StepNumber]:
        """Of which steps there may be something, ascending."""
        names = (folder.name for folder in self._folders(self._run(run_id)))
        return sorted(StepNumber(int(name)) for name in names if name.isdecimal())

    def open(self, run_id: str, step: StepNumber) -> StoredState:
        """What is on the disk as of ``step``."""
        parts: dict[str, Part] = {}
        for path in paths_in(self._step(run_id, step), f"*{PART_SUFFIX}"):
            try:
                part = Part(path)
                if (part.manifest.run_id, part.manifest.step) != (run_id, step):
                    raise DamagedSnapshot(f"{path} is of step {part.manifest.step} of run {part.manifest.run_id}")
            except DamagedSnapshot as error:
                self._discard(run_id, step, path, error)
                continue
            parts.update((name, part) for name in part.manifest.names)
        return StoredState(parts, lambda path, why: self._discard(run_id, step, path, why))

    def _discard(self, run_id: str, step: StepNumber, path: Path, why: DamagedSnapshot) -> None:
        """Removes a part that cannot be trusted. One that is gone was rotated away."""
        if path.exists():
            _log.warning("%s; it is removed", why)
            with contextlib.suppress(OSError):
                path.unlink()
            self._on_damage(run_id, step, str(why))

    def new_part(
        self, run_id: str, step: StepNumber, peer: PeerId, names: Collection[str], num_bytes: int, *, source: str = ""
    ) -> PartWriter:
        """A part to be written by ``peer``, of what it fetches from ``source`` if it does not have it itself. Raises
        ResourceError at once where the disk has no room for it."""
        self.check_room(num_bytes)
        folder = self._step(run_id, step)
        path = folder / f"{peer}{PART_SUFFIX}"
        if not source:  # copies of a former doing of this step must not be mixed with what is written now
            for old in paths_in(folder, f"{peer}-copy-*{PART_SUFFIX}"):
                old.unlink(missing_ok=True)
        number = 0
        while source and (number == 0 or path.exists()):  # what was copied before stays
            number += 1
            path = folder / f"{peer}-copy-{number}-of-{source}{PART_SUFFIX}"
        return PartWriter(path, run_id, step, tuple(names))

    def check_room(self, num_bytes: int) -> None:
        """Raises ResourceError when the disk has no room for so much more."""
        free = free_disk_bytes(self.path)
        if free < num_bytes + FREE_BYTES:
            raise ResourceError(
                f"the snapshot takes {format_bytes(num_bytes)} and {self.path} has {format_bytes(free)} free, of which "
                f"{format_bytes(FREE_BYTES)} stay free: free some space, or give another folder with --cache"
            )

    def keep_only(self, run_id: str, steps: Collection[StepNumber]) -> None:
        """Removes all other snapshots of a run."""
        for step in self.steps(run_id):
            if step not in steps:
                shutil.rmtree(self._step(run_id, step), ignore_errors=True)
        with contextlib.suppress(OSError):
            self._run(run_id).rmdir()  # where nothing is left

    def _held(self, run_id: str, step: StepNumber) -> Held:
        stored = self.open(run_id, step)
        return Held(run_id=run_id, step=step, names=stored.names, num_bytes=stored.num_bytes)

    def _run(self, run_id: str) -> Path:
        if not _RUN_ID.fullmatch(run_id):
            raise ResourceError(f"{run_id!r} is no run's id, so nothing is kept of it")
        return self.path / run_id

    def _step(self, run_id: str, step: StepNumber) -> Path:
        return self._run(run_id) / str(step)

    def _folders(self, where: Path) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from (path for path in sorted(where.iterdir()) if path.is_dir() and _RUN_ID.fullmatch(path.name))


def wall_clock() -> float:
    """The time that files' times are compared with; never a timeout."""
    return time.time()


def _remove_leftover(partial: Path) -> None:
    file = os.open(partial, os.O_RDWR)
    try:
        if lock(file):
            _log.info("removing %s, which was never completed", partial)
            partial.unlink()
    finally:
        os.close(file)
