"""What a test left behind: child processes, and threads that would keep the interpreter from ending."""

from __future__ import annotations

import threading
import time

import psutil

GRACE_SECONDS = 5.0


def child_processes() -> set[psutil.Process]:
    """The processes that descend from this one and have not ended."""
    return {child for child in psutil.Process().children(recursive=True) if describe(child)}


def lasting_threads() -> set[threading.Thread]:
    """Threads that hold up the interpreter's exit."""
    return {thread for thread in threading.enumerate() if not thread.daemon}


def describe(process: psutil.Process) -> str:
    """The command line of a running process; empty for one that has ended, reaped or not."""
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else f"{process.pid} {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return ""


class LeakCheck:
    """Remembers what there is, and later asserts that nothing was added."""

    def __init__(self) -> None:
        self._processes = child_processes()
        self._threads = lasting_threads()

    def assert_clean(self) -> None:
        """Waits a moment for what is ending; kills the processes that are left and fails."""
        deadline = time.monotonic() + GRACE_SECONDS
        for thread in lasting_threads() - self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        _, processes = psutil.wait_procs(child_processes() - self._processes, timeout=max(0.0, deadline - time.monotonic()))
        left = [text for process in processes if (text := describe(process))]
        for process in processes:
            process.kill()
        assert not left, f"processes left behind: {left}"
        threads = lasting_threads() - self._threads
        assert not threads, f"threads left behind: {threads}"
