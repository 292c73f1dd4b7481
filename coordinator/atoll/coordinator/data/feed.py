"""The batches of a run: a function of the seed and the step, whatever the placement.

Theory of operation. A :class:`Samples` gives any sample by its number. A fixed permutation (the same for every seed) sets the
last ones aside for validation; the others are the training samples. Each epoch goes through all training samples once, in an
order that the seed and the epoch decide. Batch ``step`` takes positions ``(step - 1) * batch`` and following of the endless
row of epochs, so a batch may end one epoch and begin the next, and nothing is remembered between calls: a replayed step, or a
run taken up again elsewhere, sees the same samples.

The feed holds no samples. Permutations are functions (``order``), and a sample is read when its batch is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Protocol, overload

import torch

from atoll.coordinator.data.order import Permutation
from atoll.protocol.errors import JobError
from atoll.protocol.ids import MicrobatchIndex, StepNumber

IGNORED_TARGET = -100  # torch's cross-entropy skips such targets


class Unit(StrEnum):
    """What the samples are counted in, for people and for weights."""

    TOKENS = "tokens"
    SAMPLES = "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Samples that flow through the stages together.

    ``weight`` is what its loss counts: target tokens, or rows. ``num_tokens`` is what speed is measured in: the same number.
    """

    index: MicrobatchIndex
    inputs: Mapping[str, torch.Tensor]
    weight: int
    sample_ids: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one optimizer step consumes."""

    step: StepNumber
    microbatches: tuple[Microbatch, ...]

    @property
    def total_weight(self) -> int:
        return sum(microbatch.weight for microbatch in self.microbatches)

    @property
    def num_tokens(self) -> int:
        return sum(microbatch.num_tokens for microbatch in self.microbatches)

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """All sample ids, in the order of the microbatches."""
        return tuple(itertools.chain.from_iterable(microbatch.sample_ids for microbatch in self.microbatches))

    @property
    def samples_hash(self) -> str:
        """A short hash of the sample ids and their order."""
        return blake2b(",".join(map(str, self.sample_ids)).encode(), digest_size=8).hexdigest()


class Samples(Protocol):
    """Where samples come from; each is a function of its number."""

    @property
    def field(self) -> str:
        """The job's field to name in errors, for example ``data.text``."""
        ...

    @property
    def unit(self) -> Unit: ...

    @property
    def num_samples(self) -> int: ...

    @property
    def varying_dimensions(self) -> Mapping[str, tuple[int, ...]]:
        """For each input, the dimensions besides the first whose size differs between microbatches."""
        ...

    def inputs(self, sample_ids: Sequence[int], microbatch: MicrobatchIndex) -> dict[str, torch.Tensor]:
        """The samples stacked, under the names of the model's forward."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSettings:
    """``validation`` is the fraction of the samples set aside; at most ``evaluation_batches`` batches of them are used."""

    seed: int
    batch: int
    microbatch: int
    validation: float
    evaluation_batches: int


class Feed:
    """Batches of ``samples``. Holds no state that changes, so it may be used from any thread."""

    def __init__(self, samples: Samples, settings: FeedSettings) -> None:
        self._samples = samples
        self._settings = settings
        self._num_validation = round(samples.num_samples * settings.validation)
        self._num_training = samples.num_samples - self._num_validation
        self._split = Permutation(samples.num_samples, "validation split")
        self._check_sizes()

    def with_microbatch(self, num_samples: int) -> Feed:
        """The same samples in the same order, in microbatches of another size. Raises JobError."""
        return Feed(self._samples, replace(self._settings, microbatch=num_samples))

    @property
    def microbatch(self) -> int:
        """Samples in a microbatch."""
        return self._settings.microbatch

    @property
    def unit(self) -> Unit:
        return self._samples.unit

    @property
    def num_training_samples(self) -> int:
        """Samples in an epoch."""
        return self._num_training

    @property
    def dynamic_dimensions(self) -> dict[str, tuple[int, ...]]:
        """For each input, the dimensions that a trace must not fix.

        The first one is among them unless microbatches are single samples, which a trace cannot tell from a fixed 1.
        """
        batch = (0,) if self._settings.microbatch > 1 else ()
        return {name: (*batch, *others) for name, others in self._samples.varying_dimensions.items()}

    def example_inputs(self) -> dict[str, torch.Tensor]:
        """Inputs of the first training microbatch, for tracing."""
        return dict(self._microbatch(StepNumber(1), MicrobatchIndex(0)).inputs)

    def batch(self, step: StepNumber) -> Batch:
        """What step ``step`` (from 1) consumes."""
        num_microbatches = self._settings.batch // self._settings.microbatch
        microbatches = tuple(self._microbatch(step, MicrobatchIndex(index)) for index in range(num_microbatches))
        return Batch(step=step, microbatches=microbatches)

    def sample_ids(self, step: StepNumber) -> tuple[int, ...]:
        """The samples of step ``step`` without reading them."""
        return self._training_ids((step - 1) * self._settings.batch, self._settings.batch)

    def validation(self) -> Sequence[Microbatch]:
        """The validation microbatches, always the same; each is read when it is looked at. Empty without validation."""
        size = self._settings.microbatch
        samples = min(self._num_validation, self._settings.evaluation_batches * self._settings.batch)
        return _ValidationMicrobatches(self, samples // size)

    def validation_microbatch(self, index: MicrobatchIndex) -> Microbatch:
        """Number ``index`` of :meth:`validation`; all are full, so that no other shapes occur than in training."""
        size = self._settings.microbatch
        first = self._num_training + index * size
        return self._read(index, tuple(self._split[position] for position in range(first, first + size)))

    def _microbatch(self, step: StepNumber, index: MicrobatchIndex) -> Microbatch:
        size = self._settings.microbatch
        return self._read(index, self._training_ids((step - 1) * self._settings.batch + index * size, size))

    def _training_ids(self, first: int, count: int) -> tuple[int, ...]:
        found: list[int] = []
        for epoch, positions in itertools.groupby(range(first, first + count), lambda one: one // self._num_training):
            order = Permutation(self._num_training, f"order/{self._settings.seed}/{epoch}")
            found.extend(self._split[order[position % self._num_training]] for position in positions)
        return tuple(found)

    def _read(self, index: MicrobatchIndex, sample_ids: tuple[int, ...]) -> Microbatch:
        inputs = self._samples.inputs(sample_ids, index)
        weight = len(sample_ids)
        if self.unit is Unit.TOKENS:
            weight = int((inputs["targets"] != IGNORED_TARGET).sum())
        return Microbatch(index=index, inputs=inputs, weight=weight, sample_ids=sample_ids, num_tokens=weight)

    def _check_sizes(self) -> None:
        settings, field = self._settings, self._samples.field
        if self._num_training < settings.batch:
            kept = f" ({self._num_validation} more are kept for validation)" if self._num_validation else ""
            found = f"{settings.batch} is more than the {self._num_training} training samples of {field}{kept}"
            raise JobError("training.batch", f"{found}; lower it or give more data")
        if settings.validation and self._num_validation < settings.microbatch:
            found = f"{settings.validation} of the {self._samples.num_samples} samples of {field} is {self._num_validation}"
            raise JobError("data.validation", f"{found}, less than a microbatch ({settings.microbatch}); raise it")


class _ValidationMicrobatches(Sequence[Microbatch]):
    """Looks like a tuple, holds nothing."""

    def __init__(self, feed: Feed, count: int) -> None:
        self._feed = feed
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Microbatch: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Microbatch]: ...

    def __getitem__(self, index: int | slice) -> Microbatch | Sequence[Microbatch]:
        if isinstance(index, slice):
            return tuple(self[one] for one in range(*index.indices(self._count)))
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return self._feed.validation_microbatch(MicrobatchIndex(index % self._count))

    def __iter__(self) -> Iterator[Microbatch]:
        return (self[index] for index in range(self._count))
