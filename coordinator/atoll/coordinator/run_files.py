"""The files in a run's folder by name, and what to say when the disk refuses one. Light: every command may import it."""

from __future__ import annotations

import errno
from pathlib import Path

from atoll.protocol.errors import ResourceError

METRICS = "metrics.jsonl"
WEIGHTS = "weights.safetensors"
JOB = "job.yaml"
ADDRESS = "address.json"
CURVE = "loss.svg"
REPORT = "report.html"
LOGS = "logs"
CACHE = "cache"
CHAOS = "chaos"
PAGE_TOKEN = "page-token"
FLAG = "--state"
TIME = "time"
"""The key under which a line of the metrics says when it was written, in seconds since 1970."""


def disk_error(error: OSError, where: Path, flag: str = FLAG) -> ResourceError:
    """What the operating system said about writing to ``where``, as a sentence with what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(f"the disk that holds {where} is full: free some space or give another {flag}")
    return ResourceError(f"cannot write to {where}: {error.strerror or error}; check its rights or give another {flag}")


def write_whole(path: Path, text: str) -> None:
    """Write a file so that readers see all of it, or what was there before. Raises ResourceError."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise disk_error(error, path.parent) from error
