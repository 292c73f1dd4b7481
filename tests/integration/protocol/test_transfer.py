"""State by name through the coordinator's servicer, over real gRPC under its default message limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial

import grpc
import grpc.aio
import pytest
import torch
from torch import Tensor

from atoll.compression.registry import encode_message
from atoll.coordinator.transfer import receive_state, stream_state
from atoll.peer.state.transfer import fetch_state, store_state
from atoll.protocol.channel import open_channel, start_server
from atoll.protocol.errors import AtollError, LinkError, ResourceError
from atoll.protocol.framing import frames_of
from atoll.protocol.ids import Generation, PeerId
from atoll.protocol.messages import EncodedMessage, Kind, Message, MessageHeader, MessageKey
from atoll.protocol.pacing import Pacer
from atoll.protocol.v1 import frames_pb2, session_pb2, session_pb2_grpc
from support.messages import key_of

PEER = PeerId("peer")
MEGABYTE = 2**20
Context = grpc.aio.ServicerContext[frames_pb2.Frame, frames_pb2.Frame]


class Store(session_pb2_grpc.CoordinatorServicer):
    """Keeps what is stored and gives it back. The hooks stand for a full disk, a picky judge, a bad line."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.sender = ""
        self.failure: AtollError | None = None
        self.write: Callable[[str], object] = lambda name: None
        self.judge: Callable[[MessageHeader], str | None] = lambda header: None
        self.damage = 0

    async def StoreState(self, request_iterator: object, context: Context) -> None:
        try:
            self.sender = await receive_state(context, lambda peer, header: self.judge(header), self._take, silence_seconds=5)
        except AtollError as error:
            self.failure = error
            await context.abort(grpc.StatusCode.ABORTED, str(error))

    async def FetchState(self, request: session_pb2.FetchStateRequest, context: Context) -> None:
        damaging = Damaging(context, self)
        await stream_state(
            damaging,  # type: ignore[arg-type]
            key_of(Kind.STATE),
            request.names,
            self.tensors.__getitem__,
            max_bytes_per_second=request.max_bytes_per_second,
        )

    async def _take(self, peer: PeerId, key: MessageKey, name: str, tensor: Tensor) -> None:
        self.write(name)
        await asyncio.sleep(0)
        self.tensors[name] = tensor


class Damaging:
    """A context that flips a bit of as many chunks as the store says."""

    def __init__(self, context: Context, store: Store) -> None:
        self._context = context
        self._store = store

    async def write(self, frame: frames_pb2.Frame) -> None:
        if frame.HasField("chunk") and self._store.damage > 0:
            self._store.damage -= 1
            frame.chunk = bytes([frame.chunk[0] ^ 128]) + frame.chunk[1:]
        await self._context.write(frame)


@asynccontextmanager
async def store_and_stub() -> AsyncIterator[tuple[Store, session_pb2_grpc.CoordinatorStub]]:
    store = Store()
    register = partial(session_pb2_grpc.add_CoordinatorServicer_to_server, store)
    server, address = await start_server([register], "127.0.0.1:0")
    async with open_channel(address) as channel:
        yield store, session_pb2_grpc.CoordinatorStub(channel)
    await server.stop(0)


def accept(header: MessageHeader) -> str | None:
    return None


async def test_a_shard_of_300_megabytes_crosses_both_ways_under_the_default_limit() -> None:
    shard = {f"layer.{index}.weight": torch.randn(25 * MEGABYTE) for index in range(3)}
    async with store_and_stub() as (store, stub):
        num_bytes = await store_state(stub, PEER, key_of(Kind.STATE), iter(shard.items()))
        assert num_bytes == 300 * MEGABYTE
        assert store.sender == PEER
        assert all(torch.equal(shard[name], store.tensors[name]) for name in shard)
        fetched = await fetch_state(stub, PEER, Generation(1), list(shard), accept)
        assert all(torch.equal(shard[name], fetched[name]) for name in shard)


async def test_both_ways_are_as_slow_as_owners_want() -> None:
    state = {"weight": torch.randn(125_000)}
    async with store_and_stub() as (_, stub):
        began = time.monotonic()
        await store_state(stub, PEER, key_of(Kind.STATE), iter(state.items()), pacers=(Pacer(1e6),))
        stored = time.monotonic()
        fetched = await fetch_state(stub, PEER, Generation(1), ["weight"], accept, max_download=1e6)
        ended = time.monotonic()
    assert torch.equal(fetched["weight"], state["weight"])
    assert min(stored - began, ended - stored) > 0.4  # half a megabyte, less the burst and what the last chunk owes


async def test_any_dtype_and_no_tensor_at_all() -> None:
    state = {"scalar": torch.tensor(3, dtype=torch.int64), "empty": torch.empty(0, 2), "half": torch.ones(3).bfloat16().t()}
    async with store_and_stub() as (_, stub):
        assert await store_state(stub, PEER, key_of(Kind.STATE), []) == 0
        await store_state(stub, PEER, key_of(Kind.STATE), state.items())
        assert await fetch_state(stub, PEER, Generation(1), [], accept) == {}
        fetched = await fetch_state(stub, PEER, Generation(1), list(state), accept)
        for name, tensor in state.items():
            assert fetched[name].dtype == tensor.dtype
            assert torch.equal(fetched[name], tensor)


async def test_tensors_are_taken_from_the_source_only_as_they_are_written() -> None:
    taken: list[str] = []
    written: list[str] = []

    def items() -> Iterator[tuple[str, Tensor]]:
        for index in range(20):
            assert len(taken) - len(written) <= 5
            taken.append(str(index))
            yield str(index), torch.zeros(MEGABYTE)

    async with store_and_stub() as (store, stub):
        store.write = written.append
        await store_state(stub, PEER, key_of(Kind.STATE), items())
        assert written == taken


async def test_a_full_disk_is_the_reason_at_both_ends() -> None:
    def full(name: str) -> None:
        if name == "3":
            raise ResourceError("the disk of /state is full: free 2 GiB")

    async with store_and_stub() as (store, stub):
        store.write = full
        with pytest.raises(LinkError, match=r"link to coordinator: .*the disk of /state is full: free 2 GiB"):
            await store_state(stub, PEER, key_of(Kind.STATE), ((str(index), torch.zeros(10)) for index in range(8)))
        assert isinstance(store.failure, ResourceError)
        assert sorted(store.tensors) == ["0", "1", "2"]


async def test_what_the_coordinator_does_not_expect_is_refused() -> None:
    async with store_and_stub() as (store, stub):
        store.judge = lambda header: None if header.tensors[0].name == "mine" else "that parameter is not yours"
        with pytest.raises(LinkError, match="that parameter is not yours"):
            await store_state(stub, PEER, key_of(Kind.STATE), [("mine", torch.zeros(1)), ("other", torch.zeros(1))])


async def test_a_peer_that_goes_away_in_the_middle_is_reported() -> None:
    async with store_and_stub() as (store, stub):
        call = stub.StoreState()
        await call.write(frames_pb2.Frame(hello=frames_pb2.Hello(peer=PEER, generation=1)))
        big = frames_of(_state_message("w", torch.zeros(MEGABYTE)), 1)
        await call.write(next(big))
        await call.write(next(big))
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError, match="in the middle"):
            await _read_to_end(call)
        assert "in the middle of a message" in str(store.failure)


async def test_a_stream_without_hello_is_refused() -> None:
    async with store_and_stub() as (_, stub):
        call = stub.StoreState()
        await call.write(frames_pb2.Frame())
        assert await call.code() is grpc.StatusCode.ABORTED
        assert "must be a hello" in await call.details()


@pytest.mark.parametrize("damage", [1, 2])
async def test_damaged_tensors_are_fetched_again(damage: int) -> None:
    async with store_and_stub() as (store, stub):
        store.tensors = {"a": torch.randn(10), "b": torch.randn(10)}
        store.damage = damage
        fetched = await fetch_state(stub, PEER, Generation(1), ["a", "b"], accept)
        assert all(torch.equal(fetched[name], store.tensors[name]) for name in ("a", "b"))


async def test_damage_without_end_is_reported() -> None:
    async with store_and_stub() as (store, stub):
        store.tensors = {"a": torch.randn(10)}
        store.damage = 10**6
        with pytest.raises(LinkError, match="did not send a: checksum") as caught:
            await fetch_state(stub, PEER, Generation(1), ["a"], accept)
        assert caught.value.corrupt


async def test_state_that_the_peer_does_not_accept_ends_the_fetch() -> None:
    async with store_and_stub() as (store, stub):
        store.tensors = {"a": torch.randn(10)}
        with pytest.raises(LinkError, match="refused: wrong shape"):
            await fetch_state(stub, PEER, Generation(1), ["a"], lambda header: "wrong shape")


async def test_no_coordinator_is_a_link_error() -> None:
    async with open_channel("127.0.0.1:9") as channel:
        stub = session_pb2_grpc.CoordinatorStub(channel)
        with pytest.raises(LinkError, match="link to coordinator"):
            await store_state(stub, PEER, key_of(Kind.STATE), [("a", torch.zeros(1))])
        with pytest.raises(LinkError, match="link to coordinator"):
            await fetch_state(stub, PEER, Generation(1), ["a"], accept)


def _state_message(name: str, tensor: Tensor) -> EncodedMessage:
    return encode_message(Message(key=key_of(Kind.STATE), tensors=((name, tensor),)))


async def _read_to_end(call: grpc.aio.StreamStreamCall[frames_pb2.Frame, frames_pb2.Frame]) -> None:
    while isinstance(await call.read(), frames_pb2.Frame):
        pass
