"""Random numbers that both ends of a link draw alike, on any device and with any version of any library.

Subtractive dither adds a number u, uniform in one step of the quantiser, before rounding and takes it off again after decoding:
the error is then uniform in one step and independent of the value, so rounding has no bias. The numbers come from a table of
fixed contents, in which each of GRID evenly spaced values occurs equally often; every WINDOW elements a tensor's seed chooses
where in the table to read on. A place in a tensor thus meets all values equally often over many seeds, at no cost for drawing.

The values are multiples of 2**-13, so sums of a block's quantised values are exact in fp32, in whatever order they are added:
decoding gives the same bits everywhere.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WINDOW = 32768
"""Elements that share a place in the table."""
GRID = 4096
"""Different values of the dither."""

_PLACES = 16 * GRID
_SIGNS = 1 << 32  # counters of signs are far from those of windows


class Dither:
    """The dither of one tensor, each number plus ``shift``."""

    def __init__(self, seed: int, num_windows: int, shift: float) -> None:
        places = _hashed(seed, np.arange(num_windows, dtype=np.uint64)) % np.uint64(_PLACES)
        self._places: list[int] = places.tolist()
        self._table = _table(shift)

    def window(self, index: int) -> Tensor:
        """One window, on the CPU: the table's own memory."""
        place = self._places[index]
        return self._table[place : place + WINDOW]

    def windows(self, first: int, end: int, device: torch.device) -> Tensor:
        """Several windows, one after the other."""
        starts = torch.tensor(self._places[first:end]).to(device).unsqueeze(1)
        return self._table.to(device)[starts + torch.arange(WINDOW, device=device)].reshape(-1)


def signs(seed: int, count: int) -> Tensor:
    """``count`` times plus or minus one."""
    bits = _hashed(seed, np.arange(_SIGNS, _SIGNS + count, dtype=np.uint64)) >> np.uint64(63)
    return torch.from_numpy(1.0 - 2.0 * bits.astype(np.float32))


@cache
def _table(shift: float) -> Tensor:
    order = np.argsort(_hashed(0, np.arange(_PLACES, dtype=np.uint64)), kind="stable")
    values = ((order % GRID).astype(np.float32) + 0.5) / GRID - 0.5 + np.float32(shift)
    return torch.from_numpy(np.concatenate([values, values[:WINDOW]]))


def _hashed(seed: int, counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The generator SplitMix64 at these positions of the stream that ``seed`` begins."""
    with np.errstate(over="ignore"):
        mixed = np.uint64(seed) + (counters + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
