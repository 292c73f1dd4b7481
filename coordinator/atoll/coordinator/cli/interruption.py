"""Ctrl+C, SIGTERM and the death of the process that holds us, as one request to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable

from atoll.coordinator.cli.exits import ExitStatus

LAST_RESORT_SECONDS = 10.0
"""How long ending in order may take. A thread deep in native code cannot be interrupted, but nobody waits for it longer."""


class Interruption:
    """Calls ``stop`` once, at the first interruption; at a second one, or after the last resort, the process just ends."""

    def __init__(self, stop: Callable[[str], None]) -> None:
        self._stop = stop
        self._happened = False

    @property
    def happened(self) -> bool:
        return self._happened

    def watch_signals(self) -> None:
        """Takes SIGINT, SIGTERM and SIGHUP over; needs the running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupt, f"interrupted by {number.name}")

    def watch_standard_input(self) -> None:
        """Takes the end of standard input for an interruption: the holder of its other end is gone."""
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._read)

    def _read(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._interrupt("interrupted: the process that started this one is gone")

    def _interrupt(self, reason: str) -> None:
        if self._happened:
            os._exit(ExitStatus.INTERRUPTED)
        self._happened = True
        last_resort = threading.Timer(LAST_RESORT_SECONDS, os._exit, (ExitStatus.INTERRUPTED,))
        last_resort.daemon = True
        last_resort.start()
        self._stop(reason)
