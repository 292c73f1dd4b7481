"""The thread that writes a peer's state to its disk while the next step runs.

Theory of operation. Nothing is copied: what is written are the tensors that training uses, which do not change before the next
update. So the compute thread, before it updates, waits until everything has been handed to the system; whether it is on the
disk by then does not matter. What it waits is measured. A disk that takes too long costs the snapshot, not the run: it is given
up, and never gets its name.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from atoll.peer.stage.events import SnapshotWritten
from atoll.peer.state.snapshot_folder import SnapshotFolder
from atoll.peer.state.snapshot_part import GivenUp, PartWriter, disk_trouble
from atoll.protocol.errors import AtollError
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.ids import PeerId, StepNumber
from atoll.protocol.snapshot_format import Manifest
from atoll.protocol.state import split_name

LONGEST_STALL_SECONDS = 20.0
"""How long computing waits for the disk before the snapshot is given up: shorter than what the coordinator takes for frozen."""
_LONGEST_WAIT_SECONDS = 60.0  # a wait always ends; an idle writer wakes up this often and finds nothing to do


@dataclass(slots=True, eq=False)
class _Job:
    """One snapshot. ``given_up`` holds the reason; ``read`` is set when the tensors are not needed any more."""

    step: StepNumber
    state: Mapping[str, torch.Tensor]
    began: float
    read: threading.Event = field(default_factory=threading.Event)
    awaited_since: float | None = None
    stalled_seconds: float = 0.0
    given_up: list[str] = field(default_factory=list)


class SnapshotWriter:
    """``write`` and ``wait_until_read`` belong to the compute thread, ``stop`` and ``join`` to any. ``on_written`` is called by
    the writer's thread, exactly once for each call of ``write``, unless the thread is stopped. ``run_id`` is of the run that
    the state belongs to: set it before the first call."""

    def __init__(
        self,
        folder: SnapshotFolder,
        own: PeerId,
        on_written: Callable[[SnapshotWritten], None],
        chaos: FaultPoints | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run_id = ""
        self._folder = folder
        self._own = own
        self._on_written = on_written
        self._chaos = chaos or FaultPoints()
        self._clock = clock
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._unread: list[_Job] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="atoll-snapshots", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def write(self, step: StepNumber, state: Mapping[str, torch.Tensor]) -> None:
        """Writes these tensors in the background, by the names of ``atoll.protocol.state``. They must not change before
        :meth:`wait_until_read` has returned."""
        job = _Job(step=step, state=state, began=self._clock())
        self._unread.append(job)
        self._jobs.put(job)

    def wait_until_read(self, within_seconds: float = LONGEST_STALL_SECONDS) -> None:
        """Waits until the tensors may change; what is not done in time is given up."""
        began = self._clock()
        for job in self._unread:
            job.awaited_since = began
            if not job.read.wait(max(0.0, began + within_seconds - self._clock())):
                job.given_up.append(f"the disk took longer than {within_seconds:g} s, and training had to go on")
        self._unread.clear()

    def stop(self) -> None:
        """Gives up what is being written, and ends the thread."""
        self._stopping.set()
        for job in list(self._unread):
            job.given_up.append("this peer ends")
        self._jobs.put(None)

    def join(self, timeout_seconds: float) -> bool:
        """Waits for the end; False when the disk takes longer than that."""
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                job = self._jobs.get(timeout=_LONGEST_WAIT_SECONDS)
            except queue.Empty:
                continue
            if job is not None:
                self._on_written(self._outcome(job))

    def _outcome(self, job: _Job) -> SnapshotWritten:
        failure, manifest = "", None
        try:
            manifest = self._write(job)
        except GivenUp:
            failure = next(iter(job.given_up), "it was given up")
        except AtollError as error:
            failure = str(error)
        except Exception as error:  # whatever a device or a disk makes torch or Python raise, the run goes on without it
            failure = f"{type(error).__name__} while writing it: {error}"
        finally:
            job.state = {}
            job.read.set()
        return SnapshotWritten(
            step=job.step,
            failure=failure,
            num_bytes=0 if manifest is None else manifest.num_bytes,
            seconds=self._clock() - job.began,
            stalled_seconds=job.stalled_seconds,
            names=() if manifest is None else manifest.names,
        )

    def _write(self, job: _Job) -> Manifest:
        names = dict.fromkeys(split_name(name)[0] for name in job.state)
        num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in job.state.values())
        part = self._folder.new_part(self.run_id, job.step, self._own, names, num_bytes)
        try:
            self._fill(part, job)
            return part.complete()
        except BaseException:
            part.abandon()
            raise

    def _fill(self, part: PartWriter, job: _Job) -> None:
        # Larger elements first, so that every tensor lies on a multiple of its element's size.
        for name, tensor in sorted(job.state.items(), key=lambda item: -item[1].itemsize):
            part.add(name, tensor, given_up=job.given_up)
            try:
                self._chaos.reached("snapshotting", step=job.step)
            except OSError as error:
                raise disk_trouble(error, part.path.parent) from error
        job.state = {}
        job.read.set()
        if job.awaited_since is not None:
            job.stalled_seconds = self._clock() - job.awaited_since
        if job.given_up:
            raise GivenUp
