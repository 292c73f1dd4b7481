"""What a disk has left."""

from __future__ import annotations

import shutil
from pathlib import Path


def free_disk_bytes(folder: Path | None) -> int:
    """What is free where ``folder`` lies or would lie; 0 without one, or where the system does not say."""
    if folder is None:
        return 0
    existing = next((path for path in (folder, *folder.absolute().parents) if path.exists()), None)
    try:
        return 0 if existing is None else shutil.disk_usage(existing).free
    except OSError:
        return 0
