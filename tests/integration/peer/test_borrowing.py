"""State from peer to peer over real gRPC: early askers, strangers, damage, and donors that are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from atoll.coordinator.tracing.slicing import slice_graph
from atoll.peer import borrowing, lending
from atoll.peer.borrowing import borrow_state
from atoll.peer.events import StateKept
from atoll.peer.lending import Context, Lending
from atoll.protocol.assignment import Assignment, Donor, OptimizerSettings
from atoll.protocol.channel import start_server
from atoll.protocol.errors import LinkError
from atoll.protocol.ids import Generation, PeerId, StepNumber
from atoll.protocol.state import moment_name
from atoll.protocol.v1 import state_pb2
from support.hand_models import transformer

ANN, BOB = PeerId("ann"), PeerId("bob")
TWO, STEP = Generation(2), StepNumber(5)
MODEL = transformer()
(GRAPH,) = slice_graph(MODEL.graph, ())
NAMES = tuple(spec.name for spec in GRAPH.parameters)


def full_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    state: dict[str, torch.Tensor] = {}
    for spec in GRAPH.parameters:
        state[spec.name] = torch.randn(spec.shape, generator=generator)
        state[moment_name(spec.name, "exp_avg")] = torch.randn(spec.shape, generator=generator)
        state[moment_name(spec.name, "step")] = torch.tensor(5.0)
    return state


STATE = full_state()
KEPT = StateKept(generation=TWO, step=STEP, borrowers=(ANN,), state=STATE)


def assignment(address: str, names: tuple[str, ...] = NAMES) -> Assignment:
    return Assignment(
        generation=TWO,
        graph=GRAPH,
        neighbours=(),
        run_seed=0,
        in_flight=1,
        recompute=False,
        precision="fp32",
        optimizer=OptimizerSettings(),
        committed_step=STEP,
        donors=(Donor(peer=BOB, address=address, names=names),),
    )


class DamagingLending(Lending):
    """Flips a bit in as many chunks as ``damage`` says, and announces as many wrong digests as ``wrong_digests``."""

    damage = 0
    wrong_digests = 0

    def __init__(self, own: PeerId) -> None:
        super().__init__(own)
        self.num_asked = 0
        self.asked = asyncio.Event()

    async def Fetch(self, request: state_pb2.StateRequest, context: Context) -> None:
        self.num_asked += 1
        self.asked.set()
        await super().Fetch(request, DamagingContext(context, self))  # type: ignore[arg-type]


class DamagingContext:
    """A stream that does what its donor says to what is written."""

    def __init__(self, context: Context, donor: DamagingLending) -> None:
        self._context = context
        self._donor = donor
        self.abort = context.abort

    async def write(self, part: state_pb2.StatePart) -> None:
        if part.frame.HasField("chunk") and self._donor.damage > 0:
            self._donor.damage -= 1
            part.frame.chunk = bytes([part.frame.chunk[0] ^ 1]) + part.frame.chunk[1:]
        if part.WhichOneof("content") == "digest" and self._donor.wrong_digests > 0:
            self._donor.wrong_digests -= 1
            part.digest = bytes(16)
        await self._context.write(part)


@asynccontextmanager
async def donor() -> AsyncIterator[tuple[DamagingLending, str]]:
    bob = DamagingLending(BOB)
    server, address = await start_server([bob.register], "127.0.0.1:0")
    try:
        yield bob, address
    finally:
        await server.stop(grace=None)


async def borrow(address: str, *, who: PeerId = ANN, **changes: object) -> dict[str, torch.Tensor]:
    sizes: list[int] = []
    found = await borrow_state(who, replace(assignment(address), **changes), sizes.append)  # type: ignore[arg-type]
    assert sum(sizes) >= sum(tensor.numel() * tensor.itemsize for tensor in found.values())
    return found


def assert_complete(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == STATE.keys()
    assert [name for name, value in STATE.items() if not torch.equal(found[name], value)] == []


async def test_every_name_comes_with_all_that_it_stands_for() -> None:
    async with donor() as (bob, address):
        bob.lend(KEPT)
        assert_complete(await borrow(address))


async def test_only_what_was_asked_for_comes() -> None:
    async with donor() as (bob, address):
        bob.lend(KEPT)
        found = await borrow_state(ANN, assignment(address, NAMES[:1]), lambda size: None)
        assert {name.partition("@")[0] for name in found} == {NAMES[0]}


async def test_who_asks_early_waits_until_the_donor_has_heard_of_the_change() -> None:
    async with donor() as (bob, address):
        bob.lend(replace(KEPT, generation=Generation(1), step=StepNumber(3)))
        early = asyncio.create_task(borrow(address))
        await asyncio.wait_for(bob.asked.wait(), 20)
        assert not early.done()
        bob.lend(KEPT)
        assert_complete(await asyncio.wait_for(early, 20))
        assert bob.num_asked == 1, "it was let wait, not told to ask again"


@pytest.mark.parametrize("damage", [1, 2])
async def test_damaged_tensors_are_fetched_again(damage: int) -> None:
    async with donor() as (bob, address):
        bob.lend(KEPT)
        bob.damage = damage
        assert_complete(await borrow(address))


async def test_another_digest_than_announced_makes_all_of_it_suspect() -> None:
    async with donor() as (bob, address):
        bob.lend(KEPT)
        bob.wrong_digests = 1
        assert_complete(await borrow(address))
        bob.wrong_digests = 3
        with pytest.raises(LinkError, match="digest") as raised:
            await borrow(address)
        assert raised.value.corrupt
        assert raised.value.peer == BOB


async def test_a_tensor_that_is_damaged_every_time_is_the_donors_fault() -> None:
    async with donor() as (bob, address):
        bob.lend(KEPT)
        bob.damage = 10**6
        with pytest.raises(LinkError, match=NAMES[0]) as raised:
            await borrow(address)
        assert raised.value.corrupt


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"who": PeerId("eve")}, "eve is no peer of the plan"),
        ({"committed_step": StepNumber(4)}, "state of step 5 is lent"),
        ({"generation": Generation(1)}, "under generation 2"),
    ],
)
async def test_strangers_and_other_steps_are_refused(changes: dict[str, object], words: str) -> None:
    async with donor() as (bob, address):
        bob.lend(KEPT)
        with pytest.raises(LinkError, match=words):
            await borrow(address, **changes)  # type: ignore[arg-type]


async def test_a_name_that_the_donor_lacks_is_refused_with_its_name() -> None:
    async with donor() as (bob, address):
        bob.lend(replace(KEPT, state={name: value for name, value in STATE.items() if not name.startswith(NAMES[0])}))
        with pytest.raises(LinkError, match=f"it has no {NAMES[0]}"):
            await borrow(address)


async def test_a_donor_that_is_gone_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrowing, "_PAUSE_SECONDS", 0.01)
    async with donor() as (_, address):
        pass
    with pytest.raises(LinkError) as raised:
        await asyncio.wait_for(borrow(address), 20)
    assert raised.value.peer == BOB
    assert not raised.value.corrupt


async def test_what_is_lent_no_more_is_refused_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(borrowing, "_PAUSE_SECONDS", 0.01)
    async with donor() as (bob, address):
        bob.lend(KEPT)
        bob.stop()
        with pytest.raises(LinkError, match="bob lends nothing") as raised:
            await borrow(address)
        assert not raised.value.corrupt


async def test_a_transfer_ends_when_the_loan_does() -> None:
    async with donor() as (bob, address):
        bob.lend(KEPT)
        fetching = asyncio.create_task(borrow_state(ANN, assignment(address), lambda size: bob.stop()))
        with pytest.raises(LinkError, match=r"lends this no more|lends nothing"):
            await asyncio.wait_for(fetching, 100)
