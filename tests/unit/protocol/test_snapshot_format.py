"""Parts of snapshots as bytes: what is read is what was written, or it is refused."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.errors import WireError
from atoll.protocol.ids import StepNumber
from atoll.protocol.safetensors_layout import header_length
from atoll.protocol.snapshot_format import (
    Manifest,
    decode_header,
    encode_header,
    entry_of,
    header_room,
    restored,
    row_major_bytes,
)
from atoll.protocol.tensors import memory_order

RUN = "0f" * 16
STEP = StepNumber(7)


def part_of(tensors: dict[str, torch.Tensor]) -> tuple[Manifest, bytes]:
    """A manifest and the data that it describes."""
    entries, data = [], b""
    for name, tensor in tensors.items():
        piece = row_major_bytes(tensor)
        entries.append(entry_of(name, tensor, piece, len(data)))
        data += bytes(piece)
    return Manifest(run_id=RUN, step=STEP, tensors=tuple(entries)), data


def header_of(manifest: Manifest) -> bytes:
    header = encode_header(manifest, header_room(manifest.names))
    assert len(header) == header_room(manifest.names)
    assert header_length(header[:8]) == len(header) - 8
    return header[8:]


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,  # safetensors has no name for it
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4, 5)], ids=str)
def test_every_kind_of_tensor_comes_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    manifest, data = part_of({"w": tensor})
    found = decode_header(header_of(manifest))
    assert found == manifest
    (entry,) = found.tensors
    back = restored(entry, data)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_the_order_in_memory_comes_back() -> None:
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    manifest, data = part_of({"w": image, "t": torch.randn(3, 4).t()})
    found = {entry.name: restored(entry, data[entry.begin : entry.begin + entry.num_bytes]) for entry in manifest.tensors}
    assert torch.equal(found["w"], image)
    assert found["w"].stride() == image.stride()
    assert memory_order(found["t"]) == (1, 0)


def test_names_and_their_groups() -> None:
    manifest, _ = part_of({"b@step": torch.tensor(1.0), "b": torch.zeros(2), "odd@name": torch.zeros(1)})
    assert set(manifest.names) == {"b", "odd@name"}
    assert [entry.name for entry in manifest.groups()["b"]] == ["b", "b@step"]
    assert manifest.num_bytes == 4 + 8 + 4


@given(st.lists(st.text(max_size=200), unique=True, max_size=20))
def test_there_is_room_for_any_names(names: list[str]) -> None:
    tensors = {
        f"{name}{moment}": torch.zeros(1, 1, 1, 1, 1) for name in names for moment in ("", "@step", "@exp_avg", "@exp_avg_sq")
    }
    manifest, _ = part_of(tensors)
    room = header_room(names)
    assert decode_header(encode_header(manifest, room)[8:]) == manifest


def test_too_little_room_is_told() -> None:
    manifest, _ = part_of({"w": torch.zeros(2)})
    with pytest.raises(WireError, match="does not fit"):
        encode_header(manifest, 64)


def test_any_change_of_the_manifest_is_noticed() -> None:
    manifest, _ = part_of({"weight": torch.arange(6.0), "weight@step": torch.tensor(3.0)})
    header = header_of(manifest)
    inside = header.index(b'"__metadata__"'), header.index(b"}")
    for place in range(*inside):
        damaged = bytearray(header)
        damaged[place] ^= 1
        with contextlib.suppress(ValueError):
            assert decode_header(bytes(damaged)) == manifest, f"byte {place} was changed and something else was read"
