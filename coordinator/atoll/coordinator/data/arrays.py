"""Samples from NumPy files: row ``n`` of each array. Rows are read where they lie; nothing is loaded, nothing is unpickled."""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from atoll.coordinator.data.feed import IGNORED_TARGET, Unit
from atoll.coordinator.data.text import ByteStream, Section
from atoll.protocol.errors import JobError
from atoll.protocol.ids import MicrobatchIndex
from atoll.protocol.job_model import ModelLimit

_LOCAL_HEADER_BYTES = 30  # of a member in a zip file; the lengths of name and extra field are its last four bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NpyArray:
    """An array in a file: where its numbers begin and what they are."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def stream(self) -> ByteStream:
        return ByteStream([Section(path=self.path, offset=self.offset, size=self.shape[0] * self.row_bytes)])


def npy_array(path: Path, field: str) -> NpyArray:
    """The array in the ``.npy`` file ``path``. Raises JobError."""
    with open(path, "rb") as file:
        return _array_at(file, path, field)


def npz_arrays(path: Path, field: str) -> dict[str, NpyArray]:
    """The arrays in the ``.npz`` file ``path`` by name. Raises JobError; compressed ones cannot be read by row."""
    try:
        with zipfile.ZipFile(path) as members, open(path, "rb") as file:
            return {_name(member): _member(member, file, path, field) for member in members.infolist()}
    except zipfile.BadZipFile as error:
        raise JobError(field, f"{path.name!r} is not an .npz file; make one with numpy.savez") from error


def _name(member: zipfile.ZipInfo) -> str:
    return member.filename.removesuffix(".npy")


def _member(member: zipfile.ZipInfo, file: IO[bytes], path: Path, field: str) -> NpyArray:
    if member.compress_type != zipfile.ZIP_STORED:
        raise JobError(f"{field}.{_name(member)}", f"it is compressed in {path.name!r}; write it with numpy.savez instead")
    file.seek(member.header_offset)
    name_length, extra_length = struct.unpack("<HH", file.read(_LOCAL_HEADER_BYTES)[-4:])
    file.seek(name_length + extra_length, 1)
    return _array_at(file, path, f"{field}.{_name(member)}")


def _array_at(file: IO[bytes], path: Path, field: str) -> NpyArray:
    try:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = read_header(file)
    except ValueError as error:
        raise JobError(field, f"{path.name!r} is not an .npy file; make one with numpy.save") from error
    if dtype.hasobject or dtype.kind not in "biufc":
        raise JobError(field, f"its dtype {dtype} holds no numbers; give an array of numbers")
    if fortran_order and len(shape) > 1:
        raise JobError(field, "its rows are scattered (Fortran order); save numpy.ascontiguousarray of it instead")
    if not shape:
        raise JobError(field, "it is a single number; give an array with one row a sample")
    return NpyArray(path=path, offset=file.tell(), shape=shape, dtype=dtype)


class ArraySamples:
    """Sample ``n`` is row ``n`` of every array.

    Images of bytes become numbers from 0 to 1, other whole numbers 64-bit, other fractions 32-bit.
    """

    field = "data.arrays"

    def __init__(
        self, arrays: Mapping[str, Path] | Path, expected: Sequence[str], limits: Mapping[str, ModelLimit | None]
    ) -> None:
        """``expected`` are the names that the model wants, if known; ``limits`` bound the numbers of some arrays."""
        if isinstance(arrays, Path):
            self._arrays = npz_arrays(arrays, self.field)
        else:
            self._arrays = {name: npy_array(path, f"{self.field}.{name}") for name, path in arrays.items()}
        self._limits = limits
        if expected and set(expected) != set(self._arrays):
            raise JobError(self.field, f"the arrays are {', '.join(self._arrays)}; the model wants {' and '.join(expected)}")
        (first, rows), *others = [(name, array.shape[0]) for name, array in self._arrays.items()]
        for name, count in others:
            if count != rows:
                raise JobError(f"{self.field}.{name}", f"it has {count} rows, but {first} has {rows}; give one row a sample")
        self._rows = {name: array.stream() for name, array in self._arrays.items()}

    @property
    def unit(self) -> Unit:
        return Unit.TOKENS if "targets" in self._arrays else Unit.SAMPLES

    @property
    def num_samples(self) -> int:
        return next(iter(self._arrays.values())).shape[0]

    @property
    def varying_dimensions(self) -> Mapping[str, tuple[int, ...]]:
        return dict.fromkeys(self._arrays, ())

    def inputs(self, sample_ids: Sequence[int], microbatch: MicrobatchIndex) -> dict[str, torch.Tensor]:
        return {name: self._stacked(name, sample_ids) for name in self._arrays}

    def _stacked(self, name: str, sample_ids: Sequence[int]) -> torch.Tensor:
        array = self._arrays[name]
        rows = b"".join(self._rows[name].read(number * array.row_bytes, array.row_bytes) for number in sample_ids)
        values = np.frombuffer(rows, dtype=array.dtype).reshape(len(sample_ids), *array.shape[1:])
        self._check(name, values)
        return torch.from_numpy(_for_models(values))

    def _check(self, name: str, values: np.ndarray[Any, Any]) -> None:
        limit = self._limits.get(name)
        if limit is None or not values.size:
            return
        if name == "targets":
            values = np.where(values == IGNORED_TARGET, 0, values)
        wrong = values.min() if values.min() < 0 else values.max()
        if not 0 <= wrong < limit.value:
            message = f"{wrong} is not below {limit.setting} {limit.value} of {limit.field}; correct it or raise that"
            raise JobError(f"{self.field}.{name}", message)


def _for_models(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if values.dtype == np.uint8 and values.ndim > 2:
        return values.astype(np.float32) / np.float32(255)
    if values.dtype.kind in "iu":
        return values.astype(np.int64)
    if values.dtype.kind == "f":
        return values.astype(np.float32)
    return values.astype(values.dtype.newbyteorder("="))
