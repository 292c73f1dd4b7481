"""What a fault plan (``chaos``) does to the process that it is armed in. Off unless armed, and then all but free.

Whoever runs a process tells it of the plan through the environment variable ``ATOLL_CHAOS``. The process says which phase it
has reached; where a fault of the plan is due there, it kills or stops itself, computes slowly, holds back what its network
carries, damages what it sends, or finds its disk full. A fault that has happened is noted in a folder that all processes of a
plan share, in a file that can be made only once: so it happens once, whoever it meets and however often that starts again.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from atoll.protocol.chaos import Fault, Phase, Place
from atoll.protocol.folders import paths_in
from atoll.protocol.messages import Kind, MessageKey
from atoll.protocol.v1 import frames_pb2

VARIABLE = "ATOLL_CHAOS"
"""The environment variable that arms a process."""

_PHASE_OF_KIND: Mapping[Kind, Phase] = {
    Kind.ACTIVATION: "forward",
    Kind.GRADIENT: "backward",
    Kind.TIED_GRADIENT: "backward",
    Kind.STATE: "transferring",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Armed:
    """``faults`` by their number in the plan. ``fired`` is the folder of those that have happened; ``elapsed_seconds`` is how
    old the swarm is; ``starts`` how often this process was started before."""

    process: str
    fired: Path
    faults: Mapping[int, Fault] = field(default_factory=dict)
    elapsed_seconds: float = 0.0
    starts: int = 0

    def to_json(self) -> str:
        faults = {number: fault.model_dump(exclude_none=True, by_alias=True) for number, fault in self.faults.items()}
        values = {"process": self.process, "fired": str(self.fired), "faults": faults}
        return json.dumps({**values, "elapsed_seconds": self.elapsed_seconds, "starts": self.starts})

    @classmethod
    def from_json(cls, text: str) -> Armed:
        values = json.loads(text)
        return cls(
            process=values["process"],
            fired=Path(values["fired"]),
            faults={int(number): Fault.model_validate(fault) for number, fault in values["faults"].items()},
            elapsed_seconds=values["elapsed_seconds"],
            starts=values["starts"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fired:
    """A fault that has happened: where, when (by the wall clock) and to which process."""

    number: int
    process: str
    pid: int
    wall_seconds: float
    phase: str = ""
    step: int = 0
    stage: int | None = None

    def claim(self, folder: Path) -> bool:
        """Note it in ``folder``; False when it had happened before."""
        try:
            handle = os.open(folder / f"{self.number}.json", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        values = {name: getattr(self, name) for name in self.__slots__}
        os.write(handle, json.dumps(values).encode())
        os.close(handle)
        return True

    @classmethod
    def all_in(cls, folder: Path) -> list[Fired]:
        """What has happened so far, in order; one that is being noted this moment comes with the next call."""
        found = []
        for path in paths_in(folder, "*.json"):
            text = path.read_text()
            if text.endswith("}"):
                found.append(cls(**json.loads(text)))
        return sorted(found, key=lambda fired: fired.wall_seconds)


class FaultPoints:
    """The faults of one process, which says in ``stage`` what it has. Every method may be called from any thread, but for the
    asynchronous ones."""

    def __init__(self, armed: Armed | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.stage: int | None = None
        self._armed = armed
        self._clock = clock
        self._born = clock()
        self._lock = threading.Lock()
        done = set() if armed is None else {fired.number for fired in Fired.all_in(armed.fired)}
        self._due = {} if armed is None else {key: fault for key, fault in armed.faults.items() if key not in done}
        self._slow: list[tuple[float, float]] = []
        self._cuts: list[tuple[str | None, float]] = []
        self._disk_full_until = 0.0
        self._to_damage: dict[int, int] = {}
        self._damaging: set[tuple[str, int]] = set()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> FaultPoints:
        """Armed if the environment says so."""
        text = environment.get(VARIABLE)
        return cls(None if text is None else Armed.from_json(text))

    @property
    def on(self) -> bool:
        """Whether there is a plan at all."""
        return self._armed is not None

    @property
    def again(self) -> bool:
        """Whether this process takes the place of one that was killed."""
        return self._armed is not None and self._armed.starts > 0

    def reached(self, phase: Phase, *, step: int = 0, microbatch: int | None = None) -> None:
        """This process is at this place: what is due here happens. Raises OSError where its disk is to be full."""
        if self._armed is None:
            return
        for number, fault in self._meeting(phase, step, microbatch):
            if fault.fault != "corrupt" and self._claim(number, phase, step):
                self._happen(fault)
        if phase == "snapshotting" and self._clock() < self._disk_full_until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def joining(self) -> None:
        """The process is about to join the run, for the first time or again."""
        self.reached("rejoining" if self.again else "joining")

    def computed(self, seconds: float) -> None:
        """Something was computed in ``seconds``: takes longer, if it is to be slow. Blocks the computing thread."""
        if self._armed is None:
            return
        self._happen_by_time()
        now = self._clock()
        self._slow = [(factor, until) for factor, until in self._slow if now < until]
        for factor, _ in self._slow:
            time.sleep(seconds * (factor - 1.0))

    async def passable(self, other: str) -> None:
        """Returns once the network carries something between this process and ``other``."""
        if self._armed is None:
            return
        self._happen_by_time()
        cut_until = max((until for whom, until in self._cuts if whom in (None, other)), default=0.0)
        if (left := cut_until - self._clock()) > 0:
            await asyncio.sleep(left)

    def outgoing(self, frame: frames_pb2.Frame, key: MessageKey | None, other: str) -> frames_pb2.Frame:
        """What to send to ``other`` in place of a frame of the message ``key``."""
        if self._armed is None or key is None:
            return frame
        message = (other, frame.message)
        if frame.HasField("header"):
            self._damaging.discard(message)
            if self._is_to_damage(key):
                self._damaging.add(message)
        elif frame.HasField("chunk") and message in self._damaging:
            self._damaging.discard(message)
            return frames_pb2.Frame(message=frame.message, chunk=bytes((frame.chunk[0] ^ 1,)) + frame.chunk[1:])
        return frame

    def _is_to_damage(self, key: MessageKey) -> bool:
        phase = _PHASE_OF_KIND.get(key.kind)
        if phase is None or key.evaluation:
            return False
        for number, fault in self._meeting(phase, key.step, key.microbatch):
            if fault.fault == "corrupt" and self._claim(number, phase, key.step):
                self._to_damage[number] = fault.messages or 1
        for number, left in self._to_damage.items():
            if left > 0:
                self._to_damage[number] = left - 1
                return True
        return False

    def _meeting(self, phase: Phase, step: int, microbatch: int | None) -> Iterable[tuple[int, Fault]]:
        assert self._armed is not None
        self._happen_by_time()
        place = Place(process=self._armed.process, stage=self.stage, phase=phase, step=step, microbatch=microbatch)
        with self._lock:
            return [(number, fault) for number, fault in self._due.items() if fault.meets(place)]

    def _happen_by_time(self) -> None:
        assert self._armed is not None
        elapsed = self._armed.elapsed_seconds + self._clock() - self._born
        with self._lock:
            due = [(number, fault) for number, fault in self._due.items() if fault.at is not None and fault.at <= elapsed]
        for number, fault in due:
            if not fault.of_swarm and fault.peer == self._armed.process and self._claim(number, "", 0):
                self._happen(fault)

    def _claim(self, number: int, phase: str, step: int) -> bool:
        """Whether the fault happens here and now, rather than having happened elsewhere."""
        assert self._armed is not None
        with self._lock:
            self._due.pop(number, None)
        fired = Fired(
            number=number,
            process=self._armed.process,
            pid=os.getpid(),
            wall_seconds=time.time(),
            phase=phase,
            step=step,
            stage=self.stage,
        )
        return fired.claim(self._armed.fired)

    def _happen(self, fault: Fault) -> None:
        until = self._clock() + fault.seconds if fault.seconds is not None else float("inf")
        match fault.fault:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "slow":
                assert fault.factor is not None
                self._slow.append((fault.factor, until))
            case "cut":
                self._cuts.append((fault.other, until))
            case "fill_disk":
                self._disk_full_until = until
            case "corrupt":
                raise AssertionError("a message is damaged when it is sent")
