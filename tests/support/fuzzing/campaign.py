"""A long check: every target in processes of its own, as many inputs as it is due, and what they found."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from support.fuzzing.target import Target
from support.swarm import environment

START_SECONDS, SECONDS_AN_INPUT = 900.0, 1.0
"""Far more than the slowest decoder takes on a busy machine: what hangs, the fuzzer itself finds, by the input."""
_TAIL = 4000
_TESTS = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of one target: how many inputs it really had, and, where one was a defect, that input and the last words about it."""

    target: str
    inputs: int
    crash: bytes | None = None
    words: str = ""


def run_campaign(targets: list[Target], folder: Path, *, scale: float = 1.0, at_once: int = 2) -> list[Found]:
    """Each target's thousands of inputs times ``scale``, in so many processes at once. ``folder`` keeps what was found."""

    def run(target: Target) -> Found:
        return _run(target, folder / target.name, round(1000 * target.thousands * scale))

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(run, targets))


def _run(target: Target, folder: Path, runs: int) -> Found:
    corpus, artifacts = folder / "corpus", folder / "found"
    for each in (corpus, artifacts):
        each.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "support.fuzzing.process", target.name, str(runs), str(corpus), str(artifacts)]
    limit = START_SECONDS + runs * SECONDS_AN_INPUT
    with (folder / "log").open("w+", encoding="utf-8", errors="replace") as log:
        status = subprocess.run(
            command, env=environment(PYTHONPATH=str(_TESTS)), stdout=log, stderr=log, timeout=limit, check=False
        ).returncode
        log.seek(0)
        words = log.read()
    counted = re.findall(r"number_of_executed_units: (\d+)", words) or re.findall(r"^#(\d+)\s", words, re.MULTILINE)
    inputs = int(counted[-1]) if counted else 0
    crashes = sorted(artifacts.iterdir())
    if status == 0 and not crashes:
        return Found(target=target.name, inputs=inputs)
    return Found(target=target.name, inputs=inputs, crash=crashes[0].read_bytes() if crashes else b"", words=words[-_TAIL:])
