"""What is generated from the .proto files is checked in, and current."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def generated(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (root / "atoll/protocol/v1").iterdir() if "_pb2" in path.name}


def test_generated_modules_are_current(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run([ROOT / "protocol/generate.sh", tmp_path], env=environment, check=True)
    assert generated(ROOT / "protocol") == generated(tmp_path), "run `make generate` and commit what it writes"
