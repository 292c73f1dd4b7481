"""A byte-level GPT in one process, cut into stages: every tensor that would cross from a stage to the next passes a codec.

Each boundary has both ends of a link, so that codecs meet what they meet in a run: messages, state by edge and direction, and
on either end what went the other way.
"""

from __future__ import annotations

import math
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.compression.codec import error_and_norm
from atoll.compression.context import Direction
from atoll.compression.registry import MessageCoder
from atoll.coordinator.models.gpt import GPT
from atoll.protocol.ids import Generation, MicrobatchIndex, StageIndex, StepNumber
from atoll.protocol.messages import Kind, Message, MessageKey

FIFTHS = ("early", "late")
Observer = Callable[[int, MessageKey, str, Tensor], None]
"""Is shown every tensor that crosses: the boundary's number, the message's key, the edge, the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A step is ``microbatches`` of ``sequences`` sequences; ``layers`` blocks in ``stages`` stages of equal length. The loss
    on text kept aside is taken every ``validate_every`` steps on a quarter of the ``validation`` batches, at the end on all."""

    steps: int
    width: int
    layers: int
    stages: int
    context: int
    microbatches: int
    sequences: int
    validate_every: int = 25
    validation: int = 16
    learning_rate: float = 2e-3

    def rate(self, step: int) -> float:
        """Warmed up over twenty steps, then down along a cosine to a tenth."""
        return self.learning_rate * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / self.steps))


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


class Boundary:
    """Both ends of the link between stages ``number`` and ``number + 1``."""

    def __init__(
        self, number: int, names: dict[Direction, str], seed: int, totals: dict[tuple[Direction, str], Totals]
    ) -> None:
        self.number = number
        self._names = names
        self._totals = totals
        self._left, self._right = MessageCoder(seed), MessageCoder(seed)
        self.step, self.microbatch, self.fifth = 0, 0, ""
        self.coding_seconds = 0.0
        self.observer: Observer | None = None

    def cross(self, tensor: Tensor, way: Direction) -> Tensor:
        """What arrives on the other side."""
        edge, key = f"{self.number}:0", self._key(way)
        if self.observer is not None:
            self.observer(self.number, key, edge, tensor)
        sender, receiver = (self._left, self._right) if way is Direction.FORWARD else (self._right, self._left)
        started = time.thread_time()
        encoded = sender.encode(Message(key=key, tensors=((edge, tensor),)), self._names[way])
        back = receiver.decode(encoded).tensor(edge)
        self.coding_seconds += time.thread_time() - started
        totals = self._totals.setdefault((way, self.fifth), Totals())
        error, norm = error_and_norm(tensor, back)
        totals.values += tensor.numel()
        totals.num_bytes += encoded.num_bytes
        totals.squared_error += (error / norm) ** 2 if norm else 0.0
        totals.tensors += 1
        return back

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
    """A GPT with boundaries between its stages; ``pair`` names the codec of activations and that of gradients."""

    def __init__(self, training: Training, pair: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.gpt = GPT(layers=training.layers, width=training.width, heads=4, context=training.context, tied=False)
        self.totals: dict[tuple[Direction, str], Totals] = {}
        self.lossy = True
        forward, _, backward = pair.partition(":")
        names = {Direction.FORWARD: forward, Direction.BACKWARD: backward or forward}
        self.boundaries = [Boundary(stage, names, seed, self.totals) for stage in range(training.stages - 1)]
        for boundary in self.boundaries:
            last = (boundary.number + 1) * training.layers // training.stages - 1
            self.gpt.blocks[last].register_forward_hook(self._hook(boundary))

    def _hook(self, boundary: Boundary) -> Any:
        def replace(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return Crossing.apply(output, boundary) if self.lossy else output  # type: ignore[no-untyped-call]

        return replace

    def at(self, step: int, microbatch: int, fifth: str) -> None:
        """What crosses from now on belongs to this microbatch."""
        for boundary in self.boundaries:
            boundary.step, boundary.microbatch, boundary.fifth = step, microbatch, fifth


class Text:
    """Bytes of Python's standard library, the last twentieth kept aside."""

    def __init__(self, context: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self._bytes = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
        self._context = context
        self._edge = len(self._bytes) * 19 // 20

    def batch(self, sequences: int, generator: torch.Generator, *, aside: bool = False) -> tuple[Tensor, Tensor]:
        """Tokens and targets."""
        low, high = (self._edge, len(self._bytes)) if aside else (0, self._edge)
        starts = torch.randint(low, high - self._context - 1, (sequences, 1), generator=generator)
        rows = self._bytes[starts + torch.arange(self._context + 1)]
        return rows[:, :-1], rows[:, 1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run: ``curve`` is (steps, validation loss), ``bits`` and ``errors`` go by direction and fifth. Seconds are a
    processor's: of all steps, and the part of them that encoding and decoding took."""

    pair: str
    seed: int
    validation: float
    seconds: float
    coding_seconds: float
    curve: list[tuple[int, float]] = field(default_factory=list)
    bits: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)


def train(training: Training, pair: str, seed: int, text: Text, observer: Observer | None = None) -> Outcome:
    """Trains from scratch and evaluates without codecs. ``observer`` sees every tensor that crosses."""
    model, generator = CutModel(training, pair, seed), torch.Generator().manual_seed(seed)
    for boundary in model.boundaries:
        boundary.observer = observer
    optimizer = torch.optim.AdamW(model.gpt.parameters(), lr=training.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    seconds, curve = 0.0, []
    for step in range(training.steps):
        if step % training.validate_every == 0:
            curve.append((step, validate(model, training, text, max(1, training.validation // 4))))
        started = time.thread_time()
        share = step / training.steps
        fifth = "early" if share < 0.2 else "late" if share >= 0.8 else "between"
        for group in optimizer.param_groups:
            group["lr"] = training.rate(step)
        for microbatch in range(training.microbatches):
            model.at(step, microbatch, fifth)
            (model.gpt(*text.batch(training.sequences, generator)) / training.microbatches).backward()
        nn.utils.clip_grad_norm_(model.gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.thread_time() - started
    curve.append((training.steps, validate(model, training, text, max(1, training.validation // 4))))
    return Outcome(
        pair=pair,
        seed=seed,
        validation=validate(model, training, text, training.validation),
        seconds=seconds,
        coding_seconds=sum(boundary.coding_seconds for boundary in model.boundaries),
        curve=curve,
        bits={f"{way} {fifth}": model.totals[way, fifth].bits for way in Direction for fifth in FIFTHS},
        errors={f"{way} {fifth}": model.totals[way, fifth].error for way in Direction for fifth in FIFTHS},
    )


@torch.no_grad()
def validate(model: CutModel, training: Training, text: Text, batches: int) -> float:
    """The mean loss without codecs on text kept aside, the same for all."""
    model.lossy = False
    generator, size = torch.Generator().manual_seed(7), training.sequences * training.microbatches
    losses = [float(model.gpt(*text.batch(size, generator, aside=True))) for _ in range(batches)]
    model.lossy = True
    return sum(losses) / len(losses)
