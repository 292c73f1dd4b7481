"""A training of a cut model from scratch, evaluated without codecs.

A pair ``FORWARD:BACKWARD`` names the codecs; ``auto@8`` has those that a run with ``compression: auto`` would choose at 8 Mbps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from atoll.compression.context import Direction
from auto_links import AutoLinks, Stages, told
from cut_model import CutModel, Observer, last_blocks
from cut_subjects import Data, make_network
from slow_links import Crossed, step_seconds

FIFTHS = ("early", "late")
AUTO = "auto@"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A step is ``microbatches`` of ``sequences`` sequences (or images), whose length (or side) is ``context``; the blocks of
    the model are in ``stages`` stages of equal length. The loss on what is kept aside is taken every ``validate_every`` steps
    on a quarter of the ``validation`` batches, at the end on all. Of a ResNet ``layers`` is the depth, ``width`` is unused."""

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
    model: str = "gpt"

    def rate(self, step: int) -> float:
        """Warmed up over twenty steps, then down along a cosine to a tenth."""
        return self.learning_rate * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / self.steps))

    def network(self) -> nn.Module:
        """A new one, from torch's random numbers."""
        return make_network(self.model, layers=self.layers, width=self.width, size=self.context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run: ``curve`` is (steps, validation loss), ``bits`` and ``errors`` go by direction and fifth. Seconds are a
    processor's: of all steps, and the part of them that encoding and decoding took. Of an ``auto`` run, ``elapsed`` are the
    seconds that it would have taken over its links up to each point of the curve, ``choices`` say what changed when and why."""

    pair: str
    seed: int
    validation: float
    seconds: float
    coding_seconds: float
    curve: list[tuple[int, float]] = field(default_factory=list)
    bits: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    elapsed: list[float] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)


class Run:
    """One training. ``observer`` sees every tensor that crosses."""

    def __init__(self, training: Training, pair: str, seed: int, data: Data, observer: Observer | None = None) -> None:
        self._training = training
        self._pair = pair
        self._seed = seed
        self._data = data
        self._bits_per_second = 1e6 * float(pair.removeprefix(AUTO)) if pair.startswith(AUTO) else 0.0
        self._auto = AutoLinks(_stages(training, data), self._bits_per_second) if self._bits_per_second else None
        torch.manual_seed(seed)
        self._model = CutModel(training.network(), training.stages, self._auto or _named(pair), seed)
        for boundary in self._model.boundaries:
            boundary.observer = observer
        self._generator = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.AdamW(
            self._model.network.parameters(), lr=training.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )
        self._seconds = self._coding_seconds = self._clock = 0.0
        self._curve: list[tuple[int, float]] = []
        self._elapsed: list[float] = []

    def train(self) -> Outcome:
        """From the first step to the last."""
        training, totals = self._training, self._model.totals
        for step in range(training.steps):
            if step % training.validate_every == 0:
                self._note(step)
            self._step(step)
        self._note(training.steps)
        return Outcome(
            pair=self._pair,
            seed=self._seed,
            validation=self._validate(training.validation),
            seconds=self._seconds,
            coding_seconds=self._coding_seconds,
            curve=self._curve,
            bits={f"{way} {fifth}": totals[way, fifth].bits for way in Direction for fifth in FIFTHS},
            errors={f"{way} {fifth}": totals[way, fifth].error for way in Direction for fifth in FIFTHS},
            elapsed=self._elapsed if self._auto else [],
            choices=told(self._auto.changes) if self._auto else [],
        )

    def _step(self, step: int) -> None:
        training, model = self._training, self._model
        guarded = self._auto.seconds if self._auto else 0.0
        started = time.thread_time()
        share = step / training.steps
        fifth = "early" if share < 0.2 else "late" if share >= 0.8 else "between"
        for group in self._optimizer.param_groups:
            group["lr"] = training.rate(step)
        total = 0.0
        for microbatch in range(training.microbatches):
            model.at(step, microbatch, fifth)
            loss: Tensor = model.network(*self._data.batch(training.sequences, self._generator)) / training.microbatches
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(model.network.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        seconds = time.thread_time() - started - ((self._auto.seconds if self._auto else 0.0) - guarded)
        coding = sum(traffic.coding_seconds for boundary in model.boundaries for traffic in boundary.traffic.values())
        self._seconds += seconds
        self._coding_seconds += coding
        if self._auto is not None:
            self._commit(self._auto, step, total, (seconds - coding) / training.stages)

    def _commit(self, auto: AutoLinks, step: int, loss: float, stage_seconds: float) -> None:
        training = self._training
        count = training.microbatches
        crossed = [
            {
                way: Crossed(num_bytes=traffic.num_bytes / count, coding_seconds=traffic.coding_seconds / count)
                for way, traffic in boundary.traffic.items()
            }
            for boundary in self._model.boundaries
        ]
        taken = step_seconds(
            stage_seconds=stage_seconds / count,
            microbatches=count,
            links=[(each[Direction.FORWARD], each[Direction.BACKWARD]) for each in crossed],
            bits_per_second=self._bits_per_second,
        )
        self._clock += taken
        samples = training.sequences * count
        num_tokens = samples if training.model == "resnet" else samples * training.context
        auto.committed(step + 1, loss=loss, num_tokens=num_tokens, stage_seconds=stage_seconds, step_seconds=taken)

    def _note(self, step: int) -> None:
        self._curve.append((step, self._validate(max(1, self._training.validation // 4))))
        self._elapsed.append(self._clock)

    @torch.no_grad()
    def _validate(self, batches: int) -> float:
        """The mean loss without codecs on what is kept aside, the same for all."""
        model, training = self._model, self._training
        model.lossy = False
        model.network.eval()
        generator, size = torch.Generator().manual_seed(7), training.sequences * training.microbatches
        losses = [float(model.network(*self._data.batch(size, generator, aside=True))) for _ in range(batches)]
        model.network.train()
        model.lossy = True
        return sum(losses) / len(losses)


def train(training: Training, pair: str, seed: int, data: Data, observer: Observer | None = None) -> Outcome:
    """Trains from scratch and evaluates without codecs. ``observer`` sees every tensor that crosses."""
    return Run(training, pair, seed, data, observer).train()


def _named(pair: str) -> Mapping[Direction, str]:
    forward, _, backward = pair.partition(":")
    return {Direction.FORWARD: forward, Direction.BACKWARD: backward or forward}


def _stages(training: Training, data: Data) -> Stages:
    """What a stage computes for a microbatch and what crosses, by a trial on a network that is not trained."""
    shapes: list[tuple[int, ...]] = []
    with torch.random.fork_rng(devices=[]):
        network = training.network()
    handles = [
        block.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
        for block in last_blocks(network, training.stages)
    ]
    generator = torch.Generator().manual_seed(0)
    seconds = math.inf
    for _ in range(3):
        shapes.clear()
        started = time.thread_time()
        network(*data.batch(training.sequences, generator)).backward()
        seconds = min(seconds, time.thread_time() - started)
    for handle in handles:
        handle.remove()
    return Stages(seconds=seconds / training.stages, microbatches=training.microbatches, shapes=shapes)
