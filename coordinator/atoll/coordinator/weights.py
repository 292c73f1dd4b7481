"""Writes a model's weights as a safetensors file while they arrive, one tensor at a time and in any order.

The layout follows from the graph alone, so the header is written first and each tensor goes straight to its place; memory
holds one tensor. A tied parameter is written under each of its names, as the model's own state dict has it. Until the file is
complete it is called ``NAME.part``."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from atoll.coordinator.run_files import disk_error
from atoll.protocol.errors import RunFailed, TraceError
from atoll.protocol.graph import BufferSpec, OpGraph, ParameterSpec
from atoll.protocol.safetensors_layout import DTYPES, header_bytes
from atoll.protocol.tensors import tensor_to_bytes
from atoll.protocol.wording import listed

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where the bytes of one tensor go; several places for a tied one."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int
    offsets: tuple[int, ...]


class WeightsLayout:
    """Which bytes of the file belong to which tensor. Pure."""

    def __init__(self, specs: Iterable[ParameterSpec | BufferSpec], metadata: Mapping[str, str]) -> None:
        named = [(name, spec) for spec in specs for name in (spec.name, *spec.ties)]
        # Larger elements first, so that every tensor lies on a multiple of its element's size.
        named.sort(key=lambda item: (-item[1].dtype.itemsize, item[0]))
        entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
        offsets: dict[str, list[int]] = {}
        end = 0
        for name, spec in named:
            num_bytes = _num_bytes(spec)
            entries[name] = {"dtype": _dtype_name(spec), "shape": list(spec.shape), "data_offsets": [end, end + num_bytes]}
            offsets.setdefault(spec.name, []).append(end)
            end += num_bytes
        self.header = header_bytes(entries)
        self.num_bytes = len(self.header) + end
        self.places = {
            spec.name: _Place(
                dtype=spec.dtype,
                shape=tuple(spec.shape),
                num_bytes=_num_bytes(spec),
                offsets=tuple(len(self.header) + offset for offset in offsets[spec.name]),
            )
            for _, spec in named
        }


def state_specs(graph: OpGraph) -> tuple[ParameterSpec | BufferSpec, ...]:
    """What belongs to the state dict of the model that ``graph`` was made from."""
    return (*graph.parameters, *(buffer for buffer in graph.buffers if buffer.persistent))


class WeightsFile:
    """A file of weights being written. Blocking; call it from one thread at a time."""

    def __init__(self, path: Path, layout: WeightsLayout) -> None:
        self.path = path
        self._layout = layout
        self._part = path.with_name(path.name + ".part")
        self._checksums: dict[str, int] = {}
        try:
            self._file = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise disk_error(error, path.parent) from error
        try:
            self._reserve()
            _write_all(self._file, layout.header, 0)
        except OSError as error:
            self.abandon()
            raise disk_error(error, path.parent) from error

    def refusal(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> str | None:
        """Why a tensor of that name, dtype and shape has no place here; None when it has one."""
        place = self._layout.places.get(name)
        if place is None:
            return f"{name} is not part of the model's state"
        if (place.dtype, place.shape) != (dtype, shape):
            return f"{name} should be {place.dtype} of shape {place.shape}, not {dtype} of shape {shape}"
        return None

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put the tensor into its place. Several stages may hold a copy of one; the first that arrives is kept."""
        place = self._layout.places[name]
        # The format knows row-major tensors alone, and our own bytes may be in another order.
        data = memoryview(tensor_to_bytes(tensor.contiguous())).cast("B")
        checksum = zlib.crc32(data)
        if self._checksums.setdefault(name, checksum) != checksum:
            # Between unlike devices copies may differ by rounding; on like ones this must not happen.
            _log.warning("two stages hold different copies of %s; the first one is kept", name)
            return
        try:
            for offset in place.offsets:
                _write_all(self._file, data, offset)
        except OSError as error:
            raise disk_error(error, self.path.parent) from error

    def complete(self) -> None:
        """Give the file its name. Raises RunFailed when a tensor never came."""
        missing = sorted(self._layout.places.keys() - self._checksums.keys())
        if missing:
            self.abandon()
            raise RunFailed(f"no peer sent {listed(missing, 3)}, so {self.path} would not be complete")
        try:
            os.fsync(self._file)
            os.close(self._file)
            self._part.replace(self.path)
        except OSError as error:
            raise disk_error(error, self.path.parent) from error

    def abandon(self) -> None:
        """Leave nothing behind."""
        os.close(self._file)
        self._part.unlink(missing_ok=True)

    def _reserve(self) -> None:
        """Fail now rather than at the last tensor when the disk is too small."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file, 0, self._layout.num_bytes)
        else:
            os.ftruncate(self._file, self._layout.num_bytes)


def _write_all(file: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _num_bytes(spec: ParameterSpec | BufferSpec) -> int:
    count = spec.dtype.itemsize
    for size in spec.shape:
        count *= size
    return count


def _dtype_name(spec: ParameterSpec | BufferSpec) -> str:
    if spec.dtype not in DTYPES:
        raise TraceError(f"{spec.name} is {spec.dtype}, which a safetensors file cannot hold; use another dtype in the model")
    return DTYPES[spec.dtype]
