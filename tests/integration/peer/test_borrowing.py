"""State from peer to peer over real gRPC: early askers, strangers, damage, and donors that are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch

from atoll.coordinator.tracing.slicing import slice_graph
from atoll.peer.stage.events import StateKept
from atoll.peer.state import lending
from atoll.peer.state.borrowing import borrow_state
from atoll.peer.state.lending import Context, Disk, Lending, nothing_stored
from atoll.peer.state.snapshot_folder import SnapshotFolder
from atoll.protocol import fetching
from atoll.protocol.assignment import Assignment, Donor, OptimizerSettings
from atoll.protocol.channel import start_server
from atoll.protocol.errors import LinkError
from atoll.protocol.groups import Group
from atoll.protocol.ids import Generation, PeerId, StepNumber
from atoll.protocol.state import moment_name
from atoll.protocol.v1 import state_pb2
from support.hand_models import transformer

ANN, BOB, CID = PeerId("ann"), PeerId("bob"), PeerId("cid")
RUN = "7a" * 16
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
        groups=(Group(stage=GRAPH.stage, replicas=(ANN,)),),
        committed_step=STEP,
        donors=(Donor(peer=BOB, address=address, names=names),),
    )


class DamagingLending(Lending):
    """Flips a bit in as many chunks as ``damage`` says, announces as many wrong digests as ``wrong_digests``, and ends each
    answer after ``dies_after`` more bytes."""

    damage = 0
    wrong_digests = 0
    dies_after: int | None = None

    def __init__(self, own: PeerId, disk: Disk = nothing_stored) -> None:
        super().__init__(own, disk=disk)
        self.num_asked = 0
        self.num_sent = 0
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
        donor = self._donor
        if donor.dies_after is not None and donor.num_sent >= donor.dies_after:
            await self.abort(grpc.StatusCode.UNAVAILABLE, "the test ends it")
        if part.frame.HasField("chunk") and donor.damage > 0:
            donor.damage -= 1
            part.frame.chunk = bytes([part.frame.chunk[0] ^ 1]) + part.frame.chunk[1:]
        if part.WhichOneof("content") == "digest" and donor.wrong_digests > 0:
            donor.wrong_digests -= 1
            part.digest = bytes(16)
        donor.num_sent += len(part.frame.chunk)
        await self._context.write(part)


@asynccontextmanager
async def donor(name: PeerId = BOB, disk: Disk = nothing_stored) -> AsyncIterator[tuple[DamagingLending, str]]:
    bob = DamagingLending(name, disk)
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


async def test_what_has_another_digest_than_announced_is_fetched_again() -> None:
    async with donor() as (bob, address):
        bob.lend(KEPT)
        bob.wrong_digests = 2
        assert_complete(await borrow(address))
        assert bob.num_asked == 2
        bob.wrong_digests = 10**6
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
    monkeypatch.setattr(fetching, "PAUSE_SECONDS", 0.01)
    async with donor() as (_, address):
        pass
    with pytest.raises(LinkError) as raised:
        await asyncio.wait_for(borrow(address), 20)
    assert raised.value.peer == BOB
    assert not raised.value.corrupt


async def test_what_is_lent_no_more_is_refused_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(fetching, "PAUSE_SECONDS", 0.01)
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


NUM_BYTES = sum(value.numel() * value.itemsize for value in STATE.values())


def from_two(bob: str, cid: str, names: tuple[str, ...] = NAMES) -> Assignment:
    """Bob is asked first, and cid for what he does not give."""
    donors = (Donor(peer=BOB, address=bob, names=names), Donor(peer=CID, address=cid, names=NAMES))
    return replace(assignment(bob), donors=donors)


def stored_in(cache: Path, state: dict[str, torch.Tensor] = STATE, step: StepNumber = STEP) -> Disk:
    """A disk that has this state."""
    folder = SnapshotFolder(cache)
    part = folder.new_part(RUN, step, BOB, NAMES, 0)
    for name, tensor in state.items():
        part.add(name, tensor)
    part.complete()
    return lambda step: folder.open(RUN, step)


def damage(cache: Path) -> tuple[Path, bytes]:
    """Flips a bit of the one part in there; where it is, and what it holds now."""
    (path,) = cache.rglob("*.safetensors")
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    return path, bytes(damaged)


@pytest.mark.parametrize("dies_after", [0, NUM_BYTES // 3, NUM_BYTES - 1500])
async def test_when_a_donor_dies_the_next_one_goes_on_and_what_came_is_kept(
    dies_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(lending, "paced_chunk_bytes", lambda pacers: 1024)
    async with donor() as (bob, first), donor(CID) as (cid, second):
        bob.lend(KEPT)
        cid.lend(KEPT)
        bob.dies_after = dies_after
        sizes: list[int] = []
        assert_complete(await borrow_state(ANN, from_two(first, second), sizes.append))
        assert bob.num_asked == 3 + bool(dies_after), "it is asked again, in case it comes back"
        assert sum(sizes) == NUM_BYTES, "nothing was sent twice"


async def test_a_message_that_broke_off_goes_on_where_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(lending, "paced_chunk_bytes", lambda pacers: 1024)
    async with donor() as (bob, address):
        bob.lend(KEPT)
        bob.dies_after = 1024
        write = DamagingContext.write

        async def later(self: DamagingContext, part: state_pb2.StatePart) -> None:
            if bob.dies_after is not None and bob.num_sent >= bob.dies_after:
                bob.dies_after += 1024  # it lives on after each break
                await self.abort(grpc.StatusCode.UNAVAILABLE, "the test ends it")
            await write(self, part)

        monkeypatch.setattr(DamagingContext, "write", later)
        sizes: list[int] = []
        assert_complete(await borrow_state(ANN, assignment(address), sizes.append))
        assert sum(sizes) == NUM_BYTES
        assert bob.num_asked > NUM_BYTES // 2048


async def test_a_rest_is_of_no_use_for_other_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a donor sends next is another message: it is sent from its beginning."""
    monkeypatch.setattr(fetching, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(lending, "paced_chunk_bytes", lambda pacers: 1024)
    other = {name: value + 1.0 for name, value in STATE.items()}
    async with donor() as (bob, first), donor(CID) as (cid, second):
        bob.lend(replace(KEPT, state=other))
        cid.lend(KEPT)
        bob.dies_after = 1024
        found = await borrow_state(ANN, from_two(first, second), lambda size: None)
        assert found.keys() == STATE.keys()
        for name, value in found.items():
            assert torch.equal(value, STATE[name]) or torch.equal(value, other[name]), f"{name} is a mixture"


async def test_each_name_comes_from_the_first_that_has_it() -> None:
    async with donor() as (bob, first), donor(CID) as (cid, second):
        bob.lend(KEPT)
        cid.lend(KEPT)
        assert_complete(await borrow_state(ANN, from_two(first, second, NAMES[:2]), lambda size: None))
        assert (bob.num_asked, cid.num_asked) == (1, 1)
        few = sum(value.numel() * 4 for name, value in STATE.items() if name.partition("@")[0] in NAMES[:2])
        assert (bob.num_sent, cid.num_sent) == (few, NUM_BYTES - few)


async def test_the_last_donor_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "PAUSE_SECONDS", 0.01)
    async with donor() as (_, first), donor(CID) as (_, second):
        pass
    with pytest.raises(LinkError) as raised:
        await asyncio.wait_for(borrow_state(ANN, from_two(first, second), lambda size: None), 20)
    assert raised.value.peer == CID


async def test_what_is_not_kept_is_lent_from_the_disk(tmp_path: Path) -> None:
    async with donor(disk=stored_in(tmp_path)) as (bob, address):
        bob.lend(replace(KEPT, state={name: value for name, value in STATE.items() if name.startswith(NAMES[0])}))
        assert_complete(await borrow(address))
        bob.lend(replace(KEPT, state={}))
        assert_complete(await borrow(address))
        bob.lend(replace(KEPT, state={}, step=StepNumber(4)))
        with pytest.raises(LinkError, match="it has no"):
            await borrow(address, committed_step=StepNumber(4))


async def test_the_own_disk_is_read_without_the_network(tmp_path: Path) -> None:
    own = replace(assignment("127.0.0.1:1"), donors=(Donor(peer=ANN, address="127.0.0.1:1", names=NAMES),))
    sizes: list[int] = []
    assert_complete(await borrow_state(ANN, own, sizes.append, own_disk=stored_in(tmp_path)))
    assert sizes == []
    with pytest.raises(LinkError, match="its own snapshot of step 5 is of no use"):
        await borrow_state(ANN, own, sizes.append, own_disk=nothing_stored)


async def test_a_damaged_disk_is_refused_with_a_sentence_and_the_next_donor_gives_it(tmp_path: Path) -> None:
    disk = stored_in(tmp_path)
    path, damaged = damage(tmp_path)
    async with donor(disk=disk) as (bob, first), donor(CID) as (cid, second):
        bob.lend(replace(KEPT, state={}))
        cid.lend(KEPT)
        assert_complete(await borrow_state(ANN, from_two(first, second), lambda size: None))
        path.write_bytes(damaged)
        bob.lend(replace(KEPT, state={}))
        with pytest.raises(LinkError, match="do not agree with their hash"):
            await borrow(first)


async def test_another_run_is_refused() -> None:
    async with donor() as (bob, address):
        bob.lend(KEPT)
        bob.run_id = RUN
        assert_complete(await borrow_state(ANN, assignment(address), lambda size: None, run_id=RUN))
        with pytest.raises(LinkError, match="bob is in the run 7a"):
            await borrow_state(ANN, assignment(address), lambda size: None, run_id="other")
