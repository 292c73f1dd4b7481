"""The bases of one edge and direction: what a sender has learned and ships, and what a receiver has of it.

All rungs of the transform codec share them, so a link that changes to another rung goes on with the bases that it has.

The first basis goes with the first message. Those after it are shipped beside the symbols, a piece with each message, so that
no message is much longer than others: in a pipeline all stages wait for a long one, each in turn. A basis is used from the
message on that follows its last piece. The first ones follow each other at once, for what was learned from little is soon old,
and take a larger part of the messages; later ones take a sixteenth.
"""

from __future__ import annotations

import struct
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from atoll.compression.basis import (
    NARROWEST,
    WIDEST,
    Basis,
    Covariance,
    mean_basis_bytes,
    most_basis_bytes,
    widest_block,
)
from atoll.protocol.errors import MissingState, WireError

_PIECE = struct.Struct("<IHIII")  # version, columns of a block; first byte, bytes here, bytes in all
_YOUNG_VERSIONS = 5  # after each of these the next follows at once
_YOUNG_SHARE, _SHARE = 0.5, 1.0 / 16  # of a message's symbols, so many bytes of a basis go with it
_REFRESH_MESSAGES = 8  # at least, between two bases: an eigen-decomposition takes as long as the rotation of some messages
_LATER_ROWS = 2  # of blocks that come in pieces, so many columns for each row of a message
_FEWEST_BYTES = 256  # of a piece
_KEPT = 4  # a message may be as many versions late, having been damaged on the way

_T = TypeVar("_T")


def most_columns(num_rows: int, width: int) -> int:
    """Columns of a block of any basis that messages of so many rows, or of fewer, have brought."""
    return widest_block(_LATER_ROWS * num_rows, width, torch.float32)


def most_shipped(num_rows: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of a basis that a message may carry, at most: all of it."""
    widest = widest_block(num_rows, width, dtype)
    return _PIECE.size + most_basis_bytes(width, widest) if widest else 0


def mean_shipped(symbol_bytes: float, num_rows: int, width: int, dtype: torch.dtype) -> float:
    """Bytes of a basis that messages carry in the mean over a run, each with so many bytes of symbols."""
    widest = widest_block(_LATER_ROWS * num_rows, width, dtype)
    basis = mean_basis_bytes(width, widest) if widest else 0
    return min(basis / _REFRESH_MESSAGES, _SHARE * symbol_bytes)


@dataclass(slots=True)
class _Leaving:
    """A basis on its way: ``sent`` of its bytes have gone."""

    basis: Basis
    data: bytes
    sent: int = 0


@dataclass(slots=True)
class _Arriving:
    """What has come of a basis: pieces, by where they begin."""

    widest: int
    total: int
    num_rows: int = 0  # of the longest message that a piece came with
    pieces: dict[int, bytes] = field(default_factory=dict)

    def whole(self) -> bytes | None:
        """All bytes in order, once they are here."""
        if sum(len(piece) for piece in self.pieces.values()) < self.total:
            return None
        return b"".join(self.pieces[first] for first in sorted(self.pieces))


class SentBases:
    """The sender's, for tensors of one width at a time; versions go on where the width changes."""

    def __init__(self) -> None:
        self._version = 0
        self._begin(0)
        self._kept: dict[int, Basis] = {}  # for a sender can decode what it has encoded last

    def _begin(self, width: int) -> None:
        self._width = width
        self._covariance = Covariance(width)
        self._leaving: _Leaving | None = None
        self._current: Basis | None = None
        self._made = 0
        self._since = 0  # messages since the latest was made

    @property
    def used(self) -> Basis | None:
        """The basis that a message uses: the latest that has gone as a whole; the first one goes with the message itself."""
        return self._current or (self._leaving.basis if self._leaving else None)

    def learn(self, rows: Tensor, size: float, dtype: torch.dtype, step: float) -> None:
        """Counts a message's rows, whose root mean square is ``size``. Makes a basis if it is time for one, as exact as a
        quantiser of this step needs it."""
        if rows.shape[1] != self._width:
            self._begin(rows.shape[1])
        self._covariance.add(rows, size)
        self._since += 1
        widest = widest_block(_LATER_ROWS * len(rows) if self._made else len(rows), self._width, dtype)
        due = self._made < _YOUNG_VERSIONS or self._since >= _REFRESH_MESSAGES
        if self._leaving is None and due and widest:
            self._make(widest, step)

    def _make(self, widest: int, step: float) -> None:
        basis = self._covariance.basis(self._version + 1, widest, step)
        data = b"" if basis is None else basis.to_bytes()
        if basis is None or len(data) > most_basis_bytes(self._width, widest):
            return
        self._version += 1
        self._made += 1
        self._since = 0
        self._leaving = _Leaving(basis, data)
        self._kept[basis.version] = basis
        _forget(self._kept, _KEPT)

    def piece(self, symbol_bytes: int) -> bytes:
        """What goes beside so many bytes of symbols, perhaps nothing. It counts as sent."""
        leaving = self._leaving
        if leaving is None:
            return b""
        share = _YOUNG_SHARE if self._made <= _YOUNG_VERSIONS else _SHARE
        first, left = leaving.sent, len(leaving.data) - leaving.sent
        length = left if self._current is None else min(left, max(_FEWEST_BYTES, int(share * symbol_bytes)))
        leaving.sent += length
        if length == left:
            self._current, self._leaving = leaving.basis, None
        header = _PIECE.pack(leaving.basis.version, leaving.basis.widest, first, length, len(leaving.data))
        return header + leaving.data[first : first + length]

    def find(self, version: int, width: int) -> Basis:
        """One of the latest. Raises MissingState for any other."""
        return _find(self._kept, version, width)


class ReceivedBases:
    """The receiver's."""

    def __init__(self) -> None:
        self._whole: dict[int, Basis] = {}
        self._arriving: dict[int, _Arriving] = {}

    def add(self, version: int, widest: int, first: int, total: int, piece: bytes, width: int, num_rows: int) -> None:
        """A piece of a basis, with a message of so many rows; again or not. Raises WireError for one that does not belong to
        the others, and for the last piece of one that no sender would make of such messages: it may be small, and what it
        stands for large."""
        if version in self._whole:
            return
        arriving = self._arriving.setdefault(version, _Arriving(widest, total))
        if (arriving.widest, arriving.total) != (widest, total):
            raise WireError(f"pieces of basis {version} do not belong together")
        arriving.pieces[first] = piece
        arriving.num_rows = max(arriving.num_rows, num_rows)
        data = arriving.whole()
        if data is not None:
            if widest > most_columns(arriving.num_rows, width):
                raise WireError(f"a basis of {width} columns in blocks of {widest} for {arriving.num_rows} rows")
            del self._arriving[version]
            self._whole[version] = Basis.from_bytes(memoryview(data), version, width, widest)
        _forget(self._whole, _KEPT)
        _forget(self._arriving, _KEPT)

    def find(self, version: int, width: int) -> Basis:
        """Raises MissingState for one that is not here as a whole."""
        return _find(self._whole, version, width)


class Bases:
    """Of one edge and direction at one end, which either sends or receives there."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all."""
        self.sent: SentBases | None = None
        self._received = ReceivedBases()

    @property
    def to_send(self) -> SentBases:
        """From now on this end is the sender."""
        if self.sent is None:
            self.sent = SentBases()
        return self.sent

    def read_piece(self, data: memoryview, width: int, num_rows: int) -> memoryview:
        """Takes the piece that ``data`` of a message of so many rows begins with, and returns what follows it. Raises WireError
        for what is none."""
        if data.nbytes < _PIECE.size:
            raise WireError(f"{data.nbytes} bytes cannot hold a piece of a basis")
        version, widest, first, length, total = _PIECE.unpack_from(data)
        if not min(width, NARROWEST) <= widest <= min(width, WIDEST):
            raise WireError(f"a block of a basis of {width} columns cannot have {widest}")
        piece, rest = data[_PIECE.size : _PIECE.size + length], data[_PIECE.size + length :]
        if piece.nbytes != length or not length or first + length > total or total > most_basis_bytes(width, widest):
            raise WireError(f"a basis of {width} columns in blocks of {widest} has no bytes {first}+{length} of {total}")
        if self.sent is None:
            self._received.add(version, widest, first, total, bytes(piece), width, num_rows)
        return rest

    def find(self, version: int, width: int) -> Basis:
        """The basis of a message that is to be decoded. Raises MissingState when it is not here."""
        return (self._received if self.sent is None else self.sent).find(version, width)


def _find(held: MutableMapping[int, Basis], version: int, width: int) -> Basis:
    basis = held.get(version)
    if basis is None or basis.width != width:
        raise MissingState(f"basis {version} of {width} columns is not here")
    return basis


def _forget(held: MutableMapping[int, _T], most: int) -> None:
    for old in sorted(held)[:-most]:
        del held[old]
