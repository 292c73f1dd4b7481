"""Rounds of hivemind's that members agree on: what becomes of one that fails for some of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor

from atoll.peer.averaging.averager import Round
from atoll.peer.averaging.group import MOST_ATTEMPTS, MOST_FAILED, OverHivemind
from atoll.peer.averaging.hivemind_averager import HivemindAverager
from atoll.protocol.errors import RoundFailed
from support.wires import NAMES, Wires, round_of

ADDRESSES = ("here", "there", "elsewhere")
THREE = NAMES[:3]


class FakeHive:
    """Gives back what it is brought, times ten, but for the attempts that are to fail."""

    def __init__(self, fails: frozenset[int]) -> None:
        self._fails = fails
        self.keys: list[str] = []

    async def average(self, round: Round, tensors: Sequence[Tensor]) -> list[Tensor]:
        assert [member.address for member in round.members] == list(ADDRESSES)
        self.keys.append(round.key)
        if len(self.keys) - 1 in self._fails:
            raise round.failure("its stream broke")
        return [tensor * 10.0 for tensor in tensors]


async def outcomes(fails: Sequence[frozenset[int]], rounds: int) -> tuple[list[list[float]], list[FakeHive]]:
    """What each member has after each round; the sum over links of three ones is 3."""
    wires, hives = Wires(THREE), [FakeHive(failing) for failing in fails]

    async def member(own: int) -> list[float]:
        averager = OverHivemind(wires.averagers[THREE[own]], cast(HivemindAverager, hives[own]), ADDRESSES, "raw")
        found = []
        for number in range(rounds):
            (value,) = await averager.average(round_of(THREE, own), [torch.ones(1)])
            found.append(float(value) + 100.0 * number)
        return found

    return list(await asyncio.gather(*map(member, range(3)))), hives


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        ([frozenset(), frozenset(), frozenset()], 10.0),
        ([frozenset(), frozenset({0}), frozenset()], 10.0),
        ([frozenset({1}), frozenset({0}), frozenset()], 3.0),
        ([frozenset({0, 1})] * 3, 3.0),
    ],
    ids=["nobody fails", "one does it again with all", "two different ones: over the links", "all fail"],
)
async def test_all_end_with_the_sum_of_the_same_round(fails: list[frozenset[int]], expected: float) -> None:
    found, hives = await outcomes(fails, 1)
    assert found == [[expected]] * 3
    assert hives[0].keys == hives[1].keys == hives[2].keys
    assert len(set(hives[0].keys)) == len(hives[0].keys) <= MOST_ATTEMPTS


async def test_hivemind_that_keeps_failing_is_left_alone() -> None:
    found, hives = await outcomes([frozenset(), frozenset(range(99)), frozenset()], 5)
    assert found == [[3.0, 103.0, 203.0, 303.0, 403.0]] * 3
    assert [len(hive.keys) for hive in hives] == [MOST_FAILED] * 3


async def test_a_member_that_is_lost_fails_the_round() -> None:
    wires = Wires(THREE)
    wires.dead.add(THREE[2])
    hive = cast(HivemindAverager, FakeHive(frozenset()))
    averagers = [OverHivemind(wires.averagers[name], hive, ADDRESSES, "raw") for name in THREE[:2]]
    rounds = [averager.average(round_of(THREE, own, 0.3), [torch.ones(1)]) for own, averager in enumerate(averagers)]
    for outcome in await asyncio.gather(*rounds, return_exceptions=True):
        assert isinstance(outcome, RoundFailed)
        assert outcome.suspects == (THREE[2],)
