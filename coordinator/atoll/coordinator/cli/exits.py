"""The exit statuses of `atoll`, which scripts rely on, and the one place that turns errors into them."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import FrameType

from atoll.coordinator.run_files import disk_error
from atoll.protocol.errors import AtollError, JobError

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST}
"""Where the system refuses a file; any other OSError is our own bug."""


class ExitStatus(IntEnum):
    """What became of the command. A run that its operator stopped has done what it was asked to: finished."""

    FINISHED = 0
    FAILED = 1
    USAGE = 2
    INTERRUPTED = 130


class UsageError(AtollError):
    """Flags or arguments that make no sense; the sentence says what to write instead."""


def exit_with(command: Callable[[], object]) -> None:
    """Runs ``command`` and ends the process: an error raised on purpose becomes one line, the last, and a status."""
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        command()
    except KeyboardInterrupt:
        _say("interrupted")
        sys.exit(ExitStatus.INTERRUPTED)
    except (JobError, UsageError) as error:
        _say(str(error))
        sys.exit(ExitStatus.USAGE)
    except AtollError as error:
        _say(str(error))
        sys.exit(ExitStatus.FAILED)
    except OSError as error:
        if error.errno not in _DISK_ERRORS or error.filename is None:
            raise
        _say(str(disk_error(error, Path(error.filename))))
        sys.exit(ExitStatus.FAILED)


def _as_interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(sentence: str) -> None:
    print(f"atoll: {sentence}", file=sys.stderr, flush=True)
