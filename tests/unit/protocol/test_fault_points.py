"""What an armed process does to itself."""

from __future__ import annotations

import asyncio
import errno
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from atoll.protocol.chaos import parse_chaos
from atoll.protocol.fault_points import VARIABLE, Armed, FaultPoints, Fired
from atoll.protocol.ids import Generation, MicrobatchIndex, StageIndex, StepNumber
from atoll.protocol.messages import Kind, MessageKey
from atoll.protocol.v1 import frames_pb2

REACHES = """
import os
from atoll.protocol.fault_points import FaultPoints

points = FaultPoints.from_environment(os.environ)
points.stage = 1
points.reached("forward", step=2)
print("forward", flush=True)
points.reached("backward", step=2)
print("backward", flush=True)
"""


def armed(folder: Path, *faults: dict[str, Any], **fields: Any) -> Armed:
    plan = parse_chaos({"faults": list(faults)})
    return Armed(process="peer-1", fired=folder, faults=dict(enumerate(plan.faults)), **fields)


def run_script(armed: Armed) -> subprocess.Popen[str]:
    import os

    environment = {**os.environ, VARIABLE: armed.to_json(), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", REACHES], env=environment, stdout=subprocess.PIPE, text=True)


def test_what_arms_a_process_fits_into_its_environment(tmp_path: Path) -> None:
    fault = {"fault": "cut", "peer": "peer-1", "from": "coordinator", "phase": "forward", "step": 3, "seconds": 1.5}
    told = armed(tmp_path, fault, elapsed_seconds=3.0, starts=2)
    assert Armed.from_json(told.to_json()) == told
    assert FaultPoints.from_environment({VARIABLE: told.to_json()}).again
    assert not FaultPoints.from_environment({}).on


def test_a_process_kills_itself_once_however_often_it_starts(tmp_path: Path) -> None:
    told = armed(tmp_path, {"fault": "kill", "stage": 1, "step": 2, "phase": "backward"})
    first = run_script(told)
    assert first.communicate(timeout=60)[0] == "forward\n"
    assert first.returncode == -signal.SIGKILL
    (fired,) = Fired.all_in(tmp_path)
    assert (fired.number, fired.process, fired.pid) == (0, "peer-1", first.pid)
    assert (fired.phase, fired.step, fired.stage) == ("backward", 2, 1)
    second = run_script(told)
    assert second.communicate(timeout=60)[0] == "forward\nbackward\n"
    assert second.returncode == 0


def test_a_frozen_process_goes_on_when_it_is_let(tmp_path: Path) -> None:
    import psutil

    process = run_script(armed(tmp_path, {"fault": "freeze", "peer": "peer-1", "phase": "backward", "seconds": 1}))
    deadline = time.monotonic() + 60.0
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=60)[0] == "forward\nbackward\n"


def test_a_fault_of_a_stage_meets_one_of_those_who_have_it(tmp_path: Path) -> None:
    fault = {"fault": "fill_disk", "stage": 1, "phase": "snapshotting"}
    first, second = (FaultPoints(armed(tmp_path, fault)) for _ in range(2))
    first.stage = second.stage = 1
    with pytest.raises(OSError, match="No space") as raised:
        first.reached("snapshotting", step=3)
    assert raised.value.errno == errno.ENOSPC
    second.reached("snapshotting", step=3)
    with pytest.raises(OSError, match="No space"):
        first.reached("snapshotting", step=4)


def test_a_disk_is_full_for_a_while(tmp_path: Path) -> None:
    now = 0.0
    points = FaultPoints(
        armed(tmp_path, {"fault": "fill_disk", "peer": "peer-1", "phase": "snapshotting", "seconds": 5}), clock=lambda: now
    )
    with pytest.raises(OSError, match="No space"):
        points.reached("snapshotting", step=3)
    now = 6.0
    points.reached("snapshotting", step=4)


def test_computing_is_slow_for_a_while(tmp_path: Path) -> None:
    now = 0.0
    fault = {"fault": "slow", "peer": "peer-1", "step": 2, "phase": "forward", "factor": 3, "seconds": 10}
    points = FaultPoints(armed(tmp_path, fault), clock=lambda: now)

    def took(seconds: float) -> float:
        began = time.perf_counter()
        points.computed(seconds)
        return time.perf_counter() - began

    points.reached("forward", step=1)
    assert not Fired.all_in(tmp_path)
    points.reached("forward", step=2)
    assert took(0.05) >= 0.1
    now = 11.0
    assert took(10.0) < 10.0


async def test_a_cut_holds_back_what_it_is_between(tmp_path: Path) -> None:
    points = FaultPoints(armed(tmp_path, {"fault": "cut", "peer": "peer-1", "from": "peer-2", "at": 0, "seconds": 0.3}))
    began = time.monotonic()
    await points.passable("coordinator")
    await asyncio.wait_for(points.passable("peer-2"), 30.0)
    assert time.monotonic() - began >= 0.3
    assert len(Fired.all_in(tmp_path)) == 1


def test_as_many_messages_are_damaged_as_the_plan_says(tmp_path: Path) -> None:
    points = FaultPoints(armed(tmp_path, {"fault": "corrupt", "stage": 1, "step": 2, "phase": "backward", "messages": 2}))
    points.stage = 1

    def sent(step: int, kind: Kind, number: int) -> list[frames_pb2.Frame]:
        key = MessageKey(
            generation=Generation(1),
            step=StepNumber(step),
            microbatch=MicrobatchIndex(0),
            kind=kind,
            source=StageIndex(1),
            target=StageIndex(0),
        )
        frames = [frames_pb2.Frame(message=number, header=frames_pb2.MessageHeader())]
        frames += [frames_pb2.Frame(message=number, chunk=b"abc") for _ in range(2)]
        return [points.outgoing(frame, key, "peer-2") for frame in frames]

    assert [frame.chunk for frame in sent(1, Kind.GRADIENT, 1)[1:]] == [b"abc", b"abc"]
    assert [frame.chunk for frame in sent(2, Kind.ACTIVATION, 2)[1:]] == [b"abc", b"abc"]
    assert [frame.chunk for frame in sent(2, Kind.GRADIENT, 3)[1:]] == [b"`bc", b"abc"]
    assert [frame.chunk for frame in sent(2, Kind.GRADIENT, 4)[1:]] == [b"`bc", b"abc"]
    assert [frame.chunk for frame in sent(2, Kind.GRADIENT, 5)[1:]] == [b"abc", b"abc"]
