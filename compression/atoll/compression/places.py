"""Ascending places among many to bytes and back, in whichever of three forms is the shortest: a bit for each place there is, or
offsets of one or of two bytes within pieces, and how many lie in each piece.

A piece has as many places as a number of that size can count, one less than it has values, so that a full piece can be told.
The form follows from how many places there are and how many are meant, so nothing has to say which it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.compression.bits import pack_booleans, unpack_booleans
from atoll.protocol.errors import WireError

_SMALL, _LARGE = 255, 65535


def num_bytes(count: int, size: int) -> int:
    """What ``count`` of ``size`` places take."""
    return min(_sizes(count, size))


def to_bytes(places: Tensor, size: int) -> Tensor:
    """The bytes of ascending places below ``size``, on their own device."""
    form = _form(len(places), size)
    if form == 0:
        return pack_booleans(torch.zeros(size, dtype=torch.bool, device=places.device).index_fill_(0, places, True))
    piece, dtype = ((_SMALL, torch.uint8), (_LARGE, torch.int32))[form - 1]
    counts = torch.bincount(places // piece, minlength=-(-size // piece))
    return torch.cat([_bytes_of(numbers.to(dtype), form) for numbers in (counts, places % piece)])


def from_bytes(data: Tensor, count: int, size: int) -> Tensor:
    """The inverse; raises WireError for what cannot be ``count`` ascending places below ``size``."""
    if count > size or len(data) != num_bytes(count, size):
        raise WireError(f"{len(data)} bytes cannot be {count} of {size} places")
    form = _form(count, size)
    if form == 0:
        places = unpack_booleans(data, size).nonzero().squeeze(1)
    else:
        piece = (_SMALL, _LARGE)[form - 1]
        numbers = _numbers_of(data, form)
        counts, offsets = numbers[: -(-size // piece)], numbers[-(-size // piece) :]
        if int(counts.sum()) != count:
            raise WireError(f"{int(counts.sum())} places where {count} were due")
        places = torch.arange(len(counts)).repeat_interleave(counts) * piece + offsets
    ascending = bool((places.diff() > 0).all()) and len(places) == count
    if not ascending or (count and int(places[-1]) >= size):
        raise WireError(f"these are not {count} ascending places below {size}")
    return places


def _sizes(count: int, size: int) -> tuple[int, int, int]:
    return -(-size // 8), count - (-size // _SMALL), 2 * (count - (-size // _LARGE))


def _form(count: int, size: int) -> int:
    sizes = _sizes(count, size)
    return sizes.index(min(sizes))


def _bytes_of(numbers: Tensor, width: int) -> Tensor:
    """Numbers of one byte, or of 32 bits of which two bytes are sent."""
    return numbers if width == 1 else numbers.view(torch.uint8).view(-1, 4)[:, :2].reshape(-1)


def _numbers_of(data: Tensor, width: int) -> Tensor:
    if width == 1:
        return data.long()
    pairs = data.view(-1, 2).long()
    return pairs[:, 0] + 256 * pairs[:, 1]
