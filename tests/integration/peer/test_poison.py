"""A neighbour that sends what no honest stage would is named, and the step is done again with the numbers of one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from atoll.peer.daemon import Peer
from atoll.peer.stage.plausibility import WARMING_STEPS
from atoll.protocol.ids import PeerId
from atoll.protocol.messages import Kind, Message
from atoll.protocol.v1 import session_pb2 as pb
from support.hand_models import transformer
from support.hand_run import HandRun, RunSettings, assert_equal, in_one_process, samples_of, swarm


def poison(peer: Peer, kind: Kind, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
    """From now on this peer changes what it sends of this kind; returns how to make it honest again."""
    assert peer._engine is not None
    links = peer._engine.links
    honest = links.send

    def send(to: PeerId, message: Message) -> Future[None]:
        if message.key.kind is kind:
            message = replace(message, tensors=tuple((name, change(tensor)) for name, tensor in message.tensors))
        return honest(to, message)

    def cure() -> None:
        links.send = honest  # type: ignore[method-assign]

    links.send = send  # type: ignore[method-assign, assignment]
    return cure


@pytest.mark.parametrize(
    ("kind", "factor", "sender", "words"),
    [
        (Kind.ACTIVATION, 2.0**16, 0, "times as large as in the last 8 steps"),
        (Kind.GRADIENT, 2.0**24, 1, "times as large as in the last 8 steps"),
        (Kind.ACTIVATION, math.nan, 0, "not finite"),
    ],
)
async def test_poison_is_refused_and_its_sender_is_accused(kind: Kind, factor: float, sender: int, words: str) -> None:
    model = transformer()
    steps = samples_of(model)
    alone = in_one_process(model, RunSettings())
    async with swarm("ann", "bob") as peers:
        seats = await peers.seats()
        run = HandRun(peers.coordinator, seats, model.graph, RunSettings())
        await run.load(model.cuts[2:3])
        for number in range(1, WARMING_STEPS + 1):
            samples = steps[number % len(steps)]
            assert await run.step(number, samples) == alone.step(number, samples)
        last = WARMING_STEPS + 1
        cure = poison(peers.peers[seats[sender].peer], kind, lambda tensor: tensor * factor)
        run.start(last, steps[0])
        fault = await seats[1 - sender].hears("fault")
        assert (fault.kind, fault.accused, fault.step) == (pb.Fault.FAULT_OUTLIER, seats[sender].peer, last)
        assert words in fault.reason
        cure()
        await run.void(last)
        assert await run.step(last, steps[0]) == alone.step(last, steps[0])
        assert_equal(await run.state(last), alone.state())
