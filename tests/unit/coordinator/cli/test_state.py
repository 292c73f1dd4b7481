"""Finding the coordinator that a person means."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from atoll.coordinator.cli.exits import UsageError
from atoll.coordinator.cli.state import Address, find_address, new_state, read_address
from atoll.coordinator.run_files import ADDRESS
from atoll.protocol.errors import JobError


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_state(name: str, address: str, modified: float = 0.0) -> Path:
    state = Path("runs", name)
    state.mkdir(parents=True)
    (state / ADDRESS).write_text(json.dumps({"address": address, "pid": 7}))
    os.utime(state / ADDRESS, (modified, modified))
    return state


def test_a_new_run_gets_the_first_free_number() -> None:
    assert new_state("gpt") == Path("runs/gpt-1")
    make_state("gpt-1", "127.0.0.1:1")
    assert new_state("gpt") == Path("runs/gpt-2")


def test_an_address_is_itself() -> None:
    assert find_address("host.example:7000") == "host.example:7000"
    with pytest.raises(JobError, match="HOST:PORT"):
        find_address("host.example")


def test_a_state_folder_names_its_coordinator() -> None:
    state = make_state("gpt-1", "127.0.0.1:1234")
    assert read_address(state) == Address("127.0.0.1:1234", 7, listens="127.0.0.1:1234")
    assert find_address(str(state)) == "127.0.0.1:1234"


def test_nothing_means_the_newest_run() -> None:
    make_state("gpt-2", "127.0.0.1:2", modified=20.0)
    make_state("gpt-1", "127.0.0.1:1", modified=10.0)
    assert find_address(None) == "127.0.0.1:2"


def test_no_run_and_a_run_that_never_listened_are_told_apart() -> None:
    with pytest.raises(UsageError, match="no run is known"):
        find_address(None)
    Path("empty").mkdir()
    with pytest.raises(UsageError, match=r"address\.json is missing"):
        find_address("empty")
    Path("empty", ADDRESS).write_text("{")
    assert read_address(Path("empty")) is None
