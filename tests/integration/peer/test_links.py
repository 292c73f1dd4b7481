"""Two or three peers' links over real gRPC."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterable

import psutil
import pytest
import torch

from atoll.compression.codec import relative_error
from atoll.compression.registry import MessageCoder, decode_message, encode_message
from atoll.protocol.assignment import Neighbour
from atoll.protocol.channel import PROTOCOL_VERSION, open_channel, start_server
from atoll.protocol.errors import LinkError
from atoll.protocol.ids import Generation, PeerId, StageIndex
from atoll.protocol.messages import Kind, Message
from atoll.protocol.v1 import frames_pb2, frames_pb2_grpc
from support.link_swarm import CREDIT, Context, linked_pair, neighbour, peers, settings_of
from support.messages import key_of, message_of
from support.waiting import assert_eventually

MEGABYTE = 2**20


async def test_messages_go_both_ways_with_their_dtypes_and_numbers() -> None:
    async with linked_pair() as (left, right):
        hidden = torch.randn(2, 3).t()
        tensors = (("0:0", hidden), ("1:0", torch.tensor([1, 2**40])), ("2:0", torch.tensor(True)), ("3:0", torch.empty(0, 4)))
        sent = Message(key=key_of(), tensors=tensors, numbers={"scale": 0.125})
        done = left.links.send(right.name, sent)
        got = await right.receive()
        assert got.key == sent.key
        assert got.numbers == sent.numbers
        for (name, tensor), (got_name, got_tensor) in zip(sent.tensors, got.tensors, strict=True):
            assert (name, tensor.dtype, tensor.shape) == (got_name, got_tensor.dtype, got_tensor.shape)
            assert torch.equal(tensor, got_tensor)
        assert got.tensor("0:0").stride() == hidden.stride()
        await asyncio.wait_for(asyncio.wrap_future(done), 10)
        right.links.send(left.name, message_of(key_of(Kind.GRADIENT)))
        assert (await left.receive()).key.kind is Kind.GRADIENT


async def test_the_connection_of_a_link_that_is_left_ends_with_it() -> None:
    """And not whenever garbage is collected: each change of the plan would leave one until then."""

    def connections() -> set[tuple[int, int]]:
        found = psutil.Process().net_connections("tcp")
        return {(one.laddr.port, one.raddr.port) for one in found if one.status == psutil.CONN_ESTABLISHED}

    gc.disable()
    try:
        before = connections()
        async with linked_pair() as (left, right):
            left.links.send(right.name, message_of(key_of()))
            await right.receive()
            assert connections() - before
            await asyncio.gather(left.links.disconnect(), right.links.disconnect())
            await assert_eventually(lambda: not connections() - before, within_seconds=20.0)
    finally:
        gc.enable()


async def test_an_activation_of_40_megabytes_crosses() -> None:
    async with linked_pair() as (left, right):
        tensor = torch.randn(10 * MEGABYTE)
        left.links.send(right.name, Message(key=key_of(), tensors=(("0:0", tensor),)))
        assert torch.equal((await right.receive()).tensor("0:0"), tensor)


async def test_sending_from_another_thread_keeps_the_order() -> None:
    async with linked_pair() as (left, right):

        def compute() -> None:
            for microbatch in range(12):
                left.links.send(right.name, message_of(key_of(microbatch=microbatch)))

        thread = threading.Thread(target=compute)
        thread.start()
        for microbatch in range(12):
            message = await right.receive()
            assert message.key.microbatch == microbatch
            right.links.consumed(message.key, left.name)
        thread.join()


async def test_credit_holds_messages_back_until_they_are_consumed() -> None:
    async with linked_pair() as (left, right):
        for microbatch in range(4):
            left.links.send(right.name, message_of(key_of(microbatch=microbatch)))
        first = [await right.receive() for _ in range(CREDIT[Kind.ACTIVATION])]
        left.links.send(right.name, message_of(key_of(Kind.GRADIENT)))
        assert (await right.receive()).key.kind is Kind.GRADIENT  # overtakes: the others have no credit
        await assert_eventually(lambda: left.links.num_unacknowledged(right.name) == 2)
        right.links.consumed(first[0].key, left.name)
        assert (await right.receive()).key.microbatch == 2
        right.links.consumed(first[1].key, left.name)
        assert (await right.receive()).key.microbatch == 3


async def test_lossy_codecs_by_direction_and_what_the_reports_say() -> None:
    async with linked_pair(codecs=("bf16", "raw")) as (left, right):
        message = message_of(key_of(), num_elements=1000)
        left.links.send(right.name, message)
        got = (await right.receive()).tensor("0:0")
        assert torch.equal(got, message.tensor("0:0").bfloat16().float())
        gradient = message_of(key_of(Kind.GRADIENT), num_elements=1000)
        right.links.send(left.name, gradient)
        assert torch.equal((await left.receive()).tensor("0:0"), gradient.tensor("0:0"))
        (forward,) = left.links.uses()
        assert (forward.source, forward.target, forward.direction, forward.codec) == ("left", "right", "forward", "bf16")
        assert forward.bytes == 2000
        assert 0 < forward.relative_error < 2**-8
        await assert_eventually(lambda: bool(right.links.uses()) and right.links.uses()[0].bytes == 4000)
        (backward,) = right.links.uses()
        assert (backward.direction, backward.codec, backward.relative_error) == ("backward", "raw", 0.0)


async def test_older_generations_are_dropped_and_newer_ones_kept_until_advance() -> None:
    async with linked_pair() as (left, right):
        left.links.advance(Generation(3))
        late = left.links.send(right.name, message_of(key_of(generation=2)))
        left.links.send(right.name, message_of(key_of(generation=3, microbatch=1)))
        early = left.links.send(right.name, message_of(key_of(generation=3, microbatch=2)))
        await asyncio.wait_for(asyncio.wrap_future(early), 10)
        assert late.cancelled()
        assert right.arrived.empty()
        right.links.advance(Generation(3))
        assert [(await right.receive()).key.microbatch for _ in range(2)] == [1, 2]
        right.links.send(left.name, message_of(key_of(Kind.GRADIENT, generation=3)))
        assert (await left.receive()).key.generation == 3
        right.links.advance(Generation(4))
        stale = left.links.send(right.name, message_of(key_of(Kind.GRADIENT, generation=3)))
        await asyncio.wait_for(asyncio.wrap_future(stale), 10)  # acknowledged, not blamed
        assert right.arrived.empty()
        assert left.faults.empty()


class Flip:
    """Flips a bit of the first byte of every chunk, ``times`` times in all."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self, frame: frames_pb2.Frame) -> Iterable[frames_pb2.Frame]:
        if frame.HasField("chunk") and self.left > 0:
            self.left -= 1
            frame.chunk = bytes([frame.chunk[0] ^ 1]) + frame.chunk[1:]
        yield frame


@pytest.mark.parametrize("codec", ["raw", "bf16", "int8", "int4", "transform"])
async def test_one_flipped_bit_is_recovered_from(codec: str) -> None:
    flip = Flip(1)
    async with linked_pair(tamper=flip, codecs=(codec, "raw")) as (left, right):
        sent = message_of(key_of(), num_elements=300_000)
        done = left.links.send(right.name, sent)
        got = (await right.receive()).tensor("0:0")
        expected = sent.tensor("0:0")
        assert torch.equal(got, decode_message(encode_message(sent, codec)).tensor("0:0"))
        assert relative_error(expected, got) < (0.4 if codec == "transform" else 0.15)
        await asyncio.wait_for(asyncio.wrap_future(done), 10)
        assert flip.left == 0
        assert left.faults.empty()
        assert right.faults.empty()


async def test_a_message_that_overtakes_the_one_with_its_basis_waits_for_it() -> None:
    """The first message carries what the second needs, and has to be sent again."""
    rows = torch.randn(2, 200, 1, generator=torch.Generator().manual_seed(0)) * torch.ones(16)
    async with linked_pair(settings_of(credit={}), tamper=Flip(1), codecs=("transform", "raw")) as (left, right):
        sent = [Message(key=key_of(microbatch=index), tensors=(("0:0", rows[index]),)) for index in range(2)]
        for message in sent:
            left.links.send(right.name, message)
        got = {message.key.microbatch: message.tensor("0:0") for message in [await right.receive(), await right.receive()]}
        assert all(relative_error(rows[index], tensor) < 0.1 for index, tensor in got.items())
        assert sorted(got) == [0, 1]
        assert left.links.uses()[0].relative_error > 0
        assert left.faults.empty()
        assert right.faults.empty()


async def test_both_ends_make_the_same_noise_of_the_seed_of_the_run() -> None:
    async with linked_pair(settings_of(run_seed=7), codecs=("int4", "raw")) as (left, right):
        message = message_of(key_of(), num_elements=1000)
        got = []
        for microbatch in (0, 0, 1):
            sent = Message(key=key_of(microbatch=microbatch), tensors=message.tensors)
            left.links.send(right.name, sent)
            got.append((await right.receive()).tensor("0:0"))
            right.links.consumed(sent.key, left.name)
            coder = MessageCoder(run_seed=7)
            assert torch.equal(got[-1], coder.decode(coder.encode(sent, "int4")).tensor("0:0"))
        assert torch.equal(got[0], got[1])
        assert not torch.equal(got[0], got[2])
        assert 0.05 < left.links.uses()[0].relative_error < 0.15


async def test_gradients_of_shared_parameters_cross_without_loss() -> None:
    async with linked_pair(codecs=("int8", "int8")) as (left, right):
        message = message_of(key_of(Kind.TIED_GRADIENT), num_elements=1000)
        left.links.send(right.name, message)
        assert torch.equal((await right.receive()).tensor("0:0"), message.tensor("0:0"))


async def test_repeated_damage_is_blamed_on_the_sender_and_the_link_goes_on() -> None:
    async with linked_pair(tamper=Flip(3)) as (left, right):
        done = left.links.send(right.name, message_of(key_of()))
        seen_by_receiver, seen_by_sender = await right.fault(), await left.fault()
        for error in (seen_by_receiver, seen_by_sender):
            assert error.corrupt
            assert error.peer == left.name
        with pytest.raises(LinkError, match="damaged at each of 3 attempts"):
            await asyncio.wait_for(asyncio.wrap_future(done), 10)
        left.links.send(right.name, message_of(key_of(Kind.GRADIENT)))
        assert (await right.receive()).key.kind is Kind.GRADIENT


async def test_an_unexpected_message_is_refused_with_the_reason() -> None:
    async with peers("left", "right") as (left, right):
        await asyncio.gather(
            left.configure(neighbour(right, dial=True)),
            right.links.configure(
                generation=Generation(1),
                neighbours=[neighbour(left, dial=False)],
                settings=settings_of(),
                accept=lambda peer, header: f"{peer} has no business with me",
            ),
        )
        done = left.links.send(right.name, message_of(key_of()))
        with pytest.raises(LinkError, match="left has no business with me"):
            await asyncio.wait_for(asyncio.wrap_future(done), 10)
        assert (await left.fault()).peer == right.name


@pytest.mark.parametrize("dialler_goes", [True, False])
async def test_a_neighbour_that_is_gone_is_reported_at_once_and_pending_sends_fail(dialler_goes: bool) -> None:
    async with linked_pair() as (left, right):
        gone, stays = (left, right) if dialler_goes else (right, left)
        for microbatch in range(CREDIT[Kind.ACTIVATION]):
            done = stays.links.send(gone.name, message_of(key_of(microbatch=microbatch)))
            await asyncio.wait_for(asyncio.wrap_future(done), 10)
        waiting = stays.links.send(gone.name, message_of(key_of(microbatch=9)))
        await assert_eventually(lambda: stays.links.num_unacknowledged(gone.name) == 1)
        began = asyncio.get_running_loop().time()
        await gone.server.stop(0) if not dialler_goes else await gone.links.close()
        error = await stays.fault()
        assert error.peer == gone.name
        assert not error.corrupt
        assert asyncio.get_running_loop().time() - began < 2
        with pytest.raises(LinkError):
            await asyncio.wait_for(asyncio.wrap_future(waiting), 10)


async def test_after_a_broken_stream_the_next_generation_finds_the_link_up() -> None:
    broken = asyncio.Event()

    def tamper(frame: frames_pb2.Frame) -> Iterable[frames_pb2.Frame]:
        if frame.HasField("header") and not broken.is_set():
            broken.set()
            raise ConnectionResetError("the network hiccups")
        yield frame

    async with linked_pair(tamper=tamper) as (left, right):
        left.links.send(right.name, message_of(key_of()))
        assert (await left.fault()).peer == right.name
        assert (await right.fault()).peer == left.name
        for peer in (left, right):
            peer.links.advance(Generation(2))
        left.links.send(right.name, message_of(key_of(generation=2)))
        assert (await right.receive()).key.generation == 2


async def test_a_neighbour_that_says_nothing_is_reported_after_the_deadline() -> None:
    async with peers("left") as (left,):
        mute = asyncio.Event()

        class Mute(frames_pb2_grpc.LinksServicer):
            async def Link(self, request_iterator: object, context: Context) -> None:
                hello = frames_pb2.Hello(peer="mute", generation=1, protocol_version=PROTOCOL_VERSION)
                await context.write(frames_pb2.Frame(hello=hello))
                await mute.wait()

        server, address = await start_server(
            [lambda server: frames_pb2_grpc.add_LinksServicer_to_server(Mute(), server)], "127.0.0.1:0"
        )
        other = Neighbour(stage=StageIndex(1), peer=PeerId("mute"), address=address, dial=True)
        await left.configure(other, settings=settings_of(silence_seconds=0.5))
        error = await left.fault()
        assert error.peer == "mute"
        assert "nothing was heard from it for 0." in str(error)
        mute.set()
        await server.stop(0)


async def test_idle_links_are_not_silent() -> None:
    async with linked_pair(settings_of(silence_seconds=0.4)) as (left, right):
        looks: list[float] = []

        def watch() -> bool:
            looks.append(left.links.silent_seconds(right.name))
            return len(looks) > 60

        await assert_eventually(watch)
        assert min(looks[-20:]) < 0.4
        assert left.faults.empty()
        assert right.faults.empty()


async def test_a_proxy_meant_for_the_web_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with linked_pair() as (left, right):
        left.links.send(right.name, message_of(key_of()))
        assert (await right.receive()).key == key_of()


async def test_a_neighbour_far_ahead_is_reported_before_it_fills_the_memory() -> None:
    async with linked_pair() as (left, right):
        for generation in range(2, 8):
            left.links.send(right.name, message_of(key_of(generation=generation)))
        assert "it sends for generation 6 in 1" in str(await right.fault())


async def test_a_neighbour_that_cannot_be_reached_is_one_sentence() -> None:
    async with peers("left", "right") as (left, right):
        await right.server.stop(0)
        with pytest.raises(LinkError, match=rf"link to right: no connection at {right.address} within 0.5 s: .*refused"):
            await left.configure(neighbour(right, dial=True), settings=settings_of(connect_seconds=0.5))


async def test_a_neighbour_that_does_not_dial_is_one_sentence() -> None:
    async with peers("left", "right") as (left, right):
        with pytest.raises(LinkError, match=r"link to right: no connection within 0.5 s: it has not dialled yet"):
            await left.configure(neighbour(right, dial=False), settings=settings_of(connect_seconds=0.5))


async def test_the_dialler_may_be_much_earlier() -> None:
    async with peers("left", "right") as (left, right):
        early = asyncio.create_task(left.configure(neighbour(right, dial=True), generation=7))
        await right.configure(generation=6)
        await right.configure(neighbour(left, dial=False), generation=7)
        await early
        left.links.send(right.name, message_of(key_of(generation=7)))
        assert (await right.receive()).key.generation == 7


async def test_a_stranger_and_an_older_plan_are_turned_away() -> None:
    async with peers("left", "right", "other") as (left, right, other):
        await right.configure(generation=3)
        with pytest.raises(LinkError, match="left with plan 3 is no neighbour of right"):
            await left.configure(neighbour(right, dial=True), generation=3)
        with pytest.raises(LinkError, match="plan 2 is no neighbour of right in plan 3"):
            await left.configure(neighbour(right, dial=True), generation=2)
        with pytest.raises(LinkError, match="is 'right', not the peer that the plan names"):
            await asyncio.gather(
                left.configure(neighbour(other, dial=True, address=right.address), generation=4),
                right.configure(neighbour(left, dial=False), generation=4),
            )


async def test_another_protocol_version_is_refused_with_both_numbers() -> None:
    async with peers("right") as (right,), open_channel(right.address) as channel:
        call = frames_pb2_grpc.LinksStub(channel).Link()
        await call.write(frames_pb2.Frame(hello=frames_pb2.Hello(peer="new", generation=1, protocol_version=99)))
        assert f"protocol {PROTOCOL_VERSION}, new protocol 99: install the same version" in await call.details()


async def test_a_new_plan_replaces_the_links() -> None:
    async with linked_pair() as (left, right):
        await asyncio.gather(
            left.configure(neighbour(right, dial=False, stage=0), generation=2),
            right.configure(neighbour(left, dial=True, stage=1), generation=2),
        )
        left.links.send(right.name, message_of(key_of(generation=2)))
        got = right.arrived.get()
        assert (await asyncio.wait_for(got, 10))[1].key.generation == 2


async def test_a_peer_that_is_no_neighbour_cannot_be_sent_to() -> None:
    async with peers("left") as (left,):
        done = left.links.send(left.name, message_of(key_of()))
        with pytest.raises(LinkError, match="no neighbour in this plan"):
            await asyncio.wait_for(asyncio.wrap_future(done), 10)
