"""Rules for every test: no process and no thread outlives it, and torch keeps to one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.leaks import LeakCheck


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """The machine's cores belong to the processes under test."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails the test after which a child process or a lasting thread is still there."""
    check = LeakCheck()
    yield
    check.assert_clean()
