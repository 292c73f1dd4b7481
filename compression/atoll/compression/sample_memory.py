"""What was last seen of each sample at one edge of a link, on the disk.

Values are kept in bfloat16: what that rounds off is part of the next difference. They lie in a file without a name, which the
system removes with the process, whatever ends it; the system keeps in memory what it has room for.

No more than a given number of bytes: the samples that came first stay, and later ones are not kept. Every epoch meets all
samples once, so the one that was met last is needed last, and making room for it would throw out what comes sooner.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from io import FileIO

import torch
from torch import Tensor

_KEPT = torch.bfloat16


@dataclass(frozen=True, slots=True)
class _Entry:
    place: int
    width: int
    version: int


class SampleMemory:
    """Values of any number of samples, each with a version that grows with each of its changes."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._entries: dict[int, _Entry] = {}
        self._end = 0
        self._file: FileIO | None = None

    def version(self, sample: int, width: int) -> int:
        """Of what is held of a sample; 0 where nothing is, or no value of this width."""
        entry = self._entries.get(sample)
        return entry.version if entry is not None and entry.width == width else 0

    def read(self, samples: list[int]) -> Tensor:
        """The values of samples that are held, which must be of one width: a row each."""
        assert self._file is not None
        entries = [self._entries[sample] for sample in samples]
        rows = torch.empty(len(entries), entries[0].width, dtype=_KEPT)
        buffer = rows.view(torch.uint8).numpy()
        for row, entry in zip(buffer, entries, strict=True):
            self._file.seek(entry.place)
            if self._file.readinto(row.data) != row.nbytes:
                raise OSError("what was kept of a sample is not in its file any more")
        return rows

    def keep(self, sample: int, row: Tensor) -> bool:
        """Holds this from now on, under the next version; false where there is no room for it, and then it holds nothing."""
        earlier = self._entries.pop(sample, None)
        fits = earlier is not None and earlier.width == len(row)
        place = earlier.place if earlier is not None and fits else self._end
        num_bytes = len(row) * _KEPT.itemsize
        if not fits and self._end + num_bytes > self._most_bytes:
            return False
        self._write(place, row)
        if not fits:
            self._end += num_bytes
        self._entries[sample] = _Entry(place, len(row), 1 if earlier is None else earlier.version + 1)
        return True

    def drop(self, sample: int) -> None:
        """Holds nothing of it any more."""
        self._entries.pop(sample, None)

    def clear(self) -> None:
        """Holds nothing, on the disk either."""
        self._entries.clear()
        self._end = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def __len__(self) -> int:
        return len(self._entries)

    def _write(self, place: int, row: Tensor) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - as long as it is wanted
        self._file.seek(place)
        data = row.to(_KEPT).view(torch.uint8).numpy().data
        if self._file.write(data) != data.nbytes:
            raise OSError("the disk is full")

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()
