"""Sums over our own links: everybody's values, added in the group's order, with the same bits for all."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from atoll.peer.averaging import over_links
from atoll.peer.averaging.averager import weighted_sum
from atoll.peer.stage.plausibility import WARMING_STEPS
from atoll.protocol.errors import Implausible, RoundFailed
from atoll.protocol.ids import Generation, MicrobatchIndex, StageIndex, StepNumber
from atoll.protocol.messages import Kind, Message, MessageHeader, MessageKey, TensorHeader
from support.wires import NAMES, Wires, round_of


def values(seed: int) -> list[torch.Tensor]:
    """Gradients of three leaves, one not in its plain order in memory, one without elements."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(5, 7, generator=generator).t(),
        torch.randn(0, generator=generator),
        torch.randn(13, generator=generator),
    ]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("block_values", [2**20, 10, 3])
async def test_all_get_the_sum_in_the_groups_order(count: int, block_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_links, "BLOCK_VALUES", block_values)
    names = NAMES[:count]
    wires = Wires(names)
    brought = [values(seed) for seed in range(count)]
    rounds = [wires.averagers[name].average(round_of(names, own), brought[own]) for own, name in enumerate(names)]
    summed = await asyncio.gather(*rounds)
    for tensors in summed:
        for index, tensor in enumerate(tensors):
            expected = weighted_sum([one[index] for one in brought], [1.0] * count)
            assert torch.equal(tensor, expected), "the same bits"
    again = [values(seed) for seed in range(count)]
    assert all(
        torch.equal(one, other)
        for kept, fresh in zip(brought, again, strict=True)
        for one, other in zip(kept, fresh, strict=True)
    ), "what was brought is as it was"
    assert all(not wires.averagers[name]._slots for name in names), "nothing is kept of a round that is over"


async def test_a_member_that_takes_no_part_is_named() -> None:
    names = NAMES[:3]
    wires = Wires(names)
    wires.dead.add(names[2])
    rounds = [wires.averagers[name].average(round_of(names, own, 0.3), values(own)) for own, name in enumerate(names[:2])]
    for outcome in await asyncio.gather(*rounds, return_exceptions=True):
        assert isinstance(outcome, RoundFailed)
        assert outcome.suspects == (names[2],)


async def test_what_a_plan_that_is_over_waits_for_ends_at_once() -> None:
    names = NAMES[:2]
    wires = Wires(names)
    waiting = asyncio.create_task(wires.averagers[names[0]].average(round_of(names, 0), values(0)))
    await asyncio.sleep(0)
    wires.averagers[names[0]].advance(Generation(4))
    with pytest.raises(RoundFailed):
        await asyncio.wait_for(waiting, 5.0)


async def test_all_hear_what_each_says_and_rounds_of_a_step_do_not_mix() -> None:
    names = NAMES[:3]
    wires = Wires(names)

    async def member(own: int) -> list[bytes]:
        averager, round = wires.averagers[names[own]], round_of(names, own)
        said = await averager.agree(round, str(own).encode())
        for number in range(2):
            (summed,) = await averager.average(round, [torch.full((4,), float(own + number))])
            assert summed.tolist() == [3.0 + 3.0 * number] * 4
        return said + await averager.agree(round, f"again {own}".encode())

    said = await asyncio.gather(*map(member, range(3)))
    assert said == [[b"0", b"1", b"2", b"again 0", b"again 1", b"again 2"]] * 3


@pytest.mark.parametrize(
    ("stage", "dtype", "shape"),
    [(0, torch.float32, (4,)), (1, torch.float64, (4,)), (1, torch.float32, (2, 2)), (1, torch.float32, (2**20 + 1,))],
)
async def test_other_messages_are_refused(stage: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    averager = Wires(NAMES[:2]).averagers[NAMES[0]]
    key = MessageKey(
        generation=Generation(3),
        step=StepNumber(7),
        microbatch=MicrobatchIndex(0),
        kind=Kind.PART,
        source=StageIndex(stage),
        target=StageIndex(stage),
    )
    assert averager.refusal(NAMES[1], header_of(key, dtype, shape))


def header_of(key: MessageKey, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (4,)) -> MessageHeader:
    tensor = TensorHeader(name="values", dtype=dtype, shape=shape, codec="raw", num_bytes=8)
    return MessageHeader(key=key, tensors=(tensor,), numbers={}, num_bytes=8, checksum=0)


def part(number: int, step: int = 7) -> MessageKey:
    return MessageKey(
        generation=Generation(3),
        step=StepNumber(step),
        microbatch=MicrobatchIndex(number),
        kind=Kind.PART,
        source=StageIndex(1),
        target=StageIndex(1),
    )


async def test_a_member_may_not_send_ever_more_that_nobody_waits_for() -> None:
    averager = Wires(NAMES[:3]).averagers[NAMES[0]]
    for number in range(over_links.MOST_WAITING):
        assert averager.refusal(NAMES[1], header_of(part(number))) is None
        averager.arrived(NAMES[1], Message(key=part(number), tensors=(("values", torch.ones(4)),)))
    assert "nobody has asked for" in str(averager.refusal(NAMES[1], header_of(part(10**6))))
    assert averager.refusal(NAMES[2], header_of(part(0))) is None, "another one has sent nothing yet"
    averager.advance(Generation(4))
    assert averager.refusal(NAMES[1], header_of(part(0))) is None, "what waited is of no use any more, and gone"


async def test_a_part_that_no_honest_member_sends_is_refused_and_its_sender_named() -> None:
    names = NAMES[:2]
    wires = Wires(names)

    async def step(number: int, *sizes: float) -> list[list[torch.Tensor] | BaseException]:
        rounds = [
            wires.averagers[name].average(replace(round_of(names, own), step=number), [torch.full((8,), sizes[own])])
            for own, name in enumerate(names)
        ]
        return await asyncio.wait_for(asyncio.gather(*rounds, return_exceptions=True), 20.0)

    for number in range(WARMING_STEPS):
        assert not [one for one in await step(number, 1.0, 1.0) if isinstance(one, BaseException)]
        for averager in wires.averagers.values():
            averager.committed()
    honest = asyncio.create_task(
        wires.averagers[names[0]].average(replace(round_of(names, 0), step=WARMING_STEPS), [torch.ones(8)])
    )
    wires.carry(names[1], names[0], Message(key=part(0, WARMING_STEPS), tensors=(("values", torch.full((4,), 1e12)),)))
    with pytest.raises(Implausible, match="times as large as in the last 8 steps") as found:
        await asyncio.wait_for(honest, 20.0)
    assert found.value.peer == names[1]
