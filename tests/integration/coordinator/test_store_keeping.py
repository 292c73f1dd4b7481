"""A store is filled from peers' disks, over real gRPC, whoever of them is gone or damaged."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from atoll.coordinator.store.store import Store, StoredState
from atoll.coordinator.store.store_calls import StoreCalls
from atoll.coordinator.store.store_keeping import StoreKeeping, Wanted
from atoll.peer.state.lending import Lending
from atoll.peer.state.snapshot_folder import SnapshotFolder
from atoll.protocol import fetching
from atoll.protocol.channel import start_server
from atoll.protocol.ids import PeerId, StepNumber
from atoll.protocol.state import grouped
from support.states import assert_same_state, state_of

RUN = "e" * 32
STEP = StepNumber(6)
ANN, BOB = PeerId("ann"), PeerId("bob")
STATE = state_of("first", "second", "third")
GROUPS = grouped(STATE)


@dataclass
class Scene:
    """Two peers that have everything on their disks, and a store."""

    keeping: StoreKeeping
    store: Store
    folders: dict[PeerId, SnapshotFolder]
    addresses: dict[PeerId, str]

    def wanted(self, names: Iterable[str] = GROUPS) -> Wanted:
        holders = dict.fromkeys(names, (ANN, BOB))
        return Wanted(step=STEP, holders=holders, addresses=self.addresses)

    def stored(self) -> dict[str, torch.Tensor]:
        (found,) = self.store.snapshots()
        state = StoredState(self.store, found)
        return {name: state.tensor(name) for name in state.tensor_names(state.names)}


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    store = Store(str(folder / "store"), "durability.store")
    calls = StoreCalls(store.url, "durability.store")
    folders = {peer: SnapshotFolder(folder / peer) for peer in (ANN, BOB)}
    async with AsyncExitStack() as stack:
        addresses = {}
        for peer, disk in folders.items():
            part = disk.new_part(RUN, STEP, peer, tuple(GROUPS), 0)
            for group in GROUPS.values():
                part.add_group(group)
            part.complete()
            lending = Lending(peer, disk=lambda step, disk=disk: disk.open(RUN, step))  # type: ignore[misc]
            lending.run_id = RUN
            server, addresses[peer] = await start_server([lending.register], "127.0.0.1:0")
            stack.push_async_callback(server.stop, None)
        yield Scene(StoreKeeping(store, RUN, "job", calls, clock=lambda: 1.0), store, folders, addresses)


async def test_a_snapshot_gets_into_the_store(tmp_path: Path) -> None:
    async with scene(tmp_path) as set_up:
        assert await set_up.keeping.keep(set_up.wanted())
        assert_same_state(set_up.stored(), STATE)


async def test_who_is_gone_is_made_up_for_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "PAUSE_SECONDS", 0.01)
    async with scene(tmp_path) as set_up:
        set_up.addresses[ANN] = "127.0.0.1:1"
        assert await set_up.keeping.keep(set_up.wanted())
        assert_same_state(set_up.stored(), STATE)


async def test_what_is_damaged_on_one_disk_comes_from_another(tmp_path: Path) -> None:
    async with scene(tmp_path) as set_up:
        (path,) = (tmp_path / ANN).rglob("*.safetensors")
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        path.write_bytes(damaged)
        assert await set_up.keeping.keep(set_up.wanted())
        assert_same_state(set_up.stored(), STATE)


async def test_what_nobody_gives_is_told_and_the_last_good_snapshot_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fetching, "PAUSE_SECONDS", 0.01)
    async with scene(tmp_path) as set_up:
        writer = set_up.store.writer(RUN, StepNumber(3), "job")
        writer.add(GROUPS["first"])
        writer.complete(0.5)
        for disk in set_up.folders.values():
            disk.keep_only(RUN, ())
        assert not await set_up.keeping.keep(set_up.wanted())
        assert "nobody gave" in caplog.text
        assert [found.step for found in set_up.store.snapshots()] == [3]


async def test_a_store_that_cannot_be_written_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with scene(tmp_path) as set_up:
        (tmp_path / "store").write_text("a file", encoding="utf-8")
        assert not await set_up.keeping.keep(set_up.wanted())
        assert "cannot write to" in caplog.text
