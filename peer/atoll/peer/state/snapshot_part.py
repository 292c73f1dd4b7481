"""One part of a snapshot on the disk: written piece by piece under another name, renamed when whole, read with its hashes.

Until a part is whole its file is called ``NAME.partial`` and locked by whoever writes it, so that what a dead process left can
be told from what is being written. Blocking; each object belongs to one thread at a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from atoll.protocol.errors import DamagedSnapshot, ResourceError, WireError
from atoll.protocol.ids import StepNumber
from atoll.protocol.safetensors_layout import header_length
from atoll.protocol.snapshot_format import (
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
from atoll.protocol.tensors import allocate

if sys.platform != "win32":
    import fcntl

PARTIAL_SUFFIX = ".partial"
_PIECE_BYTES = 2**23  # between two of them a write can be given up


class GivenUp(Exception):
    """Writing was told to stop."""


class PartWriter:
    """A part being written for ``names``. One that is neither completed nor abandoned is a leftover, which others may remove
    once this process is gone. Raises ResourceError when the disk does not take it."""

    def __init__(self, path: Path, run_id: str, step: StepNumber, names: Sequence[str]) -> None:
        self.path = path
        self._run_id = run_id
        self._step = step
        self._room = header_room(names)
        self._entries: list[TensorEntry] = []
        self._end = 0
        self._partial = path.with_name(path.name + PARTIAL_SUFFIX)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._partial, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
        except OSError as error:
            raise disk_trouble(error, path.parent) from error
        if not lock(self._file):
            os.close(self._file)
            raise ResourceError(f"{self._partial} is being written by another process: give each peer a name of its own")
        os.ftruncate(self._file, 0)

    @property
    def num_bytes(self) -> int:
        """Of the tensors that are here."""
        return self._end

    @property
    def names(self) -> tuple[str, ...]:
        return self._manifest().names

    def add(self, name: str, tensor: torch.Tensor, *, given_up: Sequence[object] = ()) -> None:
        """Appends a tensor, which must not change meanwhile. Raises GivenUp as soon as there is anything in ``given_up``."""
        data = row_major_bytes(tensor)
        try:
            for begin in range(0, data.nbytes, _PIECE_BYTES):
                if given_up:
                    raise GivenUp
                _write_all(self._file, data[begin : begin + _PIECE_BYTES], self._room + self._end + begin)
        except OSError as error:
            raise disk_trouble(error, self.path.parent) from error
        self._entries.append(entry_of(name, tensor, data, self._end))
        self._end += data.nbytes

    def add_group(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Appends all that a name stands for, or nothing of it."""
        end, num_entries = self._end, len(self._entries)
        try:
            for name, tensor in tensors:
                self.add(name, tensor)
        except BaseException:
            self._end = end
            del self._entries[num_entries:]
            raise

    def complete(self) -> Manifest:
        """Gives the part its name, once all of it is on the disk."""
        manifest = self._manifest()
        try:
            _write_all(self._file, memoryview(encode_header(manifest, self._room)), 0)
            os.ftruncate(self._file, self._room + self._end)
            os.fsync(self._file)
            self._partial.replace(self.path)
            _sync_folder(self.path.parent)
            os.close(self._file)
        except OSError as error:
            raise disk_trouble(error, self.path.parent) from error
        return manifest

    def abandon(self) -> None:
        """Leaves nothing behind."""
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.close(self._file)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()  # where nothing else is in it

    def _manifest(self) -> Manifest:
        return Manifest(run_id=self._run_id, step=self._step, tensors=tuple(self._entries))


class Part:
    """A whole part, its manifest read and checked; raises DamagedSnapshot where that, or a tensor later, cannot be trusted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                length = header_length(file.read(8))
                self.manifest = decode_header(file.read(length))
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise DamagedSnapshot(f"{path} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise DamagedSnapshot(f"{path} is damaged: {error}") from error
        self._groups = self.manifest.groups()
        self._begin = 8 + length
        end = self._begin + max((entry.begin + entry.num_bytes for entry in self.manifest.tensors), default=0)
        if size != end:
            raise DamagedSnapshot(f"{path} is damaged: it has {size} bytes instead of {end}")

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """All that ``name`` stands for, hash-checked."""
        found: dict[str, torch.Tensor] = {}
        try:
            with self.path.open("rb") as file:
                for entry in self._groups[name]:
                    data = allocate(entry.num_bytes)
                    file.seek(self._begin + entry.begin)
                    if file.readinto(data) != entry.num_bytes or digest_of(data) != entry.digest:
                        raise DamagedSnapshot(f"{self.path} is damaged: the bytes of {entry.name} do not agree with their hash")
                    found[entry.name] = restored(entry, data)
        except (OSError, WireError) as error:
            raise DamagedSnapshot(f"{self.path} cannot be read: {error}") from error
        return found


def lock(file: int) -> bool:
    """Claims an open file for as long as this process has it open; False where another process has."""
    if sys.platform == "win32":  # there an open file cannot be removed anyway
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def disk_trouble(error: OSError, where: Path) -> ResourceError:
    """What the system said about writing a snapshot, with what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ResourceError(f"the disk that holds {where} is full: free some space, or give another folder with --cache")
    return ResourceError(f"cannot write to {where}: {error.strerror or error}; check its rights or give another --cache")


def _write_all(file: int, data: memoryview, offset: int) -> None:
    os.lseek(file, offset, os.SEEK_SET)
    while data:
        data = data[os.write(file, data) :]


def _sync_folder(folder: Path) -> None:
    """A rename lasts only once the folder is on the disk as well."""
    if sys.platform == "win32":
        return
    for place in (folder, folder.parent):
        opened = os.open(place, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
