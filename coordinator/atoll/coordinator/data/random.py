"""Samples made up from the seed and their number, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy as np
import torch

from atoll.coordinator.data.feed import Unit
from atoll.protocol.ids import MicrobatchIndex
from atoll.protocol.job_data import RandomData


def _generator(seed: int, what: str, number: int) -> np.random.Generator:
    digest = blake2b(f"{seed}/{what}/{number}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))


class RandomTokens:
    """Token ids drawn evenly; microbatch ``m`` has sequences of ``lengths[m % len(lengths)]``."""

    field = "data.random"
    unit = Unit.TOKENS

    def __init__(self, data: RandomData, sequence_length: int, seed: int) -> None:
        self._data = data
        self._lengths = data.lengths or (sequence_length,)
        self._seed = seed

    @property
    def num_samples(self) -> int:
        return self._data.samples

    @property
    def varying_dimensions(self) -> Mapping[str, tuple[int, ...]]:
        varying = (1,) if len(set(self._lengths)) > 1 else ()
        return {"tokens": varying, "targets": varying}

    def inputs(self, sample_ids: Sequence[int], microbatch: MicrobatchIndex) -> dict[str, torch.Tensor]:
        length = self._lengths[microbatch % len(self._lengths)]
        rows = torch.from_numpy(np.stack([self._row(number)[: length + 1] for number in sample_ids]))
        return {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}

    def _row(self, number: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return _generator(self._seed, "tokens", number).integers(
            self._data.vocabulary, size=max(self._lengths) + 1, dtype=np.int64
        )


class RandomImages:
    """Noise over a faint pattern of the class, so that a model has something to learn."""

    field = "data.random"
    unit = Unit.SAMPLES

    def __init__(self, data: RandomData, image_size: int, seed: int) -> None:
        self._data = data
        self._shape = (data.channels, image_size, image_size)
        self._seed = seed

    @property
    def num_samples(self) -> int:
        return self._data.samples

    @property
    def varying_dimensions(self) -> Mapping[str, tuple[int, ...]]:
        return {"images": (), "labels": ()}

    def inputs(self, sample_ids: Sequence[int], microbatch: MicrobatchIndex) -> dict[str, torch.Tensor]:
        labels = [int(_generator(self._seed, "label", number).integers(self._data.classes)) for number in sample_ids]
        images = np.stack([self._image(number, label) for number, label in zip(sample_ids, labels, strict=True)])
        return {"images": torch.from_numpy(images), "labels": torch.tensor(labels, dtype=torch.int64)}

    def _image(self, number: int, label: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        noise = _generator(self._seed, "image", number).standard_normal(self._shape, dtype=np.float32)
        pattern = _generator(self._seed, "class", label).standard_normal(self._shape, dtype=np.float32)
        return noise + np.float32(0.5) * pattern
