"""A part of a snapshot as a file: state by name as of one committed step, in safetensors, with a hash of each tensor. Pure.

A part holds whole groups (:mod:`atoll.protocol.state`): a name's weight with all its moments. Any number of parts, of any peers
and any cut, make up a snapshot. The header is written last, into room that was left for it, so a part can grow while state
arrives. Its metadata hold the *manifest*, which says what safetensors cannot (orders in memory, hashes), and the *seal*, a hash
over the manifest: who reads a tensor knows that it is the one that was written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from atoll.protocol.errors import WireError
from atoll.protocol.ids import StepNumber
from atoll.protocol.safetensors_layout import DTYPES, header_bytes
from atoll.protocol.state import MOMENTS, place_in_group, split_name
from atoll.protocol.tensors import (
    Buffer,
    dtype_from_name,
    dtype_name,
    from_memory_order,
    in_memory_order,
    memory_order,
    num_elements,
    tensor_from_bytes,
    tensor_to_bytes,
)

PART_SUFFIX = ".safetensors"
_DIGEST_BYTES = 16
_FORMAT = "1"  # of the manifest
_ENTRY_BYTES = 400  # what a tensor's two entries take at most beside its name: shapes have few dimensions
_TENSORS_OF_A_NAME = 1 + max(len(moments) for moments in MOMENTS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a part. ``begin`` counts from the end of the header; ``order`` is its order in memory when it is used."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]
    begin: int
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a part holds."""

    run_id: str
    step: StepNumber
    tensors: tuple[TensorEntry, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters and buffers whose state is here."""
        return tuple(dict.fromkeys(split_name(entry.name)[0] for entry in self.tensors))

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.tensors)

    def groups(self) -> dict[str, tuple[TensorEntry, ...]]:
        """For each name all tensors that it stands for."""
        found: dict[str, list[TensorEntry]] = {}
        for entry in sorted(self.tensors, key=lambda entry: place_in_group(entry.name)):
            found.setdefault(split_name(entry.name)[0], []).append(entry)
        return {name: tuple(entries) for name, entries in found.items()}


def entry_of(name: str, tensor: torch.Tensor, data: Buffer, begin: int) -> TensorEntry:
    """The entry of a tensor whose row-major bytes are ``data``. Reads every byte. Raises WireError for a dtype that nobody
    can read back."""
    return TensorEntry(
        name=name,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        order=memory_order(tensor),
        begin=begin,
        num_bytes=memoryview(data).nbytes,
        digest=digest_of(data),
    )


def row_major_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes as a part has them: its own memory where that is possible."""
    return tensor_to_bytes(tensor.contiguous())


def restored(entry: TensorEntry, data: Buffer) -> torch.Tensor:
    """The tensor, in its order in memory. ``data`` has been compared with the entry's digest."""
    tensor = tensor_from_bytes(data, entry.dtype, entry.shape)
    if not entry.order:
        return tensor
    return from_memory_order(in_memory_order(tensor, entry.order).contiguous(), entry.order)


def digest_of(data: Buffer) -> str:
    """The hash of a tensor's bytes."""
    return blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def header_room(names: Iterable[str]) -> int:
    """How many bytes the header of a part that holds these names may take, whatever each stands for."""
    room = 4096
    for name in names:
        # Once as a key of the file's, once inside the manifest, which is a string of its own there.
        written = len(json.dumps(name)) + len(json.dumps(json.dumps(name)))
        room += _TENSORS_OF_A_NAME * (written + _ENTRY_BYTES)
    return room + -room % 64


def encode_header(manifest: Manifest, room: int) -> bytes:
    """The header of exactly ``room`` bytes; raises WireError when that is too little."""
    entries: dict[str, Any] = {"__metadata__": _metadata(manifest)}
    for entry in sorted(manifest.tensors, key=lambda entry: entry.begin):
        plain = entry.dtype not in DTYPES  # readers that know nothing of us see its bytes
        entries[entry.name] = {
            "dtype": "U8" if plain else DTYPES[entry.dtype],
            "shape": [entry.num_bytes] if plain else list(entry.shape),
            "data_offsets": [entry.begin, entry.begin + entry.num_bytes],
        }
    try:
        return header_bytes(entries, room)
    except ValueError as error:
        raise WireError(f"the manifest of a snapshot's part does not fit: {error}") from error


def decode_header(text: bytes) -> Manifest:
    """The manifest in a header (without its length). Raises ValueError, in words that can follow "it is damaged:", for anything
    but a header that was written by :func:`encode_header` and is unchanged in what matters."""
    try:
        metadata = json.loads(text)["__metadata__"]
        if metadata["atoll"] != _FORMAT:
            raise ValueError(f"it is of version {metadata['atoll']!r}, and this program reads version {_FORMAT}")
        if metadata["seal"] != _seal(metadata):
            raise ValueError("its manifest does not agree with the hash over it")
        return Manifest(
            run_id=metadata["run_id"],
            step=StepNumber(int(metadata["step"])),
            tensors=tuple(_entry(values) for values in json.loads(metadata["manifest"])),
        )
    except (KeyError, TypeError, AttributeError, RecursionError, WireError) as error:
        raise ValueError(f"its header is not that of a snapshot ({error})") from error


def _metadata(manifest: Manifest) -> dict[str, str]:
    values = [
        (entry.name, dtype_name(entry.dtype), entry.shape, entry.order, entry.begin, entry.num_bytes, entry.digest)
        for entry in manifest.tensors
    ]
    metadata = {
        "format": "pt",
        "atoll": _FORMAT,
        "run_id": manifest.run_id,
        "step": str(manifest.step),
        "manifest": json.dumps(values, separators=(",", ":")),
    }
    return {**metadata, "seal": _seal(metadata)}


def _seal(metadata: Mapping[str, str]) -> str:
    words = json.dumps([metadata[key] for key in ("atoll", "run_id", "step", "manifest")])
    return digest_of(words.encode())


def _entry(values: Any) -> TensorEntry:
    name, dtype, shape, order, begin, num_bytes, digest = values
    texts, numbers = (name, dtype, digest), (begin, num_bytes, *shape, *order)
    if not all(isinstance(text, str) for text in texts) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"an entry of its manifest is {values!r:.200}")
    entry = TensorEntry(
        name=name,
        dtype=dtype_from_name(dtype),
        shape=tuple(shape),
        order=tuple(order),
        begin=begin,
        num_bytes=num_bytes,
        digest=digest,
    )
    if entry.num_bytes != num_elements(entry.shape) * entry.dtype.itemsize:
        raise ValueError(f"{name} has {num_bytes} bytes from {begin} on, for {dtype} of shape {list(shape)}")
    if entry.order and sorted(entry.order) != list(range(len(entry.shape))):
        raise ValueError(f"{name} has the memory order {list(order)} for {len(entry.shape)} dimensions")
    return entry
