"""Averagers over links in one process, without the links."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

from atoll.peer.averaging.averager import Member, Round
from atoll.peer.averaging.over_links import LinksAverager
from atoll.protocol.ids import Generation, PeerId, StageIndex
from atoll.protocol.messages import Message

STAGE = StageIndex(1)
NAMES = tuple(map(PeerId, "abcd"))


class Wires:
    """Carries messages between the averagers of one process, in an order of its own; nothing for who is ``dead``."""

    def __init__(self, names: Sequence[PeerId]) -> None:
        self.dead: set[PeerId] = set()
        self.averagers = {name: LinksAverager(STAGE, Generation(3), self._sender(name), self._silent_seconds) for name in names}

    def _silent_seconds(self, peer: PeerId) -> float:
        return 100.0 if peer in self.dead else 0.0

    def _sender(self, own: PeerId) -> Sender:
        return Sender(self, own)

    def carry(self, source: PeerId, target: PeerId, message: Message) -> None:
        if not self.dead & {source, target}:
            loop = asyncio.get_running_loop()
            delay = 0.001 * ((ord(source) + 3 * ord(target) + message.key.microbatch) % 5)
            loop.call_later(delay, self.averagers[target].arrived, source, message)


class Sender:
    def __init__(self, wires: Wires, own: PeerId) -> None:
        self._wires = wires
        self._own = own

    def __call__(self, peer: PeerId, message: Message) -> Future[None]:
        self._wires.carry(self._own, peer, message)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def round_of(names: Sequence[PeerId], own: int, seconds: float = 20.0) -> Round:
    return Round(key="3.7", members=tuple(Member(peer=name) for name in names), own=own, deadline_seconds=seconds, step=7)
