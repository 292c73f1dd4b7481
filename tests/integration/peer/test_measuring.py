"""A real peer that is asked over gRPC what segments take: idle, for the second time, and when it has other work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.protocol.messages import Message
from atoll.protocol.v1 import session_pb2 as pb
from support.hand_models import transformer
from support.hand_run import HandRun, RunSettings, assert_equal, in_one_process, samples_of, swarm
from support.measurements import measurements_of
from support.scripted_coordinator import Seat

MODEL = transformer(tied=True)


def messages(limit_seconds: float = 0.05) -> list[Message]:
    return measurements_of(MODEL.graph, MODEL.sample(2, torch.Generator().manual_seed(0)), limit_seconds=limit_seconds)


async def asked(seat: Seat) -> list[pb.Measured]:
    """The peer's answers to all messages, in order."""
    requests = messages()
    for message in requests:
        seat.submit(message)
    return [await seat.hears("measured") for _ in requests]


async def test_a_peer_measures_what_it_is_asked_and_remembers_it(tmp_path: Path) -> None:
    async with swarm("ann", cache=tmp_path) as peers:
        (seat,) = await peers.seats()
        assert seat.join.disk_bytes > 0
        first = await asked(seat)
    async with swarm("ann", cache=tmp_path) as peers:
        second = await asked((await peers.seats())[0])
    assert len({answer.kind for answer in first}) == len(first)
    for once, again in zip(first, second, strict=True):
        assert once.failure == again.failure == ""
        assert min(once.forward_seconds, once.backward_seconds, once.update_seconds) > 0.0
        assert (once.cached, again.cached) == (False, True)
        assert again.forward_seconds == once.forward_seconds


async def test_measuring_does_not_change_what_is_trained() -> None:
    samples = samples_of(MODEL)
    alone = in_one_process(MODEL, RunSettings())
    async with swarm("ann", "bob") as peers:
        seats = await peers.seats()
        await asked(seats[0])
        run = HandRun(peers.coordinator, seats, MODEL.graph, RunSettings())
        await run.load(MODEL.cuts[2:3])
        for step, microbatches in enumerate(samples, 1):
            assert await run.step(step, microbatches) == alone.step(step, microbatches)
            assert {answer.failure for answer in await asked(seats[1])} <= {"", "it began a step in the meantime"}
        assert_equal(await run.state(), alone.state())


async def test_a_peer_without_a_cache_measures_anew() -> None:
    async with swarm("ann") as peers:
        (seat,) = await peers.seats()
        assert seat.join.disk_bytes == 0
        assert not any(answer.cached for answer in (*await asked(seat), *await asked(seat)))


async def test_a_declared_speed_is_not_measured() -> None:
    async with swarm("ann", flops_per_second=1e9) as peers:
        answers = await asked((await peers.seats())[0])
    assert {answer.failure for answer in answers} == {"its owner declared its speed"}
    assert all(answer.kind for answer in answers)


async def test_a_peer_with_too_little_memory_says_so_and_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.peer.measuring.profile.free_memory_bytes", lambda device: 1000)
    async with swarm("ann") as peers:
        (seat,) = await peers.seats()
        assert all("limit of 1000" in answer.failure for answer in await asked(seat))
        assert not seat.gone


async def test_a_peer_that_works_does_not_measure() -> None:
    (samples, *_) = samples_of(MODEL)
    async with swarm("ann") as peers:
        (seat,) = await peers.seats()
        run = HandRun(peers.coordinator, [seat], MODEL.graph, RunSettings())
        await run.load()
        seat.tell(start=pb.StartStep(generation=run.generation, step=1, num_microbatches=len(samples)))
        assert {answer.failure for answer in await asked(seat)} == {"it is in the middle of a step"}
        run.send_batches(1, samples)
        await run.reports(1)


async def test_a_new_assignment_does_not_wait_for_measurements() -> None:
    (samples, *_) = samples_of(MODEL)
    async with swarm("ann") as peers:
        (seat,) = await peers.seats()
        requests = messages(limit_seconds=30.0)
        for message in requests:
            seat.submit(message)
        run = HandRun(peers.coordinator, [seat], MODEL.graph, RunSettings())
        run.assign()
        answers = [await seat.hears("measured") for _ in requests]
        assert answers[-1].failure == "it got a stage in the meantime"
        assert (await seat.hears("ready")).generation == run.generation
        await run.step(1, samples)
