"""The worker thread takes the most urgent job first and ends with its owner."""

from __future__ import annotations

import threading

from atoll.peer.links.encoding import Task, UrgentWorker


def test_the_most_urgent_job_goes_first() -> None:
    worker = UrgentWorker("test-encode")
    gate, finished = threading.Event(), threading.Event()
    order: list[str] = []
    worker.submit(0, Task.ENCODE, lambda: order.append("held up" if gate.wait(10) else "too late"))
    for urgency, name in ((3, "state"), (1, "forward 0"), (0, "backward"), (1, "forward 1")):
        worker.submit(urgency, Task.DECODE, lambda name=name: order.append(name))  # type: ignore[misc]
    worker.submit(9, Task.ENCODE, finished.set)
    gate.set()
    assert finished.wait(10)
    worker.close()
    assert order == ["held up", "backward", "forward 0", "forward 1", "state"]
    assert worker.num_queued == 0
    assert all(seconds > 0.0 for seconds in worker.seconds.values())


def test_after_closing_nothing_runs() -> None:
    worker = UrgentWorker("test-encode")
    worker.close()
    ran: list[str] = []
    worker.submit(0, Task.ENCODE, lambda: ran.append("job"))
    assert ran == []
