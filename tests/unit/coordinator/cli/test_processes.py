"""The swarm's processes end, politely or not, and say why."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from atoll.coordinator.cli import processes
from atoll.coordinator.cli.processes import Child, end_all, last_line
from support.waiting import assert_eventually

STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
signal.pause()
"""


def python(source: str) -> list[str]:
    return [sys.executable, "-c", source]


async def test_a_child_tells_its_status_and_its_last_words(tmp_path: Path) -> None:
    child = await Child.start("peer-1", python("import sys; print('one'); sys.exit('no memory')"), log=tmp_path / "log")
    assert await child.ended() == 1
    assert child.describe_end() == f"peer-1 ended with exit status 1: no memory (see {tmp_path / 'log'})"
    child.signal(signal.SIGTERM)


async def test_children_that_ignore_sigterm_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "POLITE_SECONDS", 0.2)
    child = await Child.start("stubborn", python(STUBBORN), log=tmp_path / "log")
    await assert_eventually(lambda: "ready" in (tmp_path / "log").read_text())
    await end_all([child], patience_seconds=0.0)
    assert child.status == -signal.SIGKILL


async def test_children_that_end_by_themselves_are_left_alone(tmp_path: Path) -> None:
    children = [
        await Child.start(str(number), python(f"raise SystemExit({number})"), log=tmp_path / "log") for number in (0, 3)
    ]
    await end_all(children, patience_seconds=10.0)
    assert [child.status for child in children] == [0, 3]


async def test_a_held_child_notices_our_end(tmp_path: Path) -> None:
    child = await Child.start("held", python("import sys; sys.stdin.read()"), hold=True)
    assert child.status is None
    child.release()
    assert await child.ended() == 0


def test_the_last_line_skips_blanks_and_survives_an_empty_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\ntwo\n\n \n")
    assert last_line(log) == "two"
    log.write_text("")
    assert last_line(log) == ""
