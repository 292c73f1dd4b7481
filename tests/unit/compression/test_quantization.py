"""The wire format of quantised blocks, against a decoder written a second time, from the description, with exact numbers."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from atoll.compression import quantization
from atoll.compression.context import CodecContext
from atoll.compression.dither import GRID, WINDOW, Dither, signs
from atoll.compression.registry import codec

CONTEXT = CodecContext(edge="7:0", run_seed=1)
BITS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}
BLOCK = 64


def reference_codes(data: NDArray[np.uint8], bits: int) -> NDArray[np.int64]:
    """Code by code: word w of a row holds codes w, w + s, w + 2s ... where s is the number of words in a row."""
    word_bytes, in_a_word = {8: (1, 1), 4: (1, 2), 3: (3, 8), 2: (1, 4)}[bits]
    rows = data.reshape(-1, BLOCK * bits // 8 // word_bytes, word_bytes).astype(np.int64)
    words = (rows << (8 * np.arange(word_bytes))).sum(axis=2)
    return np.concatenate([(words >> (bits * place)) & ((1 << bits) - 1) for place in range(in_a_word)], axis=1)


def reference_decode(data: bytes, name: str, count: int, seed: int) -> NDArray[np.float32]:
    """In double precision, where all is exact, and rounded once."""
    bits, blocks = BITS[name], -(-count // BLOCK)
    scales = (np.frombuffer(data[: 2 * blocks], dtype=np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    packed = np.frombuffer(data[2 * blocks :], dtype=np.uint8)
    codes = reference_codes(np.pad(packed, (0, blocks * BLOCK * bits // 8 - len(packed))), bits)
    plain = Dither(seed, -(-count // WINDOW), 0.0)
    dither = torch.cat([plain.window(index) for index in range(-(-count // WINDOW))])[: blocks * BLOCK].double().numpy()
    values = codes - (2.0 ** (bits - 1) - 0.5) - dither.reshape(-1, BLOCK)
    if bits < 8:
        hadamard = np.array([[(-1.0) ** (row & column).bit_count() for column in range(BLOCK)] for row in range(BLOCK)])
        values = values @ hadamard * signs(seed, BLOCK).double().numpy() / BLOCK**0.5
    result: NDArray[np.float32] = (values * scales[:, None]).reshape(-1)[:count].astype(np.float32)
    return result


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("count", [64, 1000, 2 * WINDOW + 333])
def test_decoding_is_exact_but_for_one_rounding(name: str, count: int) -> None:
    """So it gives the same bits on every machine, though processors add up a matrix product in different orders."""
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(2)).pow(3)
    data = codec(name).encode(tensor, CONTEXT)
    assert data is not None
    back = codec(name).decode(data, torch.float32, (count,), CONTEXT)
    assert np.array_equal(back.numpy(), reference_decode(bytes(data), name, count, CONTEXT.seed))


GOLDEN = {
    "int8": "b5a70a895881c182",
    "int4": "d978441c889cde74",
    "int3": "389712c5756324fd",
    "int2": "a9361fbf77f796f4",
}


@pytest.mark.parametrize("name", BITS)
def test_old_bytes_keep_their_meaning(name: str) -> None:
    """Fails when the format changes: then the codec needs another name, or peers of two versions misread one another."""
    count = WINDOW + 100
    blocks = -(-count // BLOCK)
    size = codec(name).num_bytes((count,), torch.float32)
    scales = np.arange(blocks, dtype=np.uint16) % 999 + 0x3000
    codes = np.arange(size - 2 * blocks, dtype=np.int64) * 37 % 251
    back = codec(name).decode(scales.tobytes() + codes.astype(np.uint8).tobytes(), torch.float32, (count,), CONTEXT)
    assert hashlib.sha256(back.numpy().tobytes()).hexdigest()[:16] == GOLDEN[name]


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("at_once", [2, 3, 256])
def test_a_device_that_takes_many_windows_at_once_makes_bytes_that_decode(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.randn(4 * WINDOW + 777, generator=torch.Generator().manual_seed(3))
    plain = codec(name).encode(tensor, CONTEXT)
    monkeypatch.setattr(quantization, "_windows_at_once", lambda device: at_once)
    wide = codec(name).encode(tensor, CONTEXT)
    assert plain is not None
    assert wide is not None
    if name == "int8":
        assert bytes(wide) == bytes(plain)
    # A matrix product of another size may round otherwise, which moves a code by one in rare cases.
    shape = tuple(tensor.shape)
    first, second = (codec(name).decode(data, tensor.dtype, shape, CONTEXT) for data in (plain, wide))
    assert float((first != second).float().mean()) < 0.01


def test_every_value_of_the_dither_is_as_frequent() -> None:
    dither = Dither(5, 1, 0.0)
    values, counts = np.unique(dither._table[: 2 * WINDOW].numpy(), return_counts=True)
    assert np.array_equal(values, (np.arange(GRID) + 0.5) / GRID - 0.5)
    assert set(counts.tolist()) == {2 * WINDOW // GRID}


def test_windows_and_seeds_read_the_dither_elsewhere() -> None:
    one, other = Dither(5, 3, 0.0), Dither(6, 3, 0.0)
    pieces = [one.window(0), one.window(1), one.window(2), other.window(0)]
    correlations = torch.corrcoef(torch.stack(pieces)) - torch.eye(4)
    assert float(correlations.abs().max()) < 0.03
    assert torch.equal(one.windows(0, 3, torch.device("cpu")), torch.cat(pieces[:3]))


def test_signs_are_balanced_and_belong_to_a_seed() -> None:
    drawn = torch.stack([signs(seed, 64) for seed in range(200)])
    assert bool((drawn.abs() == 1).all())
    assert float(drawn.mean().abs()) < 0.03
    assert len({tuple(row) for row in drawn.tolist()}) == 200


def test_the_rotation_spreads_an_outlier() -> None:
    """One large element costs a plain block all its precision, a rotated one next to none."""
    tensor = torch.randn(64, 64, generator=torch.Generator().manual_seed(4))
    tensor[:, 5] = 100.0
    others = torch.arange(64) != 5

    def error(rotated: bool) -> float:
        chosen = quantization.BlockCodec("tried", bits=4, block=64, rotated=rotated)
        data = chosen.encode(tensor, CONTEXT)
        assert data is not None
        back = chosen.decode(data, tensor.dtype, (64, 64), CONTEXT)
        return float((back - tensor)[:, others].square().mean())

    assert error(rotated=True) < 0.05 * error(rotated=False)
