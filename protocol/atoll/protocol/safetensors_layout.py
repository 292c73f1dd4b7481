"""The safetensors format, as far as files are written piece by piece: names of dtypes, and the header before the data. Pure.

A file is the header's length (8 bytes, little-endian), the header (JSON, padded with spaces), and the tensors' bytes,
row-major, one after the other without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names; it has none for some dtypes."""

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_ALIGNMENT = 8


def header_bytes(entries: Mapping[str, Any], room: int | None = None) -> bytes:
    """The header of a file with its length; with ``room``, padded to take exactly that many bytes. Raises ValueError when it
    does not fit."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    size = 8 + len(text)
    room = size + -size % _ALIGNMENT if room is None else room
    if size > room or room - 8 > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {size} bytes where there is room for {min(room, MAX_HEADER_BYTES)}")
    text += b" " * (room - size)
    return len(text).to_bytes(8, "little") + text


def header_length(first: bytes) -> int:
    """The bytes of the header after its length, given the file's first 8 bytes. Raises ValueError for what is no such file."""
    length = int.from_bytes(first, "little")
    if len(first) != 8 or not 2 <= length <= MAX_HEADER_BYTES:
        raise ValueError("it does not begin like a safetensors file")
    return length
