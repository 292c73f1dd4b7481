"""Rules for every test: no process and no thread outlives it, torch keeps to one thread, and random examples are the same
each time, however long one takes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

# As the commands do: gRPC would write a line for each connection that does not come through TLS.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
from support.leaks import LeakCheck

hypothesis.settings.register_profile("atoll", deadline=None, derandomize=True)
hypothesis.settings.load_profile("atoll")


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
