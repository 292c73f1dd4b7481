"""The one thread that executes torch. It waits for commands and for nothing else.

Whom it waits for, and for how long, is watched elsewhere: the links report a neighbour that is silent, the coordinator one that
makes no progress, and both end in a command.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

import torch

from atoll.peer.computing.pipeline import Pipeline
from atoll.peer.stage.events import Command

_LONGEST_WAIT_SECONDS = 60.0  # a wait always ends; an idle peer wakes up this often and finds nothing to do


class ComputeThread:
    """Runs a pipeline; ``post`` and ``stop`` may be called from any thread.

    ``num_threads`` is how many threads torch may use for one operator. ``on_death`` hears of an error that the pipeline let
    through, which is a bug: the thread has then ended.
    """

    def __init__(self, pipeline: Pipeline, *, num_threads: int | None, on_death: Callable[[BaseException], None]) -> None:
        self._pipeline = pipeline
        self._num_threads = num_threads
        self._on_death = on_death
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        # daemon: a process that was told to end does not wait for an operator that takes minutes
        self._thread = threading.Thread(target=self._run, name="atoll-compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command) -> None:
        """Hands over a command; it takes effect after the call in progress."""
        self._commands.put(command)

    @property
    def num_queued(self) -> int:
        """Commands that are not handled yet."""
        return self._commands.qsize()

    def stop(self) -> None:
        """Ends the thread after the call in progress."""
        self._stopping.set()
        self._commands.put(None)

    def join(self, timeout_seconds: float) -> bool:
        """Waits for the end; False when the call in progress takes longer than that."""
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            if self._num_threads is not None:
                torch.set_num_threads(self._num_threads)
            busy = False
            while not self._stopping.is_set():
                self._take_commands(wait=not busy)
                if not self._stopping.is_set():
                    busy = self._pipeline.work()
        except BaseException as error:
            self._on_death(error)

    def _take_commands(self, *, wait: bool) -> None:
        """Handles everything in the queue; with ``wait``, waits for the first."""
        with contextlib.suppress(queue.Empty):
            command = self._commands.get(timeout=_LONGEST_WAIT_SECONDS) if wait else self._commands.get_nowait()
            while command is not None and not self._stopping.is_set():
                self._pipeline.handle(command)
                command = self._commands.get_nowait()
