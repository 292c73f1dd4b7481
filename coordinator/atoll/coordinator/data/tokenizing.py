"""Token ids made from text by a tokenizer of the ``tokenizers`` library.

The ids are written once to a file in the cache folder, named by a hash of the tokenizer and of the text files' names, sizes and
times, and read from there ever after.
"""

from __future__ import annotations

import codecs
import errno
import itertools
import os
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from tokenizers import Tokenizer

from atoll.coordinator.data.text import ByteStream, whole_files
from atoll.protocol.errors import JobError, ResourceError

Progress: TypeAlias = Callable[[int, int], None]  # (bytes done, bytes in all)

_PIECE_CHARACTERS = 1 << 16
_PIECES_AT_ONCE = 16  # what the tokenizer works on together, in threads of its own
_READ_BYTES = 1 << 20


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in ``path``. Raises JobError."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        found = f"{str(path)!r} is not a tokenizer of the tokenizers library ({error})"
        raise JobError("data.tokenizer", f"{found}; give its tokenizer.json") from error


def tokenized(
    files: list[Path], tokenizer_path: Path, cache: Path, progress: Progress | None = None
) -> tuple[ByteStream, np.dtype[Any]]:
    """The ids of the text in ``files``, from the cache or written there now, a few pieces in memory at a time."""
    tokenizer = load_tokenizer(tokenizer_path)
    dtype = np.dtype("<u2" if tokenizer.get_vocab_size() <= 1 << 16 else "<u4")
    target = cache / f"tokens-{_fingerprint(files, tokenizer_path)}.bin"
    if not target.exists():
        _write_ids(files, tokenizer, dtype, target, progress)
    return whole_files([target]), dtype


def _fingerprint(files: list[Path], tokenizer_path: Path) -> str:
    digest = blake2b(tokenizer_path.read_bytes(), digest_size=12)
    for path in files:
        status = path.stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _write_ids(files: list[Path], tokenizer: Tokenizer, dtype: np.dtype[Any], target: Path, progress: Progress | None) -> None:
    total = whole_files(files).size
    done = 0
    part = target.with_suffix(f".{os.getpid()}.part")
    pieces = itertools.chain.from_iterable(map(_pieces_of, files))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as out:
            while together := list(itertools.islice(pieces, _PIECES_AT_ONCE)):
                for encoding in tokenizer.encode_batch(together, add_special_tokens=False):
                    out.write(np.asarray(encoding.ids, dtype=dtype).tobytes())
                done += sum(len(piece.encode()) for piece in together)
                if progress is not None:
                    progress(min(done, total), total)
        part.replace(target)
    except OSError as error:
        what = "the disk is full" if error.errno == errno.ENOSPC else f"{error.strerror}"
        raise ResourceError(f"cannot write token ids to {str(target)!r}: {what}; free space or use another --state") from error
    finally:
        part.unlink(missing_ok=True)


def _pieces_of(path: Path) -> Iterator[str]:
    """The file's text in pieces that end at a line's end where there is one; the same cuts every time."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    rest = ""
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            rest += decoder.decode(block)
            while len(rest) > _PIECE_CHARACTERS:
                cut = rest.rfind("\n", 0, _PIECE_CHARACTERS) + 1 or _PIECE_CHARACTERS
                yield rest[:cut]
                rest = rest[cut:]
    rest += decoder.decode(b"", final=True)
    if rest:
        yield rest
