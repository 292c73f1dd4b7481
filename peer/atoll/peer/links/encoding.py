"""One worker thread for what must hold up neither the event loop nor the compute thread: encoding and decoding messages."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum


class Task(StrEnum):
    """What a job does."""

    ENCODE = "encode"
    DECODE = "decode"


class UrgentWorker:
    """Runs jobs one at a time, the most urgent first, in order of submission where urgency is equal. ``seconds`` adds up what
    they took, by what they were."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._jobs: list[tuple[int, int, Task, Callable[[], None]]] = []
        self._count = itertools.count()
        self.seconds = dict.fromkeys(Task, 0.0)

    @property
    def num_queued(self) -> int:
        """Jobs that have not begun."""
        return len(self._jobs)

    def submit(self, urgency: int, task: Task, job: Callable[[], None]) -> None:
        """Queues ``job``, which must not raise; a smaller ``urgency`` goes first. Ignored once closed."""
        with self._lock:
            heapq.heappush(self._jobs, (urgency, next(self._count), task, job))
            try:
                self._executor.submit(self._run_next)
            except RuntimeError:  # closed
                self._jobs.clear()

    def close(self) -> None:
        """Drops what has not begun and waits for the job that has."""
        with self._lock:
            self._jobs.clear()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _run_next(self) -> None:
        with self._lock:
            if not self._jobs:
                return
            _, _, task, job = heapq.heappop(self._jobs)
        began = time.perf_counter()
        job()
        self.seconds[task] += time.perf_counter() - began
