"""One worker thread for what must hold up neither the event loop nor the compute thread: encoding and decoding messages."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class UrgentWorker:
    """Runs jobs one at a time, the most urgent first, in order of submission where urgency is equal."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._jobs: list[tuple[int, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def submit(self, urgency: int, job: Callable[[], None]) -> None:
        """Queues ``job``, which must not raise; a smaller ``urgency`` goes first. Ignored once closed."""
        with self._lock:
            heapq.heappush(self._jobs, (urgency, next(self._count), job))
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
            _, _, job = heapq.heappop(self._jobs)
        job()
