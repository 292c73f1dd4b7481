"""Calls of a store that answer, fail, or never come back."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from atoll.coordinator.offload import Offload
from atoll.coordinator.run.journal import Journal
from atoll.coordinator.store import vault
from atoll.coordinator.store.store_calls import MOST_HUNG, StoreCalls
from atoll.protocol.errors import ResourceError
from support.waiting import assert_eventually


async def test_a_call_gives_what_it_returns_or_raises() -> None:
    calls = StoreCalls("s3://bucket", "--resume")
    assert await calls.run(20.0, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await calls.run(20.0, divmod, 7, 0)


async def test_calls_that_hang_are_given_up_and_keep_no_more_than_a_few_threads() -> None:
    calls, answer = StoreCalls("s3://bucket", "--resume"), threading.Event()
    for _ in range(MOST_HUNG):
        with pytest.raises(ResourceError, match=r"--resume: s3://bucket did not answer within 0.01 s"):
            await calls.run(0.01, answer.wait)
    with pytest.raises(ResourceError, match=r"has not answered 3 calls"):
        await calls.run(20.0, divmod, 7, 2)
    answer.set()
    await assert_eventually(lambda: calls._num_hung == 0, within_seconds=20.0)
    assert await calls.run(20.0, divmod, 7, 2) == (3, 1)


async def test_a_store_to_go_on_from_that_never_answers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never, offload = threading.Event(), Offload("test", num_threads=1)
    monkeypatch.setattr(vault, "find_origin", lambda where: never.wait())
    monkeypatch.setattr(vault, "LOOK_SECONDS", 0.05)
    journal = Journal.create(tmp_path / "journal.sqlite", name="tiny", seed=0, job="", steps=4)
    try:
        assert await vault.find_begin(journal, None, offload) is None
        with pytest.raises(ResourceError, match=r"--resume: s3://bucket did not answer within 0.05 s"):
            await vault.find_begin(journal, "s3://bucket", offload)
    finally:
        never.set()
        await offload.close()
        journal.close()
