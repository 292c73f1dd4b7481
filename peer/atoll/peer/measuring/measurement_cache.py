"""What this machine measured before, on its disk: a kind of segment takes as long in the next run.

One small JSON file a measurement. It is written under another name and renamed, so a file is whole or not there; one that
somebody damaged counts as not there. A cache that cannot be written costs time, never a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import threading
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from atoll.peer.stage.work_seconds import WorkSeconds

_FOLDER = "measurements"

_log = logging.getLogger("atoll.peer")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementKey:
    """All that a measurement depends on. ``version`` is that of measuring itself."""

    kind: str
    device: str
    threads: int
    torch: str
    version: int

    @property
    def file_name(self) -> str:
        return blake2b(json.dumps(dataclasses.asdict(self), sort_keys=True).encode(), digest_size=16).hexdigest() + ".json"


class MeasurementCache:
    """Measurements under ``folder``; with None nothing is found and nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else folder / _FOLDER

    def find(self, key: MeasurementKey) -> WorkSeconds | None:
        """What was measured under ``key``, if it was."""
        if self._folder is None:
            return None
        path = self._folder / key.file_name
        try:
            return _read(json.loads(path.read_text(encoding="utf-8")), key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            _log.warning("%s is damaged and is ignored: %s", path, error or type(error).__name__)
            return None

    def keep(self, key: MeasurementKey, seconds: WorkSeconds) -> None:
        """Remembers a measurement where that is possible."""
        if self._folder is None:
            return
        path = self._folder / key.file_name
        text = json.dumps({"key": dataclasses.asdict(key), "seconds": dataclasses.asdict(seconds)}, indent=1)
        partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            _log.warning(
                "a measurement cannot be kept in %s: %s; another --cache may help", self._folder, error.strerror or error
            )
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def _read(content: Any, key: MeasurementKey) -> WorkSeconds:
    """Raises ValueError, TypeError or KeyError for anything but a measurement of ``key``."""
    if content["key"] != dataclasses.asdict(key):
        raise ValueError("it is of something else")
    found = {field.name: content["seconds"][field.name] for field in dataclasses.fields(WorkSeconds)}
    for seconds in found.values():
        if not isinstance(seconds, float) or not math.isfinite(seconds) or seconds < 0.0:
            raise ValueError(f"{seconds!r} is no duration")
    return WorkSeconds(**found)
