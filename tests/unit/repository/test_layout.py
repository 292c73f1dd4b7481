"""The checkout's layout keeps its promises: see "Layout" in CONTRIBUTING.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PARTS = ("coordinator", "peer", "protocol", "compression")


def test_the_standard_library_imports_from_the_root_of_the_checkout() -> None:
    """From Python 3.14, gzip imports the package compression: ours must not stand in its place."""
    subprocess.run([sys.executable, "-c", "import gzip, zipfile; gzip.compress(b'x')"], cwd=ROOT, check=True)


@pytest.mark.parametrize("part", PARTS)
def test_no_part_closes_the_namespace(part: str) -> None:
    """An __init__.py in one atoll/ folder would hide the other three."""
    namespace = ROOT / part / "atoll"
    assert [entry.name for entry in namespace.iterdir() if entry.name != "__pycache__"] == [part]
    assert not (ROOT / part / "__init__.py").exists()


def test_constraints_name_versions_alone() -> None:
    """Whoever installs chooses the index: a path or address in the file would work on one machine only."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert "torch==2.13.0" in lines
    assert "protobuf==6.33.5" in lines
    assert [line for line in lines if line.count("==") != 1 or "/" in line or "+" in line or line.startswith("-")] == []
