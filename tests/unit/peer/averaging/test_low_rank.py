"""PowerSGD's two rounds over an averager: equal bits, exact where the gradient has that rank, and nothing lost for good."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from atoll.peer.averaging.averager import Member, Round, weighted_sum
from atoll.peer.averaging.low_rank import LowRankAverager
from atoll.protocol.errors import RoundFailed
from atoll.protocol.ids import PeerId


class InOneProcess:
    """An averager whose members are tasks of one loop."""

    address = ""

    def __init__(self) -> None:
        self.fails = False
        self._rounds: dict[str, list[tuple[int, Sequence[Tensor]]]] = {}
        self._changed = asyncio.Condition()

    async def average(self, round: Round, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self.fails:
            raise RoundFailed("somebody is gone")
        brought = self._rounds.setdefault(round.key, [])
        brought.append((round.own, tensors))
        async with self._changed:
            self._changed.notify_all()
            await self._changed.wait_for(lambda: len(brought) == len(round.members))
        ordered = [tensors for _, tensors in sorted(brought, key=lambda item: item[0])]
        return [weighted_sum(parts, [1.0] * len(parts), round.divisor) for parts in zip(*ordered, strict=True)]

    async def close(self) -> None:
        """There is nothing to end."""


MEMBERS = tuple(Member(peer=PeerId(name)) for name in ("ann", "bob", "cy"))


async def step(replicas: list[LowRankAverager], gradients: list[dict[str, Tensor]], key: str) -> dict[str, Tensor]:
    """The means of one step, which all have."""
    rounds = [Round(key=key, members=MEMBERS, own=own, divisor=3.0) for own in range(3)]
    calls = [replica.average(round, own) for replica, round, own in zip(replicas, rounds, gradients, strict=True)]
    first, *others = await asyncio.gather(*calls)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    return first


def brought(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"matrix": torch.randn(24, 16, generator=generator), "vector": torch.randn(16, generator=generator)}


async def test_vectors_are_exact_and_errors_are_made_up_for() -> None:
    averager = InOneProcess()
    replicas = [LowRankAverager(averager, rank=2) for _ in MEMBERS]
    gradients = [brought(seed) for seed in range(3)]
    mean = {name: torch.stack([one[name] for one in gradients]).mean(0) for name in gradients[0]}
    total = torch.zeros(24, 16)
    for number in range(60):
        found = await step(replicas, gradients, str(number))
        torch.testing.assert_close(found["vector"], mean["vector"])
        total += found["matrix"]
        for replica in replicas:
            replica.commit()
    assert torch.dist(total / 60, mean["matrix"]) < 0.15 * mean["matrix"].norm(), "what each step lost comes later"


async def test_a_failed_or_void_step_leaves_no_trace() -> None:
    averager = InOneProcess()
    replicas = [LowRankAverager(averager, rank=2) for _ in MEMBERS]
    gradients = [brought(seed) for seed in range(3)]
    first = await step(replicas, gradients, "1")
    averager.fails = True
    with pytest.raises(RoundFailed):
        await step(replicas, gradients, "2")
    averager.fails = False
    again = await step(replicas, gradients, "3")
    assert torch.equal(first["matrix"], again["matrix"])
