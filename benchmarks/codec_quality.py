"""What codecs do to the training of a byte-level GPT that is cut into stages.

python benchmarks/codec_quality.py                                     some pairs of codecs, some minutes each
python benchmarks/codec_quality.py --codecs raw:raw transform:transform-1.5 --steps 60 --seeds 0 1

In one process, every tensor that would cross from a stage to the next is encoded and decoded. A pair names the codec of
activations and that of gradients. The text is Python's standard library. For each pair and seed: bits a value each way, bases
included, and relative squared errors, each over the first and the last fifth of the steps, and the loss on text kept aside,
without codecs. Weights, batches and their order are the same for all pairs. Repetitions with other seeds
differ by a few hundredths in loss, so smaller differences between single runs mean nothing. One thread; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sysconfig
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.compression.codec import decode_tensor, encode_tensor, error_and_norm
from atoll.compression.context import CodecContext, Direction
from atoll.compression.registry import codec
from atoll.coordinator.models.gpt import GPT
from atoll.protocol.ids import MicrobatchIndex, StepNumber

PAIRS = (
    "raw:raw",
    "int8:int8",
    "int4:int4",
    "int2:int2",
    "transform:transform",
    "transform:transform-1.5",
    "transform-1:transform-1",
    "transform-1:int8",
    "int8:transform-1",
)
VALIDATION_BATCHES = 8
FIFTHS = ("early", "late")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A step is ``microbatches`` of ``sequences`` sequences; ``layers`` blocks in ``stages`` stages of equal length."""

    steps: int
    width: int
    layers: int
    stages: int
    context: int
    microbatches: int
    sequences: int
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
    """Both ends of the links between two stages."""

    def __init__(self, edge: str, names: dict[Direction, str], seed: int, totals: dict[tuple[Direction, str], Totals]) -> None:
        self._edge = edge
        self._names = names
        self._seed = seed
        self._totals = totals
        self._ends = {way: (codec(name), codec(name)) for way, name in names.items()}
        self.step, self.microbatch, self.fifth = 0, 0, ""

    def cross(self, tensor: Tensor, way: Direction) -> Tensor:
        """What arrives on the other side."""
        context = CodecContext(
            edge=self._edge,
            direction=way,
            run_seed=self._seed,
            step=StepNumber(self.step),
            microbatch=MicrobatchIndex(self.microbatch),
        )
        sender, receiver = self._ends[way]
        encoded = encode_tensor(self._edge, tensor, sender, context)
        decoder = receiver if encoded.codec == sender.name else codec(encoded.codec)
        back = decode_tensor(encoded, decoder, context)
        totals = self._totals.setdefault((way, self.fifth), Totals())
        error, norm = error_and_norm(tensor, back)
        totals.values += tensor.numel()
        totals.num_bytes += memoryview(encoded.data).nbytes
        totals.squared_error += (error / norm) ** 2 if norm else 0.0
        totals.tensors += 1
        return back


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
    """A GPT with boundaries between its stages."""

    def __init__(self, training: Training, pair: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.gpt = GPT(layers=training.layers, width=training.width, heads=4, context=training.context, tied=False)
        self.totals: dict[tuple[Direction, str], Totals] = {}
        self.lossy = True
        forward, _, backward = pair.partition(":")
        names = {Direction.FORWARD: forward, Direction.BACKWARD: backward or forward}
        self.boundaries = []
        for stage in range(1, training.stages):
            boundary = Boundary(f"{stage}:0", names, seed, self.totals)
            self.boundaries.append(boundary)
            self.gpt.blocks[stage * training.layers // training.stages - 1].register_forward_hook(self._hook(boundary))

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
    """One run: ``bits`` and ``errors`` by direction and fifth."""

    pair: str
    seed: int
    validation: float
    seconds: float
    bits: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)


def train(training: Training, pair: str, seed: int, text: Text) -> Outcome:
    """Trains from scratch and evaluates without codecs."""
    started = time.process_time()
    model, generator = CutModel(training, pair, seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.gpt.parameters(), lr=training.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(training.steps):
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
    return Outcome(
        pair=pair,
        seed=seed,
        validation=validate(model, training, text),
        seconds=time.process_time() - started,
        bits={f"{way} {fifth}": model.totals[way, fifth].bits for way in Direction for fifth in FIFTHS},
        errors={f"{way} {fifth}": model.totals[way, fifth].error for way in Direction for fifth in FIFTHS},
    )


@torch.no_grad()
def validate(model: CutModel, training: Training, text: Text) -> float:
    """The mean loss on text kept aside, the same for all."""
    model.lossy = False
    generator, size = torch.Generator().manual_seed(7), training.sequences * training.microbatches
    losses = [float(model.gpt(*text.batch(size, generator, aside=True))) for _ in range(VALIDATION_BATCHES)]
    return sum(losses) / len(losses)


def line(found: Outcome) -> str:
    """One row of the table."""
    bits = "  ".join(f"{found.bits[key]:6.2f}" for key in found.bits)
    errors = "  ".join(f"{found.errors[key]:9.1e}" for key in found.errors)
    return f"{found.pair:32} {found.seed:4}  {bits}   {errors}   {found.validation:8.4f}  {found.seconds:7.0f}"


def main() -> None:
    """Prints the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", nargs="+", default=list(PAIRS), metavar="FORWARD:BACKWARD")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    for name, default in (("steps", 300), ("width", 128), ("layers", 8), ("stages", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("context", 128), ("microbatches", 4), ("sequences", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = vars(parser.parse_args())
    pairs, seeds = arguments.pop("codecs"), arguments.pop("seeds")
    training = Training(**arguments)
    torch.set_num_threads(1)
    text = Text(training.context)
    titles = f"{'bits forward':>14}  {'bits backward':>14}   {'error forward':>20}  {'error backward':>20}  loss, raw  seconds"
    print(f"{'forward:backward':32} seed  {titles}")
    print(f"{'':37}   early    late   early    late       early       late      early       late")
    outcomes = []
    for pair in pairs:
        for seed in seeds:
            outcomes.append(train(training, pair, seed, text))
            print(line(outcomes[-1]), flush=True)
    print(json.dumps({"load": os.getloadavg()[0], "training": asdict(training), "runs": [asdict(one) for one in outcomes]}))


if __name__ == "__main__":
    main()
