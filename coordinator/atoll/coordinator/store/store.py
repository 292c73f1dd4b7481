"""A place that outlasts peers and coordinator: snapshots in a folder or at any URL that fsspec knows. Blocking.

``STORE/RUN/STEP/part-N.safetensors`` hold state by name (:mod:`atoll.protocol.snapshot_format`), ``snapshot.json`` beside them
says what they amount to. It is written last: a snapshot without it does not exist. What goes in and out is a few names at a
time, so memory does not grow with the model. Of a run the newest snapshots are kept; one is removed only once a newer one is
complete.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import fsspec
import fsspec.core
import torch

from atoll.protocol.errors import DamagedSnapshot, JobError, ResourceError
from atoll.protocol.ids import StepNumber
from atoll.protocol.safetensors_layout import header_length
from atoll.protocol.snapshot_format import (
    PART_SUFFIX,
    Manifest,
    TensorEntry,
    decode_header,
    digest_of,
    encode_header,
    entry_of,
    header_room,
    restored,
    row_major_bytes,
)
from atoll.protocol.state import split_name

SUMMARY = "snapshot.json"
KEPT = 2
"""Snapshots of a run that stay: the newest, and one before it, should the newest turn out to be damaged."""
PART_BYTES = 2**26
"""A part is written once it has so much: large enough for stores that charge by the object, small beside a model."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSnapshot:
    """A complete snapshot. ``parts`` are its files in ``folder``; ``saved`` is the wall clock's time, to tell runs apart by."""

    folder: str
    run_id: str
    step: StepNumber
    job: str
    saved: float
    num_bytes: int
    parts: tuple[str, ...]


class Store:
    """``url`` is a folder or a URL; ``field`` is what it was given with, for errors."""

    def __init__(self, url: str, field: str) -> None:
        self.url = url
        self._field = field
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise JobError(field, f"{url!r} cannot be used: {error}") from error

    @property
    def is_local(self) -> bool:
        """Whether it is a folder as this machine sees it."""
        protocol = self._files.protocol
        return "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def snapshots(self) -> list[StoredSnapshot]:
        """All that are complete, the one that was saved last at the end. Raises ResourceError when it cannot be read."""
        found = []
        with self._trouble("read"):
            self._files.invalidate_cache()
            for depth in ("", "/*", "/*/*"):  # the store itself, or one run or one snapshot of it
                for path in self._files.glob(f"{self._root}{depth}/{SUMMARY}"):
                    snapshot = self._summary(path)
                    if snapshot is not None:
                        found.append(snapshot)
        return sorted(found, key=lambda one: (one.saved, one.step))

    def url_of(self, snapshot: StoredSnapshot) -> str:
        """Where one snapshot lies, as a store of its own."""
        return str(self._files.unstrip_protocol(snapshot.folder))

    def url_of_run(self, run_id: str) -> str:
        """Where all snapshots of one run lie, as a store of their own."""
        return str(self._files.unstrip_protocol(f"{self._root}/{run_id}"))

    def writer(self, run_id: str, step: StepNumber, job: str) -> StoreWriter:
        """A snapshot to be written; what an earlier attempt left of it is removed."""
        folder = f"{self._root}/{run_id}/{step}"
        with self._trouble("write to"):
            self._remove(folder)
            self._files.makedirs(folder, exist_ok=True)
        return StoreWriter(self, folder, run_id, step, job)

    def rotate(self, run_id: str) -> None:
        """Removes all but the newest snapshots of a run, and what is left of those that were never completed before them."""
        mine = sorted(snapshot.step for snapshot in self.snapshots() if snapshot.run_id == run_id)
        if not mine:
            return
        with self._trouble("rotate in"):
            for folder in self._files.ls(f"{self._root}/{run_id}", detail=False):
                name = str(folder).rstrip("/").rpartition("/")[2]
                if name.isdecimal() and int(name) < mine[-1] and int(name) not in mine[-KEPT:]:
                    self._remove(f"{self._root}/{run_id}/{name}")

    def put(self, path: str, data: bytes) -> None:
        """Writes a whole file; whole or not there where the store knows how, and checked by its reader in any case."""
        with self._trouble("write to"), self._files.transaction:
            self._files.pipe_file(path, data)

    def read(self, path: str, begin: int | None = None, end: int | None = None) -> bytes:
        with self._trouble("read"):
            return bytes(self._files.cat_file(path, start=begin, end=end))

    def _summary(self, path: str) -> StoredSnapshot | None:
        try:
            values = json.loads(self._files.cat_file(path))
            folder = str(path).rpartition("/")[0]
            return StoredSnapshot(
                folder=folder,
                run_id=str(values["run_id"]),
                step=StepNumber(int(values["step"])),
                job=str(values["job"]),
                saved=float(values["saved"]),
                num_bytes=int(values["num_bytes"]),
                parts=tuple(f"{folder}/{name}" for name in values["parts"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            _log.warning("%s is damaged and is ignored: %s", path, error)
            return None

    def _remove(self, folder: str) -> None:
        """The summary first: what is half removed must not look complete."""
        for path in (f"{folder}/{SUMMARY}", folder):
            with contextlib.suppress(FileNotFoundError):
                self._files.rm(path, recursive=path == folder)

    @contextlib.contextmanager
    def _trouble(self, doing: str) -> Iterator[None]:
        """What a store's library raises, as a sentence. That may be anything: of the network, of credentials, of disks."""
        try:
            yield
        except (ResourceError, DamagedSnapshot):
            raise
        except Exception as error:
            raise ResourceError(f"{self._field}: cannot {doing} {self.url}: {error or type(error).__name__}") from error


class StoreWriter:
    """One snapshot on its way into a store."""

    def __init__(self, store: Store, folder: str, run_id: str, step: StepNumber, job: str) -> None:
        self._store = store
        self._folder = folder
        self._run_id = run_id
        self._step = step
        self._job = job
        self._waiting: list[tuple[str, torch.Tensor]] = []
        self._waiting_bytes = 0
        self._parts: list[str] = []
        self.num_bytes = 0

    def add(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Takes all that one name stands for; the tensors must not change any more."""
        self._waiting += tensors
        self._waiting_bytes += sum(tensor.numel() * tensor.itemsize for _, tensor in tensors)
        if self._waiting_bytes >= PART_BYTES:
            self._write_part()

    def complete(self, saved: float) -> StoredSnapshot:
        """All of it is there."""
        if self._waiting:
            self._write_part()
        snapshot = StoredSnapshot(
            folder=self._folder,
            run_id=self._run_id,
            step=self._step,
            job=self._job,
            saved=saved,
            num_bytes=self.num_bytes,
            parts=tuple(self._parts),
        )
        words = {name: value for name, value in asdict(snapshot).items() if name != "folder"}
        self._store.put(f"{self._folder}/{SUMMARY}", json.dumps(words, indent=1).encode())
        return snapshot

    def _write_part(self) -> None:
        tensors, self._waiting, self._waiting_bytes = self._waiting, [], 0
        # Larger elements first, so that every tensor lies on a multiple of its element's size.
        pieces, entries, end = [], list[TensorEntry](), 0
        for name, tensor in sorted(tensors, key=lambda item: -item[1].itemsize):
            data = row_major_bytes(tensor)
            entries.append(entry_of(name, tensor, data, end))
            pieces.append(data)
            end += data.nbytes
        manifest = Manifest(run_id=self._run_id, step=self._step, tensors=tuple(entries))
        name = f"part-{len(self._parts)}{PART_SUFFIX}"
        self._store.put(f"{self._folder}/{name}", b"".join((encode_header(manifest, header_room(manifest.names)), *pieces)))
        self._parts.append(name)
        self.num_bytes += end


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    path: str
    begin: int
    entry: TensorEntry


class StoredState:
    """The tensors of one snapshot, by the names of ``atoll.protocol.state``. Raises DamagedSnapshot for those that cannot be
    trusted."""

    def __init__(self, store: Store, snapshot: StoredSnapshot) -> None:
        self.snapshot = snapshot
        self._store = store
        self._places: dict[str, _Place] = {}
        for path in snapshot.parts:
            self._places |= self._open(path)

    @property
    def names(self) -> frozenset[str]:
        """The parameters and buffers whose state is here."""
        return frozenset(split_name(tensor)[0] for tensor in self._places)

    def tensor_names(self, names: Iterable[str]) -> tuple[str, ...]:
        """All tensors that these names stand for."""
        wanted = frozenset(names)
        return tuple(tensor for tensor in self._places if split_name(tensor)[0] in wanted)

    def specs(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each tensor."""
        return {name: (place.entry.dtype, place.entry.shape) for name, place in self._places.items()}

    def has(self, tensor: str) -> bool:
        return tensor in self._places

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, hash-checked."""
        place = self._places[name]
        entry = place.entry
        data = self._store.read(place.path, place.begin, place.begin + entry.num_bytes) if entry.num_bytes else b""
        if len(data) != entry.num_bytes or digest_of(data) != entry.digest:
            raise DamagedSnapshot(f"{place.path} is damaged: the bytes of {name} do not agree with their hash")
        return restored(entry, data)

    def _open(self, path: str) -> dict[str, _Place]:
        try:
            length = header_length(self._store.read(path, 0, 8))
            manifest = decode_header(self._store.read(path, 8, 8 + length))
        except ValueError as error:
            raise DamagedSnapshot(f"{path} is damaged: {error}") from error
        if (manifest.run_id, manifest.step) != (self.snapshot.run_id, self.snapshot.step):
            raise DamagedSnapshot(f"{path} is of step {manifest.step} of run {manifest.run_id}")
        return {entry.name: _Place(path=path, begin=8 + length + entry.begin, entry=entry) for entry in manifest.tensors}
