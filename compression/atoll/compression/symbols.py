"""Small integers to about as many bits as their entropy, with zstandard.

The symbols are cut into groups of neighbours, each with the alphabet that fits it. The smallest ones put several symbols into a
byte as digits of a number, for the library's Huffman code spends at least a bit a byte. Where nearly all are zeros, the others
are sent, and the numbers of zeros between them. Symbols beyond the alphabet, few by its choice, follow as exceptions: place and
value.

On the wire, for each group: its alphabet and its number of exceptions; its planes, each with the lengths before and after
decompression: the counts of zeros, if zeros are counted, and the words, of two bytes the lower ones first; its exceptions.

Measured on independent normal numbers, rounded: 1-5 % above their entropy from half a bit to 6 bits, on one core encoding
500-800 and decoding 300-900 million symbols a second. A range coder (constriction 0.5) is at the entropy and encodes
150, decodes 70-150; it has no wheels for Linux on ARM, where zstandard has them for all that PyTorch runs on.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from atoll.protocol.errors import WireError

_GROUP = 32768  # symbols: a table costs 50-100 bytes and is to cost a percent
_MOST_GROUPS = 64
_EXCEPTIONS = 1024  # one symbol in so many may be one; it takes 64 bits
_HEADER = struct.Struct("<BI")  # alphabet, exceptions
_LENGTHS = struct.Struct("<II")
_BLOCK_LOG = 17  # a table each 128 KiB, the library's largest


_SPARSE = 8  # below one symbol in so many that is not 0, zeros are counted


Symbols = NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, slots=True)
class _Alphabet:
    """Symbols of magnitude ``limit`` or less; ``digits`` of them make a word, of one byte but for the last alphabet."""

    limit: int
    digits: int

    @property
    def shift(self) -> int:
        """Makes symbols natural numbers; of two bytes, those of small symbols have the same upper one."""
        return self.limit if self.limit < 128 else 32768 + 128

    @property
    def base(self) -> int:
        return 2 * self.limit + 1

    def num_words(self, count: int) -> int:
        return -(-count // self.digits)


_ALPHABETS = (_Alphabet(1, 5), _Alphabet(2, 3), _Alphabet(7, 2), _Alphabet(127, 1), _Alphabet(32000, 1))
_SMALL = 127
_TWO_BYTES = len(_ALPHABETS) - 1
_COUNTED = 128  # added to the alphabet where zeros are counted
LARGEST_SYMBOL = 2**24
"""The largest magnitude, beyond which fp32 does not hold all integers."""


class SymbolCoder:
    """Encodes and decodes one sequence after another, without state; not thread-safe."""

    def __init__(self) -> None:
        # Matches are worth nothing in symbols that are nearly independent: the longest allowed least length and the smallest
        # table of places keep the library from taking chance repetitions for matches.
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            window_log=_BLOCK_LOG,
            hash_log=6,
            min_match=7,
            write_content_size=False,
            format=zstandard.FORMAT_ZSTD1_MAGICLESS,
        )
        self._compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self._decompressor = zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS)

    def encode(self, symbols: Tensor) -> bytes:
        """The bytes of whole numbers of at most LARGEST_SYMBOL, given as fp32 in one dimension on the CPU."""
        return b"".join(part for first, end in _groups(symbols.numel()) for part in self._encode_group(symbols[first:end]))

    def decode(self, data: memoryview, count: int) -> Tensor:
        """The inverse; raises WireError for what :meth:`encode` cannot have made of ``count`` symbols."""
        symbols = torch.zeros(count)
        for first, end in _groups(count):
            data = self._decode_group(data, symbols[first:end])
        if data.nbytes:
            raise WireError(f"{data.nbytes} bytes follow the symbols")
        return symbols

    def _encode_group(self, group: Tensor) -> list[bytes]:
        """In bytes where all symbols are small: a quarter of the memory, and the processor takes four times as many at once."""
        low, high = (float(bound) for bound in group.aminmax())
        values: Symbols = group.numpy().astype(np.int8 if low >= -_SMALL and high <= _SMALL else np.int32)
        used = values != 0
        if int(np.count_nonzero(used)) * _SPARSE >= len(values):
            alphabet, exceptions = _choose(values)
            return [_HEADER.pack(alphabet, len(exceptions)), *self._words(values, alphabet), exceptions.tobytes()]
        places = np.flatnonzero(used)
        others = values[places]
        alphabet, exceptions = _choose(others)
        header = _HEADER.pack(_COUNTED + alphabet, len(exceptions))
        return [header, *self._plane(_gaps(places)), *self._words(others, alphabet), exceptions.tobytes()]

    def _decode_group(self, data: memoryview, group: Tensor) -> memoryview:
        alphabet, num_exceptions = _unpack(_HEADER, data)
        data = data[_HEADER.size :]
        if alphabet % _COUNTED >= len(_ALPHABETS):
            raise WireError(f"there is no alphabet {alphabet}")
        if alphabet < _COUNTED:
            data = self._read_words(data, alphabet, group)
            return _read_exceptions(data, num_exceptions, group)
        gaps, data = self._read_plane(data, len(group))
        places = _places(gaps, len(group))
        others = torch.zeros(len(places))
        data = self._read_words(data, alphabet - _COUNTED, others)
        data = _read_exceptions(data, num_exceptions, others)
        group[places] = others
        return data

    def _words(self, symbols: Symbols, alphabet: int) -> list[bytes]:
        chosen = _ALPHABETS[alphabet]
        clipped = symbols.clip(-chosen.limit, chosen.limit)
        if alphabet == _TWO_BYTES:
            words = clipped.astype(np.int32) + chosen.shift
            return [*self._plane(words.astype(np.uint8)), *self._plane((words >> 8).astype(np.uint8))]
        return self._plane(_to_words(clipped.astype(np.uint8) + np.uint8(chosen.shift), chosen))

    def _read_words(self, data: memoryview, alphabet: int, symbols: Tensor) -> memoryview:
        chosen = _ALPHABETS[alphabet]
        num_words = chosen.num_words(len(symbols))
        words, data = self._read_plane(data, num_words)
        if alphabet == _TWO_BYTES:
            high, data = self._read_plane(data, num_words)
            words = torch.add(words, high, alpha=256)
        if len(words) != num_words:
            raise WireError(f"{len(words)} words of symbols where {num_words} were due")
        _from_words(words, chosen, symbols)
        symbols.sub_(chosen.shift)
        return data

    def _plane(self, values: NDArray[np.uint8]) -> list[bytes]:
        compressed = self._compressor.compress(values.data) if len(values) else b""
        return [_LENGTHS.pack(len(values), len(compressed)), compressed]

    def _read_plane(self, data: memoryview, most: int) -> tuple[Tensor, memoryview]:
        """A plane of at most ``most`` bytes as numbers, and what follows it."""
        num_values, num_bytes = _unpack(_LENGTHS, data)
        compressed, rest = data[_LENGTHS.size : _LENGTHS.size + num_bytes], data[_LENGTHS.size + num_bytes :]
        if num_values > most:
            raise WireError(f"{num_values} bytes of symbols where at most {most} can be")
        if not num_values:
            return torch.empty(0), rest
        try:
            # A frame that says how long its contents are would be given as much, whatever is the most that was asked for.
            said = zstandard.get_frame_parameters(compressed, format=zstandard.FORMAT_ZSTD1_MAGICLESS).content_size
            if said != zstandard.CONTENTSIZE_UNKNOWN:
                raise WireError("symbols say how many they are, which no sender does")
            values = self._decompressor.decompress(compressed, max_output_size=num_values)
        except zstandard.ZstdError as error:
            raise WireError(f"symbols cannot be decompressed: {error}") from error
        if len(values) != num_values:
            raise WireError(f"{len(values)} bytes of symbols where {num_values} were due")
        return torch.frombuffer(bytearray(values), dtype=torch.uint8).to(torch.float32), rest


def most_bytes(count: int) -> int:
    """What groups cost beyond the bits of their symbols, at most: headers, tables, frames."""
    return len(_groups(count)) * (_HEADER.size + 2 * _LENGTHS.size + 200)


def _groups(count: int) -> list[tuple[int, int]]:
    number = max(1, min(_MOST_GROUPS, count // _GROUP))
    edges = [place * count // number for place in range(number + 1)]
    return list(pairwise(edges))


def _choose(symbols: Symbols) -> tuple[int, NDArray[np.int32]]:
    """The smallest alphabet beyond which few symbols lie, and place and value of each of those, as rows."""
    magnitudes = np.abs(symbols)
    largest, few = int(magnitudes.max(initial=0)), len(symbols) // _EXCEPTIONS
    for place, alphabet in enumerate(_ALPHABETS):
        if largest <= alphabet.limit:
            return place, np.empty((0, 2), np.int32)
        allowed = few if place < _TWO_BYTES - 1 else 8 * few  # two bytes are dear, for a few symbols' sake
        if place == _TWO_BYTES or int(np.count_nonzero(magnitudes > alphabet.limit)) <= allowed:
            break
    places = np.flatnonzero(magnitudes > alphabet.limit)
    return place, np.stack([places, symbols[places]], axis=1).astype(np.int32)


def _read_exceptions(data: memoryview, number: int, symbols: Tensor) -> memoryview:
    if not number:
        return data
    if data.nbytes < 8 * number:
        raise WireError(f"{data.nbytes} bytes cannot hold {number} exceptions")
    places, values = torch.frombuffer(bytearray(data[: 8 * number]), dtype=torch.int32).view(-1, 2).unbind(1)
    if int(places.amin()) < 0 or int(places.amax()) >= len(symbols):
        raise WireError("an exception lies outside of its group")
    symbols[places.long()] = values.to(torch.float32)
    return data[8 * number :]


def _gaps(places: NDArray[np.intp]) -> NDArray[np.uint8]:
    """How many zeros precede each place after the place before it: one byte below 255, else 255 for each 255 of them first."""
    gaps = np.diff(places, prepend=-1) - 1
    ends = (gaps // 255 + 1).cumsum() - 1
    counts = np.full(int(ends[-1]) + 1 if len(ends) else 0, 255, np.uint8)
    counts[ends] = gaps % 255
    return counts


def _places(counts: Tensor, most: int) -> Tensor:
    """The inverse; raises WireError for a place beyond ``most``."""
    numbers = counts.long()
    passed = torch.where(numbers == 255, numbers, numbers + 1).cumsum(0)
    if len(passed) and int(passed[-1]) > most:
        raise WireError("a symbol lies outside of its group")
    return passed[numbers != 255] - 1


def _unpack(layout: struct.Struct, data: memoryview) -> tuple[int, ...]:
    if data.nbytes < layout.size:
        raise WireError(f"symbols end {layout.size - data.nbytes} bytes early")
    return layout.unpack_from(data)


def _to_words(shifted: NDArray[np.uint8], alphabet: _Alphabet) -> NDArray[np.uint8]:
    """Digit i of the words is the i-th part of the symbols; what is missing of the last part is zeros."""
    num_words = alphabet.num_words(len(shifted))
    words = shifted[:num_words]
    for place in range(1, alphabet.digits):
        part = shifted[place * num_words : (place + 1) * num_words]
        words[: len(part)] += part * np.uint8(alphabet.base**place)
    return words


def _from_words(words: Tensor, alphabet: _Alphabet, group: Tensor) -> None:
    for place in range(alphabet.digits):
        part = group[place * len(words) : (place + 1) * len(words)]
        rest = words if place == alphabet.digits - 1 else (words + 0.5).mul_(1.0 / alphabet.base).floor_()
        digit = words if place == alphabet.digits - 1 else torch.sub(words, rest, alpha=alphabet.base)
        part.copy_(digit[: len(part)])
        words = rest
