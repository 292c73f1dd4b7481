"""Seeded orders of very many things without holding them: a permutation as a function.

A Feistel network permutes the numbers below a power of four; walking its cycle until a number is below ``size`` again gives a
permutation of exactly those (Black and Rogaway, 2002). Fewer than four walks are needed on average.
"""

from __future__ import annotations

from hashlib import blake2b

_NUM_ROUNDS = 4


class Permutation:
    """A permutation of ``range(size)``, a function of ``key`` and ``size`` alone, in constant memory."""

    def __init__(self, size: int, key: str) -> None:
        self._size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half_bits) - 1
        self._keys = [blake2b(f"{key}/{turn}".encode(), digest_size=16).digest() for turn in range(_NUM_ROUNDS)]

    def __getitem__(self, position: int) -> int:
        """Which number is at ``position``."""
        if not 0 <= position < self._size:
            raise IndexError(position)
        number = self._round_trip(position)
        while number >= self._size:
            number = self._round_trip(number)
        return number

    def __len__(self) -> int:
        return self._size

    def _round_trip(self, number: int) -> int:
        left, right = number >> self._half_bits, number & self._mask
        for key in self._keys:
            digest = blake2b(right.to_bytes(8, "little"), digest_size=8, key=key).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & self._mask)
        return (left << self._half_bits) | right
