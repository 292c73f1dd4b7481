"""Replicas sum their gradients over the links that they have anyway: a reduce-scatter, then an all-gather. Lossless.

The values are cut into blocks, and each block into as many parts as there are members. Every member sends each other one the
part that this one owns (PART); the owner adds up what it got and what it has itself, in the group's order, and sends the sum to
all (TOTAL). So each value is added by one member alone, and all take the same bits. It needs nothing but our own streams, and
is what other ways to do a round must agree with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import pairwise

import torch
from torch import Tensor

from atoll.peer.averaging.averager import Round, weighted_sum
from atoll.peer.stage.plausibility import Plausibility
from atoll.protocol.errors import RoundFailed
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.ids import Generation, MicrobatchIndex, PeerId, StageIndex, StepNumber
from atoll.protocol.messages import Kind, Message, MessageHeader, MessageKey

TENSOR = "values"
MOST_BYTES = 1024
"""Of what a member says to the others."""
BLOCK_VALUES = 2**20
"""4 MiB: small beside a model, and much more than what a message costs beside its bytes."""
LOOK_SECONDS = 1.0
"""Whether anybody is silent is looked at this often."""
MOST_BLOCKS = 3
"""Under way at a time, so that one block's sums are on their way while the next one's parts are; it bounds the memory, too."""
MOST_WAITING = 16
"""Messages of one member that nobody here waits for yet. One that is ahead has sent the parts and the sums of as many blocks as
are under way, for each needs a word from here, and maybe the parts of the next step and two words."""


class LinksAverager:
    """The rounds of one stage under one plan, a round a step and generation. ``send`` hands a message to a link and does not
    wait; ``silent_seconds`` is how long nothing was heard from a peer: one that computes longer than others is waited for, up
    to the step's own deadline, which is the coordinator's."""

    def __init__(
        self,
        stage: StageIndex,
        generation: Generation,
        send: Callable[[PeerId, Message], Future[None]],
        silent_seconds: Callable[[PeerId], float],
        chaos: FaultPoints | None = None,
    ) -> None:
        self._stage = stage
        self._generation = generation
        self._send = send
        self._silent_seconds = silent_seconds
        self._chaos = chaos or FaultPoints()
        self._slots: dict[tuple[PeerId, MessageKey], asyncio.Future[Tensor]] = {}
        self._numbered: tuple[tuple[int, int], int] = (0, 0), 0
        self._plausibility = Plausibility()

    def refusal(self, sender: PeerId, header: MessageHeader) -> str | None:
        """Why a message of another replica with this header is not expected; None when it is."""
        if (header.key.source, header.key.target) != (self._stage, self._stage):
            return f"it is between stages {header.key.source} and {header.key.target}, this is stage {self._stage}"
        shapes = [(tensor.name, tensor.dtype, len(tensor.shape)) for tensor in header.tensors]
        if header.key.kind is Kind.AGREEMENT:
            brief = shapes == [(TENSOR, torch.uint8, 1)] and header.tensors[0].shape[0] <= MOST_BYTES
            return None if brief else f"what replicas say to each other is at most {MOST_BYTES} bytes"
        if shapes != [(TENSOR, torch.float32, 1)] or header.tensors[0].shape[0] > BLOCK_VALUES:
            return "a part of a sum is one row of at most a million fp32 values"
        waiting = sum(peer == sender and slot.done() for (peer, _), slot in self._slots.items())
        if waiting >= MOST_WAITING:
            return f"{waiting} messages of {sender} wait here that nobody has asked for"
        return None

    def arrived(self, sender: PeerId, message: Message) -> None:
        """A message of another replica, maybe before the round has begun here."""
        slot = self._slot(sender, message.key)
        if not slot.done():
            slot.set_result(message.tensors[0][1])

    def advance(self, generation: Generation) -> None:
        """What is of older generations is of no use any more."""
        self._generation = generation
        self._plausibility.dropped()
        for place in [place for place in self._slots if place[1].generation < generation]:
            self._slots.pop(place).cancel()

    def committed(self) -> None:
        """The step whose gradients were summed has happened."""
        self._plausibility.committed()

    @property
    def address(self) -> str:
        return ""

    async def agree(self, round: Round, word: bytes) -> list[bytes]:
        """What each member says, in the group's order; all call this, and :meth:`average`, in the same order within a step.
        Raises RoundFailed when one is silent."""
        assert 0 < len(word) <= MOST_BYTES, f"{len(word)} bytes"
        members, own = round.members, round.own
        key = self._key(self._generation, round.step, Kind.AGREEMENT, self._numbers(round.step, 1))
        others = [index for index in range(len(members)) if index != own]
        for index in others:
            self._tell(members[index].peer, key, torch.frombuffer(bytearray(word), dtype=torch.uint8))
        found = await self._from(round, key, others, None)
        return [word if index == own else found[index].numpy().tobytes() for index in range(len(members))]

    async def close(self) -> None:
        """Nobody is waited for any more."""
        for slot in self._slots.values():
            slot.cancel()
        self._slots.clear()

    async def average(self, round: Round, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See :class:`~atoll.peer.averaging.averager.Averager`; what loses bits is not used here, whatever codec is named."""
        flat = [tensor.detach().reshape(-1).to(torch.float32) for tensor in tensors]
        results = [torch.empty_like(values) for values in flat]
        total = sum(values.numel() for values in flat)
        generation = self._generation
        gate = asyncio.Semaphore(MOST_BLOCKS)
        first = self._numbers(round.step, -(-total // BLOCK_VALUES))

        async def one(number: int, start: int) -> None:
            async with gate:
                end = min(start + BLOCK_VALUES, total)
                summed = await self._block(round, generation, first + number, torch.cat([*_slices(flat, start, end)]))
                for target, source in zip(_slices(results, start, end), _pieces(summed, results, start), strict=True):
                    target.copy_(source)

        blocks = [asyncio.create_task(one(number, start)) for number, start in enumerate(range(0, total, BLOCK_VALUES))]
        try:
            await asyncio.gather(*blocks)
        finally:
            for block in blocks:
                block.cancel()
        return [values.to(tensor.dtype).view(tensor.shape) for values, tensor in zip(results, tensors, strict=True)]

    async def _block(self, round: Round, generation: Generation, number: int, values: Tensor) -> Tensor:
        """The sum of everybody's ``values`` of one block."""
        members, own = round.members, round.own
        part_key = self._key(generation, round.step, Kind.PART, number)
        total_key = self._key(generation, round.step, Kind.TOTAL, number)
        bounds = [values.numel() * index // len(members) for index in range(len(members) + 1)]
        parts = [values[first:end] for first, end in pairwise(bounds)]
        others = [index for index in range(len(members)) if index != own]
        for index in others:
            self._tell(members[index].peer, part_key, parts[index])
        if parts[own].numel():
            received = await self._from(round, part_key, others, parts[own].numel())
            self._chaos.reached("averaging", step=round.step)
            terms = [parts[own] if index == own else received[index] for index in range(len(members))]
            parts[own] = weighted_sum(terms, [member.weight for member in members], round.divisor)
            for index in others:
                self._tell(members[index].peer, total_key, parts[own])
        for index in others:
            if parts[index].numel():
                found = await self._from(round, total_key, [index], parts[index].numel())
                parts[index] = found[index]
        return torch.cat(parts)

    def _tell(self, peer: PeerId, key: MessageKey, values: Tensor) -> None:
        if values.numel():
            self._send(peer, Message(key=key, tensors=((TENSOR, values),)))

    def _numbers(self, step: int, count: int) -> int:
        """The first of ``count`` numbers that no message of this step and generation had before, on any member."""
        of, used = self._numbered
        first = used if of == (self._generation, step) else 0
        self._numbered = (self._generation, step), first + count
        return first

    async def _from(self, round: Round, key: MessageKey, members: Sequence[int], length: int | None) -> dict[int, Tensor]:
        """What these members sent, of a ``length`` that is known; raises RoundFailed when one of them is silent, Implausible
        for what no honest member sends."""
        slots = {index: self._slot(round.members[index].peer, key) for index in members}
        while not all(slot.done() for slot in slots.values()):
            await asyncio.wait(slots.values(), timeout=min(LOOK_SECONDS, round.deadline_seconds))
            missing = [round.members[index].peer for index, slot in slots.items() if not slot.done()]
            silent = tuple(peer for peer in missing if self._silent_seconds(peer) >= round.deadline_seconds)
            if silent:
                raise RoundFailed(f"{', '.join(silent)} took no part in summing gradients", silent)
        if any(slot.cancelled() for slot in slots.values()):
            raise RoundFailed("the plan for which gradients were summed is over")
        for index in slots:
            self._slots.pop((round.members[index].peer, key))
        found = {index: slot.result() for index, slot in slots.items()}
        sizes = {index: values.numel() for index, values in found.items() if length is not None}
        wrong = tuple(round.members[index].peer for index, size in sizes.items() if size != length)
        if wrong:
            raise RoundFailed(f"{', '.join(wrong)} sent another number of gradients", wrong)
        if key.kind is not Kind.AGREEMENT:
            for index, values in found.items():
                self._plausibility.check_weights(key.kind, round.members[index].peer, "of a sum of gradients", values)
        return found

    def _slot(self, peer: PeerId, key: MessageKey) -> asyncio.Future[Tensor]:
        place = peer, key
        if place not in self._slots:
            slot: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()
            if key.generation < self._generation:
                slot.cancel()
                return slot
            self._slots[place] = slot
        return self._slots[place]

    def _key(self, generation: Generation, step: int, kind: Kind, number: int) -> MessageKey:
        return MessageKey(
            generation=generation,
            step=StepNumber(step),
            microbatch=MicrobatchIndex(number),
            kind=kind,
            source=self._stage,
            target=self._stage,
        )


def _slices(flat: Sequence[Tensor], start: int, end: int) -> Iterator[Tensor]:
    """Views of what lies between these places when all values stand in one row."""
    place = 0
    for values in flat:
        first, last = max(start - place, 0), min(end - place, values.numel())
        if first < last:
            yield values[first:last]
        place += values.numel()


def _pieces(block: Tensor, results: Sequence[Tensor], start: int) -> tuple[Tensor, ...]:
    """A block's values, cut where the tensors end."""
    lengths = [part.numel() for part in _slices(results, start, start + block.numel())]
    return torch.split(block, lengths)
