"""What is fuzzed: a decoder that takes bytes, with inputs to begin from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from atoll.protocol.errors import AtollError

LARGEST_INPUT = 4096
"""Bytes. What matters is in the first of them; a hostile length need not be followed by as much."""
RAW_BYTES = 2**18
"""The largest tensor, decoded, that a target's receiver is willing to take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """``decode`` may raise the project's errors and what protobuf raises where gRPC would have ended the call. ``thousands``
    of inputs go to it in a long check: the cheaper, the more."""

    name: str
    decode: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]
    thousands: int

    def run(self, data: bytes) -> None:
        """Raises only what is a defect."""
        try:
            self.decode(data)
        except (AtollError, DecodeError):
            return


class Choices:
    """Bytes as decisions, for inputs that a fuzzer is to shape: zeros once they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0

    def __bool__(self) -> bool:
        return self._place < len(self._data)

    def take(self, count: int) -> bytes:
        """The next bytes, perhaps fewer."""
        found = self._data[self._place : self._place + count]
        self._place += count
        return found

    def below(self, limit: int, width: int = 1) -> int:
        """A number from 0 to ``limit`` - 1; 0 where there is none."""
        return int.from_bytes(self.take(width), "little") % max(1, limit)

    def pick(self, options: Sequence[int]) -> int:
        """One of them."""
        return options[self.below(len(options))]

    def piece(self) -> bytes:
        """As many bytes as the next two say."""
        return self.take(int.from_bytes(self.take(2), "little"))

    def pieces(self) -> Iterator[bytes]:
        """All that is left, piece by piece."""
        while self:
            yield self.piece()

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(len(self._data))


def framed(pieces: Sequence[bytes]) -> bytes:
    """What :meth:`Choices.pieces` takes apart."""
    return b"".join(len(piece).to_bytes(2, "little") + piece for piece in pieces)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """A few things in it changed that decoders trip over."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place = chance.randint(0, len(changed))
        match chance.randrange(6):
            case 0 if changed:
                changed[place % len(changed)] ^= 1 << chance.randrange(8)
            case 1 if changed:
                changed[place % len(changed)] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                width = chance.choice((1, 2, 4, 8))
                changed[place : place + width] = chance.choice((b"\xff", b"\x7f", b"\x00", b"\x80")) * width
            case 3:
                del changed[place : place + chance.randint(1, 16)]
            case 4:
                changed[place:place] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 8)))
            case _:
                changed[place:place] = changed[place : place + chance.randint(1, 64)]
    return bytes(changed[:LARGEST_INPUT])
