"""A model in one process, cut into stages: every tensor that would cross from a stage to the next passes a codec.

Each boundary has both ends of a link, so that codecs meet what they meet in a run: messages, state by edge and direction, and
on either end what went the other way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atoll.compression.codec import error_and_norm
from atoll.compression.context import Direction
from atoll.compression.registry import MessageCoder
from atoll.protocol.ids import Generation, MicrobatchIndex, StageIndex, StepNumber
from atoll.protocol.messages import Kind, Message, MessageKey
from auto_links import AutoLinks
from cut_subjects import blocks_of

Observer = Callable[[int, MessageKey, str, Tensor], None]
"""Is shown every tensor that crosses: the boundary's number, the message's key, the edge, the tensor."""


@dataclass(slots=True)
class Totals:
    """Of the tensors that crossed one way in some steps."""

    values: int = 0
    num_bytes: int = 0
    squared_error: float = 0.0
    tensors: int = 0

    @property
    def bits(self) -> float:
        return 8 * self.num_bytes / max(1, self.values)

    @property
    def error(self) -> float:
        """The mean relative squared error."""
        return self.squared_error / max(1, self.tensors)


@dataclass(slots=True)
class Traffic:
    """What crossed one way in a step."""

    num_bytes: int = 0
    coding_seconds: float = 0.0


class Boundary:
    """Both ends of the link between stages ``number`` and ``number + 1``. ``codecs`` are names by direction, or a policy that
    chooses them."""

    def __init__(
        self,
        number: int,
        codecs: Mapping[Direction, str] | AutoLinks,
        seed: int,
        totals: dict[tuple[Direction, str], Totals],
    ) -> None:
        self.number = number
        self._codecs = codecs
        self._totals = totals
        self._left, self._right = MessageCoder(seed), MessageCoder(seed)
        self.step, self.microbatch, self.fifth = 0, 0, ""
        self.traffic = {way: Traffic() for way in Direction}
        self.observer: Observer | None = None

    def at(self, step: int, microbatch: int, fifth: str) -> None:
        """What crosses from now on belongs to this microbatch."""
        if step != self.step:
            self.traffic = {way: Traffic() for way in Direction}
        self.step, self.microbatch, self.fifth = step, microbatch, fifth

    def cross(self, tensor: Tensor, way: Direction) -> Tensor:
        """What arrives on the other side."""
        edge, key = f"{self.number}:0", self._key(way)
        if self.observer is not None:
            self.observer(self.number, key, edge, tensor)
        sender, receiver = (self._left, self._right) if way is Direction.FORWARD else (self._right, self._left)
        message = Message(key=key, tensors=((edge, tensor),))
        name = self._codecs.codec(key.source, key.target) if isinstance(self._codecs, AutoLinks) else self._codecs[way]
        started = time.thread_time()
        encoded = sender.encode(message, name)
        coding = time.thread_time() - started
        if isinstance(self._codecs, AutoLinks):
            self._codecs.sent(message, sender, encoded, name)
        started = time.thread_time()
        decoded = receiver.decode(encoded)
        coding += time.thread_time() - started
        if isinstance(self._codecs, AutoLinks):
            self._codecs.received(decoded)
        self.traffic[way].coding_seconds += coding
        self.traffic[way].num_bytes += encoded.num_bytes
        self._count(tensor, decoded.tensor(edge), encoded.num_bytes, self._totals.setdefault((way, self.fifth), Totals()))
        return decoded.tensor(edge)

    @staticmethod
    def _count(tensor: Tensor, back: Tensor, num_bytes: int, totals: Totals) -> None:
        error, norm = error_and_norm(tensor, back)
        totals.values += tensor.numel()
        totals.num_bytes += num_bytes
        totals.squared_error += (error / norm) ** 2 if norm else 0.0
        totals.tensors += 1

    def _key(self, way: Direction) -> MessageKey:
        ends = StageIndex(self.number), StageIndex(self.number + 1)
        forward = way is Direction.FORWARD
        return MessageKey(
            generation=Generation(1),
            step=StepNumber(self.step),
            microbatch=MicrobatchIndex(self.microbatch),
            kind=Kind.ACTIVATION if forward else Kind.GRADIENT,
            source=ends[0] if forward else ends[1],
            target=ends[1] if forward else ends[0],
        )


class Crossing(torch.autograd.Function):
    """The identity, but for what the codecs lose each way."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, boundary: Boundary) -> Tensor:
        ctx.boundary = boundary
        return boundary.cross(hidden, Direction.FORWARD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.boundary.cross(gradients[0], Direction.BACKWARD), None


class CutModel:
    """A network with boundaries between ``stages`` runs of its blocks, as equal in number as can be."""

    def __init__(self, network: nn.Module, stages: int, codecs: Mapping[Direction, str] | AutoLinks, seed: int) -> None:
        self.network = network
        self.totals: dict[tuple[Direction, str], Totals] = {}
        self.lossy = True
        self.boundaries = [Boundary(stage, codecs, seed, self.totals) for stage in range(stages - 1)]
        for boundary, block in zip(self.boundaries, last_blocks(network, stages), strict=True):
            block.register_forward_hook(self._hook(boundary))

    def _hook(self, boundary: Boundary) -> Any:
        def replace(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return Crossing.apply(output, boundary) if self.lossy else output  # type: ignore[no-untyped-call]

        return replace

    def at(self, step: int, microbatch: int, fifth: str) -> None:
        """What crosses from now on belongs to this microbatch."""
        for boundary in self.boundaries:
            boundary.at(step, microbatch, fifth)


def last_blocks(network: nn.Module, stages: int) -> list[nn.Module]:
    """Of each stage but the last the block whose output crosses."""
    blocks = blocks_of(network)
    return [blocks[(stage + 1) * len(blocks) // stages - 1] for stage in range(stages - 1)]
