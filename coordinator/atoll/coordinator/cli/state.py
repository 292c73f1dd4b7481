"""Folders of runs: where a new one goes, and where the coordinator of one listens."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from atoll.coordinator.cli.exits import UsageError
from atoll.coordinator.run_files import ADDRESS
from atoll.protocol.channel import parse_address
from atoll.protocol.folders import paths_in

RUNS = Path("runs")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a coordinator listens, for this machine and for others, its process, and whether it speaks plain text."""

    address: str
    pid: int
    listens: str = ""
    insecure: bool = False


def new_state(run: str) -> Path:
    """``runs/NAME-1``, or the first number that is free."""
    number = 1
    while (RUNS / f"{run}-{number}").exists():
        number += 1
    return RUNS / f"{run}-{number}"


def read_address(state: Path) -> Address | None:
    """What the coordinator of ``state`` wrote when it began to listen; None when it has not yet."""
    try:
        entry = json.loads((state / ADDRESS).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    address = entry["address"]
    return Address(address, entry["pid"], entry.get("listens", address), entry.get("insecure", False))


def find_address(target: str | None) -> str:
    """The address of the coordinator that a person means by ``target``: HOST:PORT, a state folder, or nothing for the
    newest run under ``runs/``. Raises UsageError when there is none.
    """
    if target is not None and not Path(target).is_dir():
        return str(parse_address(target, "HOST:PORT or DIR"))
    state = Path(target) if target is not None else newest_state()
    found = read_address(state)
    if found is None:
        raise UsageError(f"no coordinator has listened in {state}: {state / ADDRESS} is missing; give HOST:PORT instead")
    return found.address


def newest_state() -> Path:
    """The folder under ``runs/`` whose coordinator began to listen last. Raises UsageError when there is none."""
    began: dict[Path, float] = {}
    for path in paths_in(RUNS, f"*/{ADDRESS}"):
        with contextlib.suppress(FileNotFoundError):  # a folder that is removed this moment
            began[path.parent] = path.stat().st_mtime
    if not began:
        raise UsageError("no run is known in this folder: give HOST:PORT, or the state folder of a run")
    return max(began, key=began.__getitem__)
