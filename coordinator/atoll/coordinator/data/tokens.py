"""Samples of token ids: windows of a long row of them, wherever that row is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll.coordinator.data.arrays import npy_array
from atoll.coordinator.data.feed import Unit
from atoll.coordinator.data.text import ByteStream, Section, whole_files
from atoll.protocol.errors import JobError
from atoll.protocol.ids import MicrobatchIndex
from atoll.protocol.job_model import ModelLimit


class TokenWindows:
    """Sample ``n`` is window ``n`` of a row of ids: ``length`` inputs and the ``length`` ids after each of them.

    Windows are ``length + 1`` ids and do not overlap, so no id of a validation sample is ever trained on.
    """

    unit = Unit.TOKENS

    def __init__(
        self, ids: ByteStream, dtype: np.dtype[Any], length: int, *, field: str, vocabulary: ModelLimit | None
    ) -> None:
        self._ids = ids
        self._dtype = dtype
        self._length = length
        self._field = field
        self._vocabulary = vocabulary
        found = ids.size // dtype.itemsize
        if found <= length:
            raise JobError(
                field, f"it holds {found} tokens, fewer than a sample ({length + 1}); give more or lower data.sequence_length"
            )

    @property
    def field(self) -> str:
        return self._field

    @property
    def num_samples(self) -> int:
        return self._ids.size // self._dtype.itemsize // (self._length + 1)

    @property
    def varying_dimensions(self) -> Mapping[str, tuple[int, ...]]:
        return {"tokens": (), "targets": ()}

    def inputs(self, sample_ids: Sequence[int], microbatch: MicrobatchIndex) -> dict[str, torch.Tensor]:
        size = (self._length + 1) * self._dtype.itemsize
        windows = b"".join(self._ids.read(number * size, size) for number in sample_ids)
        ids = np.frombuffer(windows, dtype=self._dtype).astype(np.int64).reshape(len(sample_ids), self._length + 1)
        self._check(ids)
        rows = torch.from_numpy(ids)
        return {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}

    def _check(self, ids: np.ndarray[Any, Any]) -> None:
        limit = self._vocabulary
        if limit is None or (ids.min() >= 0 and ids.max() < limit.value):
            return
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise JobError(self._field, f"token id {wrong} is not below {limit.setting} {limit.value} of {limit.field}; raise that")


def token_file(path: Path) -> tuple[ByteStream, np.dtype[Any]]:
    """The ids in ``path``: ``.npy`` of one dimension or ``.bin`` of little-endian 16-bit numbers. Raises JobError."""
    if path.suffix == ".bin":
        return whole_files([path]), np.dtype("<u2")
    if path.suffix != ".npy":
        raise JobError(
            "data.tokens", f"{path.name!r} is neither .npy nor .bin; give a .npy of one dimension or a .bin of 16-bit ids"
        )
    array = npy_array(path, "data.tokens")
    if len(array.shape) != 1 or array.dtype.kind not in "iu":
        found = f"{path.name!r} is {array.dtype} of shape {list(array.shape)}"
        raise JobError("data.tokens", f"{found}; token ids are whole numbers in one dimension")
    size = array.shape[0] * array.dtype.itemsize
    return ByteStream([Section(path=path, offset=array.offset, size=size)]), array.dtype
