"""Any whole numbers arrive, and independent ones take little more than their entropy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.compression.symbols import LARGEST_SYMBOL, SymbolCoder
from atoll.protocol.errors import WireError


def entropy(symbols: Tensor) -> float:
    """Bits a symbol."""
    _, counts = torch.unique(symbols, return_counts=True)
    shares = counts.double() / symbols.numel()
    return float(-(shares * shares.log2()).sum())


def normal(deviation: float, count: int = 100_000) -> Tensor:
    return (deviation * torch.randn(count, generator=torch.Generator().manual_seed(0))).round()


def round_trip(symbols: Tensor) -> bytes:
    data = SymbolCoder().encode(symbols.clone())
    assert torch.equal(SymbolCoder().decode(memoryview(data), symbols.numel()), symbols)
    return data


@pytest.mark.parametrize("deviation", [0.0, 0.2, 0.3, 0.5, 1.0, 3.0, 20.0, 60.0, 3000.0, 1e6])
def test_any_spread_arrives_in_little_more_than_its_entropy(deviation: float) -> None:
    symbols = normal(deviation)
    bits = 8 * len(round_trip(symbols)) / symbols.numel()
    if deviation == 0.0:
        assert bits < 0.01
    elif deviation < 100.0:
        assert bits < 1.08 * entropy(symbols) + 0.02
    else:
        assert bits < 66


@pytest.mark.parametrize("outliers", [1, 50, 1000])
def test_outliers_among_small_symbols(outliers: int) -> None:
    symbols = normal(0.5)
    symbols[torch.arange(outliers) * 97] = float(LARGEST_SYMBOL)
    symbols[torch.arange(outliers) * 97 + 1] = -float(LARGEST_SYMBOL)
    assert len(round_trip(symbols)) < 1.05 * len(round_trip(normal(0.5))) + 80 * outliers


@given(st.lists(st.integers(-LARGEST_SYMBOL, LARGEST_SYMBOL) | st.integers(-9, 9), min_size=1, max_size=70))
def test_any_symbols(symbols: list[int]) -> None:
    round_trip(torch.tensor(symbols, dtype=torch.float32))


def damaged(data: bytes, place: int, value: int) -> memoryview:
    return memoryview(data[:place] + bytes([value]) + data[place + 1 :])


def test_bytes_that_no_encoder_made_are_refused() -> None:
    data, coder = SymbolCoder().encode(normal(0.5, 1000)), SymbolCoder()
    with pytest.raises(WireError, match="end 5 bytes early"):
        coder.decode(memoryview(b""), 1000)
    with pytest.raises(WireError, match="no alphabet 77"):
        coder.decode(damaged(data, 0, 77), 1000)
    with pytest.raises(WireError, match="bytes of symbols where"):
        coder.decode(damaged(data, 5, data[5] ^ 1), 1000)
    with pytest.raises(WireError, match="cannot be decompressed"):
        coder.decode(damaged(data, 9, data[9] - 5), 1000)
    with pytest.raises(WireError, match="words of symbols where"):
        coder.decode(memoryview(data), 2000)
    with pytest.raises(WireError, match="follow the symbols"):
        coder.decode(memoryview(data + b"1"), 1000)
    symbols = normal(1.0, 2000)
    symbols[7] = 100.0
    data = SymbolCoder().encode(symbols)
    with pytest.raises(WireError, match="outside of its group"):
        coder.decode(damaged(data, len(data) - 6, 200), 2000)
    with pytest.raises(WireError, match="cannot hold 1 exceptions"):
        coder.decode(memoryview(data[:-1]), 2000)
    sparse = SymbolCoder().encode(normal(0.2, 2000))
    with pytest.raises(WireError, match="a symbol lies outside"):
        coder.decode(memoryview(sparse), 1000)
