"""The measurements that a peer was asked for and has not made yet, one after the other. Each is answered exactly once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from atoll.peer.faults import fault_of
from atoll.peer.measuring.measurement_cache import MeasurementCache, MeasurementKey
from atoll.peer.measuring.measuring import Measuring, MeasuringSurroundings, read_task
from atoll.peer.measuring.profile import device_name
from atoll.peer.stage.events import Measured
from atoll.peer.stage.memory_use import give_back
from atoll.protocol.measurement import MEASUREMENT_VERSION
from atoll.protocol.messages import Message


class MeasuringQueue:
    """``add``, then ``advance`` while it is ``busy``, on one thread. ``refusal`` is why this peer does not measure, if so."""

    def __init__(self, *, device: str, cache: MeasurementCache, notify: Callable[[Measured], None], refusal: str = "") -> None:
        self._device = torch.device(device)
        self._cache = cache
        self._notify = notify
        self._refusal = refusal
        self._waiting: deque[Measuring] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def add(self, message: Message, memory_bytes: int) -> None:
        """Takes a MEASUREMENT message in; it is answered at once where the answer is known. Takes up to ``memory_bytes``."""
        kind = ""
        try:
            task = read_task(message)
            kind = task.request.kind
            if self._refusal:
                self._notify(Measured(kind=kind, failure=self._refusal, declared=True))
            elif (found := self._cache.find(self._key(kind))) is not None:
                self._notify(Measured(kind=kind, seconds=found, cached=True))
            else:
                self._waiting.append(Measuring(task, MeasuringSurroundings(device=self._device, memory_bytes=memory_bytes)))
        except Exception as error:  # whatever a message does to the decoders, the peer lives on
            self._notify(Measured(kind=kind, failure=_reason(error)))

    def advance(self) -> bool:
        """Does one piece of work; False when there is none."""
        if not self._waiting:
            return False
        measuring = self._waiting[0]
        answer: Measured | None = None
        try:
            measuring.advance()
            if measuring.seconds is not None:
                answer = Measured(kind=measuring.kind, seconds=measuring.seconds)
                self._cache.keep(self._key(measuring.kind), measuring.seconds)
        except Exception as error:  # whatever a graph makes torch raise must not end this thread
            answer = Measured(kind=measuring.kind, failure=_reason(error))
        if answer is not None:
            self._drop(measuring)
            self._notify(answer)
        return True

    def abandon(self, reason: str) -> None:
        """Answers everything that is still waiting with ``reason``, and gives its memory back."""
        for measuring in list(self._waiting):
            self._drop(measuring)
            self._notify(Measured(kind=measuring.kind, failure=reason))

    def _drop(self, measuring: Measuring) -> None:
        self._waiting.remove(measuring)
        measuring.close()
        if not self._waiting:
            give_back(self._device)

    def _key(self, kind: str) -> MeasurementKey:
        return MeasurementKey(
            kind=kind,
            device=device_name(self._device),
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            version=MEASUREMENT_VERSION,
        )


def _reason(error: Exception) -> str:
    return fault_of(error, doing="measuring a kind of segment").reason
