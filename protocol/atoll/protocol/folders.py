"""Looking into folders that others change meanwhile."""

from __future__ import annotations

import glob
from pathlib import Path


def paths_in(folder: Path, pattern: str) -> list[Path]:
    """What matches ``pattern`` in ``folder`` this moment, in order; nothing where there is no such folder.

    What another thread or process removes meanwhile is left out: ``Path.glob`` raises FileNotFoundError when a folder goes
    between its listing and its scan (Python 3.11 and 3.12), ``glob`` of the standard library does not. Whoever opens what was
    found must still be ready to find it gone.
    """
    return [folder / found for found in sorted(glob.glob(pattern, root_dir=folder, include_hidden=True))]
