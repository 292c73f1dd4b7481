"""Text as bytes: which files, and windows read from them where they lie."""

from __future__ import annotations

import bisect
import glob
import itertools
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from atoll.protocol.errors import JobError, ResourceError
from atoll.protocol.job_fields import GLOB_CHARACTERS

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """``size`` bytes of a file, from ``offset`` on."""

    path: Path
    offset: int
    size: int


class ByteStream:
    """Sections of files, one after the other, as one long row of bytes. Each read opens the file, so no descriptor is held."""

    def __init__(self, sections: list[Section]) -> None:
        self._sections = [section for section in sections if section.size]
        self._ends = list(itertools.accumulate(section.size for section in self._sections))

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self._ends[-1] if self._ends else 0

    def read(self, offset: int, count: int) -> bytes:
        """``count`` bytes from ``offset`` on; raises ResourceError when a file shrank, vanished or cannot be read."""
        pieces: list[bytes] = []
        number = bisect.bisect_right(self._ends, offset)
        while count:
            section = self._sections[number]
            inside = offset - (self._ends[number] - section.size)
            piece = _read(section, inside, min(count, section.size - inside))
            pieces.append(piece)
            offset += len(piece)
            count -= len(piece)
            number += 1
        return b"".join(pieces)


def _read(section: Section, inside: int, count: int) -> bytes:
    try:
        with open(section.path, "rb", buffering=0) as file:
            file.seek(section.offset + inside)
            pieces = bytearray()
            while len(pieces) < count and (piece := file.read(count - len(pieces))):
                pieces += piece
    except OSError as error:
        raise ResourceError(
            f"cannot read {str(section.path)!r}: {error.strerror}; put it back and start the run again"
        ) from error
    if len(pieces) < count:
        raise ResourceError(f"{str(section.path)!r} became shorter during the run; put it back and start the run again")
    return bytes(pieces)


def text_files(text: str) -> list[Path]:
    """The files that ``data.text`` means, in a fixed order. Raises JobError when there are none."""
    if text == "stdlib":
        files = _standard_library()
    elif Path(text).is_dir():
        files = _visible_files(Path(text))
    elif Path(text).is_file() or not GLOB_CHARACTERS & set(text):
        files = [Path(text)]
    else:
        files = sorted(path for path in map(Path, glob.glob(text, recursive=True)) if path.is_file())
    if not files:
        raise JobError("data.text", f"{text!r} holds no files; write stdlib, or the path of a file, a folder or a glob")
    return files


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _NOT_LIBRARY)
        found.extend(Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _visible_files(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found.extend(Path(folder, name) for name in names if not name.startswith("."))
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


def whole_files(files: list[Path]) -> ByteStream:
    """All bytes of ``files``. Raises JobError when one cannot be looked at."""
    try:
        return ByteStream([Section(path=path, offset=0, size=path.stat().st_size) for path in files])
    except OSError as error:
        raise JobError(
            "data.text", f"cannot read {error.filename!r}: {error.strerror}; make it readable or leave it out"
        ) from error
