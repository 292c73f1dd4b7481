"""``atoll-peer`` as a process: exit statuses, signals, one sentence for each error."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from atoll.peer.measuring.profile import Profile
from atoll.protocol.v1 import session_pb2
from support.hand_models import transformer
from support.hand_run import HandRun, RunSettings, in_one_process, samples_of
from support.scripted_coordinator import WAIT_SECONDS, ScriptedCoordinator, Seat
from support.waiting import assert_eventually

pytestmark = pytest.mark.system

SECONDS_TO_END = 5.0  # the promise is three; this machine may be busy


async def spawn(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "atoll.peer", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status, output, errors."""
    process = await spawn(*arguments)
    out, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


@asynccontextmanager
async def coordinator() -> AsyncIterator[ScriptedCoordinator]:
    found = ScriptedCoordinator()
    await found.start()
    try:
        yield found
    finally:
        await found.stop()


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """Exit status and last line of errors; kills the process when it does not end in time."""
    try:
        _, errors = await asyncio.wait_for(process.communicate(), SECONDS_TO_END)
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode is not None
    return process.returncode, errors.decode().strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("join", "nowhere"), "'nowhere' is not HOST:PORT, for example 127.0.0.1:7000"),
        (("join", "127.0.0.1:7000", "--device", "gpu"), "--device: 'gpu' is not a device; write cpu, cuda:0 or mps"),
        (("join", "127.0.0.1:7000", "--max-memory", "lots"), "--max-memory: 'lots' is not a size"),
        (("join", "127.0.0.1:7000", "--threads", "0"), "--threads"),
        (("join",), "where is the coordinator?"),
    ],
)
async def test_bad_usage_is_status_2_and_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    status, _, errors = await run(*arguments)
    assert status == 2
    assert words in errors
    assert "Traceback" not in errors


async def test_bench_prints_a_table_or_json() -> None:
    (status, text, _), (_, data, _) = await asyncio.gather(run("bench", "--threads", "1"), run("bench", "--json"))
    assert status == 0
    assert "GFLOP/s" in text
    found = json.loads(data)
    assert found.keys() == {field.name for field in dataclasses.fields(Profile)} | {"handling_seconds"}
    assert 1e-5 < found["handling_seconds"] < 0.1
    assert found["disk_bytes"] > 0
    assert found["resident_bytes"] < 450 * 2**20


async def welcomed(found: ScriptedCoordinator, name: str) -> Seat:
    """The session of a peer that knows that it is in the run: from then on it has something to hand over."""
    (seat,) = await found.seated(name)
    await assert_eventually(lambda: bool(seat.progress.phase), within_seconds=WAIT_SECONDS)
    return seat


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_is_a_leave_that_ends_when_others_have_what_it_holds(number: signal.Signals) -> None:
    async with coordinator() as found:
        process = await spawn(
            *("join", found.address, "--insecure", "--name", "ann", "--threads", "1"), "--hand-over-seconds", "50"
        )
        seat = await welcomed(found, "ann")
        process.send_signal(number)
        assert (await seat.hears("leave")).hand_over_seconds == 50.0
        seat.tell(may_leave=session_pb2.MayLeave())
        returned, last_line = await ended(process)
    assert returned == 0
    assert last_line.endswith("; nothing is lost with this peer")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
async def test_a_second_signal_is_a_leave_at_once(number: signal.Signals, status: int) -> None:
    async with coordinator() as found:
        process = await spawn("join", found.address, "--insecure", "--name", "ann", "--threads", "1")
        seat = await welcomed(found, "ann")
        process.send_signal(number)
        await seat.hears("leave")
        process.send_signal(number)
        returned, last_line = await ended(process)
    assert returned == status
    assert last_line in ("interrupted", "told to end")


async def test_a_peer_whose_time_to_hand_over_is_over_leaves_all_the_same() -> None:
    async with coordinator() as found:
        process = await spawn(
            "join", found.address, "--insecure", "--name", "ann", "--threads", "1", "--hand-over-seconds", "0.5"
        )
        seat = await welcomed(found, "ann")
        process.send_signal(signal.SIGTERM)
        assert (await seat.hears("leave")).hand_over_seconds == 0.5
        assert (await seat.hears("leave")).hand_over_seconds == 0.0
        returned, last_line = await ended(process)
    assert returned == 0
    assert last_line == "told to end; others did not have all that it holds within 0.5 s"


async def test_processes_train_and_end_with_the_run() -> None:
    model = transformer(tied=True, dropout=0.1)
    steps = samples_of(model)
    alone = in_one_process(model, RunSettings())
    async with coordinator() as found:
        names = ("ann", "bob")
        processes = [await spawn("join", found.address, "--insecure", "--name", name, "--threads", "1") for name in names]
        run = HandRun(found, await found.seated(*names), model.graph, RunSettings())
        await run.load(model.cuts[2:3])
        for number, samples in enumerate(steps, 1):
            assert await run.step(number, samples) == alone.step(number, samples)
        run.end()
        assert [await ended(process) for process in processes] == [(0, "the run finished")] * 2
