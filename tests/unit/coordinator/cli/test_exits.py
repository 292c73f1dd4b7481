"""Errors become one line and a status."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator

import pytest

from atoll.coordinator.cli.exits import ExitStatus, UsageError, exit_with
from atoll.protocol.errors import JobError, ResourceError


@pytest.fixture(autouse=True)
def own_signal_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (JobError("training.steps", "0 is too few; use 1"), ExitStatus.USAGE, "atoll: training.steps: 0 is too few; use 1\n"),
        (UsageError("not both"), ExitStatus.USAGE, "atoll: not both\n"),
        (ResourceError("the disk is full"), ExitStatus.FAILED, "atoll: the disk is full\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/a"),
            ExitStatus.FAILED,
            "atoll: the disk that holds runs/a is full: free some space or give another --state\n",
        ),
        (KeyboardInterrupt(), ExitStatus.INTERRUPTED, "atoll: interrupted\n"),
    ],
)
def test_each_kind_of_error_has_its_status(
    error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        exit_with(command)
    assert ended.value.code == status
    assert capsys.readouterr().err == line


def test_sigterm_is_an_interruption(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        exit_with(lambda: signal.raise_signal(signal.SIGTERM))
    assert ended.value.code == ExitStatus.INTERRUPTED


@pytest.mark.parametrize("bug", [ZeroDivisionError(), OSError(errno.EBADF, "Bad file descriptor")])
def test_our_own_bugs_are_not_dressed_up(bug: Exception) -> None:
    def command() -> None:
        raise bug

    with pytest.raises(type(bug)):
        exit_with(command)
