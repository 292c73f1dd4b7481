"""Averaging with hivemind among real processes: equal bits, and what happens when one is killed, freezes or is not there."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from atoll.peer.averaging.averager import Member, Round, weighted_sum
from atoll.protocol.hive import hivemind_is_here
from atoll.protocol.ids import PeerId
from support.averaging_member import digest, expect_line, round_line, values_of
from support.marks import release
from support.swarm import environment
from support.waiting import assert_eventually

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not hivemind_is_here(), reason="hivemind has no wheel for this platform"),
]

COUNT = 300_000
WITHIN_SECONDS = 180.0
MOST_ATTEMPTS = 2


class Group:
    """Members as processes, and the rounds that they are told to run."""

    def __init__(self, processes: Sequence[asyncio.subprocess.Process]) -> None:
        self.processes = list(processes)
        self.members: list[Member] = []
        self.hives: list[int] = []
        self.folders: list[Path] = []

    async def ready(self) -> None:
        """Waits until all have an address."""
        for index, answer in enumerate(await asyncio.gather(*(self.answer(index) for index in range(len(self.processes))))):
            self.members.append(Member(peer=PeerId(f"peer-{index}"), address=answer["address"]))
            self.hives.append(answer["hive"])
            self.folders.append(Path(answer["folder"]))
        await self.expect(range(len(self.processes)))

    async def expect(self, indexes: Sequence[int]) -> None:
        """From now on those at ``indexes`` expect each other, and nobody else."""
        for index in indexes:
            stdin = self.processes[index].stdin
            assert stdin is not None
            stdin.write(expect_line(self.members[index].address for index in indexes))
        await asyncio.gather(*(self.answer(index) for index in indexes))

    async def answer(self, index: int) -> dict[str, Any]:
        """A process's next line."""
        output = self.processes[index].stdout
        assert output is not None
        line = await asyncio.wait_for(output.readline(), WITHIN_SECONDS)
        assert line, f"peer-{index} has ended"
        found: dict[str, Any] = json.loads(line)
        return found

    async def averaged(self, key: str, indexes: Sequence[int], **fields: Any) -> list[Any]:
        """What the members at ``indexes`` got in a round that was repeated, under a new key, if it failed: as a run does."""
        for attempt in range(MOST_ATTEMPTS):
            answers = await self.run(f"{key}/{attempt}", indexes, **fields)
            if all("digest" in answer for answer in answers):
                return answers
            print(f"round {key}, attempt {attempt + 1}: {answers}")
        raise AssertionError(f"round {key} failed {MOST_ATTEMPTS} times; the last time: {answers}")

    async def run(
        self,
        key: str,
        indexes: Sequence[int],
        *,
        told: Sequence[int] | None = None,
        heard: Sequence[int] | None = None,
        **fields: Any,
    ) -> list[Any]:
        """What the members ``heard`` say of a round of those at ``indexes``, in this order, of which those ``told`` know."""
        whole = Round(key=key, members=tuple(self.members[index] for index in indexes), own=0, **fields)
        told = indexes if told is None else told
        for place, index in enumerate(indexes):
            stdin = self.processes[index].stdin
            assert stdin is not None
            if index in told:
                stdin.write(round_line(replace(whole, own=place), seed=index, count=COUNT))
        return list(await asyncio.gather(*(self.answer(index) for index in (told if heard is None else heard))))


@asynccontextmanager
async def group(count: int, *, last: Sequence[str] = ()) -> AsyncIterator[Group]:
    """So many members, the last of them with further flags."""
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "support.averaging_member"),
            *(last if index == count - 1 else ()),
            env=environment(PYTHONPATH=str(Path(__file__).parents[1]), OMP_NUM_THREADS="1"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        for index in range(count)
    ]
    members = Group(processes)
    try:
        await members.ready()
        yield members
    finally:
        for process in processes:
            if process.returncode is None and process.stdin is not None:
                process.send_signal(signal.SIGCONT)
                process.stdin.close()
        for process in processes:
            await asyncio.wait_for(process.wait(), WITHIN_SECONDS)
    for pid in members.hives:
        await assert_eventually(lambda pid=pid: not psutil.pid_exists(pid), within_seconds=20.0)  # type: ignore[misc]


def total(indexes: Sequence[int], weights: Sequence[float] | None = None, divisor: float = 1.0) -> torch.Tensor:
    """What a round without loss gives."""
    return weighted_sum([values_of(index, COUNT) for index in indexes], weights or [1.0] * len(indexes), divisor)


@pytest.mark.parametrize("count", [release(2), 3, release(4)])
async def test_all_members_get_the_same_bits_and_the_same_again(count: int) -> None:
    indexes = list(range(count))
    async with group(count) as members:
        raw = await members.averaged("raw", indexes)
        assert {answer["digest"] for answer in raw} == {digest(total(indexes))}

        turned = [*indexes[1:], 0]
        assert {answer["digest"] for answer in await members.averaged("turned", turned)} == {digest(total(turned))}

        for codec, most in (("fp16", 1e-3), ("int8", 2e-2)):
            first, second = (
                await members.averaged(codec, indexes, codec=codec),
                await members.averaged(f"{codec}-2", indexes, codec=codec),
            )
            assert len({answer["digest"] for answer in (*first, *second)}) == 1
            error = (torch.tensor(first[0]["head"]) - total(indexes)[:4]).abs().max() / total(indexes).abs().max()
            assert 0.0 < error < most


@pytest.mark.release
async def test_weights_and_uneven_shares_give_the_mean() -> None:
    async with group(3) as members:
        for index, bandwidth in enumerate((1e6, 9e6, None)):
            members.members[index] = replace(members.members[index], bandwidth=bandwidth, weight=float(index + 1))
        answers = await members.averaged("uneven", [0, 1, 2], divisor=6.0)
        assert {answer["digest"] for answer in answers} == {digest(total([0, 1, 2], [1.0, 2.0, 3.0], 6.0))}


async def test_a_stranger_is_refused_and_disturbs_nobody() -> None:
    async with group(3) as members:
        await members.expect([0, 1])
        (refused,) = await members.run("intrusion", [2, 0], told=[2], deadline_seconds=4.0)
        assert "failed" in refused
        assert refused["seconds"][0] < 4.0, "it is refused, and not left waiting"
        answers = await members.averaged("among us", [0, 1])
        assert {answer["digest"] for answer in answers} == {digest(total([0, 1]))}


async def test_round_whose_member_is_killed_is_repeated_without_it() -> None:
    async with group(3, last=["--die-after", "2"]) as members:
        for answer in await members.run("first", [0, 1, 2], heard=[0, 1]):
            assert answer["suspects"] == ["peer-2"], answer
            assert answer["seconds"][0] < 20.0, "it waits for no deadline"
        assert await members.processes[2].wait() == -signal.SIGKILL
        answers = await members.averaged("second", [0, 1])
        assert {answer["digest"] for answer in answers} == {digest(total([0, 1]))}


@pytest.mark.release
async def test_frozen_member_is_waited_for_until_the_deadline() -> None:
    async with group(3, last=["--freeze-after", "2"]) as members:
        for answer in await members.run("first", [0, 1, 2], heard=[0, 1], deadline_seconds=4.0):
            assert answer["suspects"] == ["peer-2"], answer
        answers = await members.averaged("second", [0, 1])
        assert {answer["digest"] for answer in answers} == {digest(total([0, 1]))}
        members.processes[2].kill()


async def test_killed_process_takes_its_daemon_with_it_and_the_next_one_removes_its_folder() -> None:
    async with group(1) as members:
        os.kill(members.processes[0].pid, signal.SIGKILL)
        await members.processes[0].wait()
        await assert_eventually(lambda: not psutil.pid_exists(members.hives[0]), within_seconds=20.0)
    async with group(1) as others:
        assert not members.folders[0].exists(), "it is left behind"
        folder = others.folders[0]
        assert folder.exists()
    assert not folder.exists()
