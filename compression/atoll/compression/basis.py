"""Which directions a boundary's tensors lie in: a running covariance, and the Karhunen-Loeve basis made of it.

Eigen-decompositions differ between machines, so the sender makes the basis and ships it in half precision. What it ships is
the *synthesis*, by which the receiver multiplies; the sender multiplies by the inverse of the very numbers that it shipped, so
their rounding costs no accuracy, only a little of the basis' orthogonality.

A wide tensor is cut into blocks of neighbouring columns, each with a basis of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.protocol.errors import WireError

WIDEST = 512
"""Columns of a block, at most. Its rotation takes 2 x 512 operations a value, a twelfth of what one layer of a transformer of
this width computes for it going forward; its eigen-decomposition takes some 20 ms of one core, where 1024 columns take 110."""

_NARROWEST = 16
_MEMORY = 10  # messages, at least, that the covariance is a mean of
_ROWS_A_COLUMN = 16  # rows, at least, that it is a mean of
_SAMPLED_ROWS = 512  # of a message: adding them up costs no more than rotating all


def blocks_of(width: int, widest: int) -> list[slice]:
    """Columns in blocks of nearly equal size."""
    number = -(-width // widest)
    return [slice(place * width // number, (place + 1) * width // number) for place in range(number)]


def basis_bytes(width: int, widest: int) -> int:
    """What a basis takes on the wire."""
    sizes = (block.stop - block.start for block in blocks_of(width, widest))
    return sum(2 * size * size for size in sizes)


def _strongest_first(blocks: list[slice]) -> Tensor:
    """An order of all components that has neighbours of like rank in their blocks, for each block begins with its strongest."""
    ranks = [torch.arange(block.stop - block.start) / (block.stop - block.start) for block in blocks]
    return torch.argsort(torch.cat(ranks), stable=True)


@dataclass(slots=True, eq=False)
class Basis:
    """A version of a basis; ``synthesis`` holds a matrix for each block of at most ``widest`` columns, in fp32 but of half
    precision."""

    version: int
    width: int
    widest: int
    synthesis: list[Tensor]
    analysis: list[Tensor] | None = None

    def _slices(self) -> list[slice]:
        return blocks_of(self.width, self.widest)

    def _order(self) -> Tensor | None:
        return _strongest_first(self._slices()) if len(self.synthesis) > 1 else None

    def analyse(self, rows: Tensor) -> Tensor:
        """The components of ``rows``, a row each."""
        if self.analysis is None:
            inverses = [torch.linalg.inv(block.double()) for block in self.synthesis]
            self.analysis = [inverse.to(rows.device, torch.float32) for inverse in inverses]
        components = torch.empty(self.width, len(rows), device=rows.device)
        for part, inverse in zip(self._slices(), self.analysis, strict=True):
            torch.mm(inverse, rows[:, part].t(), out=components[part])
        order = self._order()
        return components if order is None else components.index_select(0, order.to(rows.device))

    def synthesise(self, components: Tensor) -> Tensor:
        """The rows that have these components."""
        order = self._order()
        if order is not None:
            components = torch.empty_like(components).index_copy_(0, order, components)
        rows = torch.empty(components.shape[1], self.width)
        for part, block in zip(self._slices(), self.synthesis, strict=True):
            torch.mm(components[part].t(), block.t(), out=rows[:, part])
        return rows

    def to_bytes(self) -> bytes:
        """One block after the other, row by row."""
        return b"".join(block.half().numpy().tobytes() for block in self.synthesis)

    @classmethod
    def from_bytes(cls, data: memoryview, version: int, width: int, widest: int) -> Basis:
        """The inverse, without what only the sender has. Raises WireError for a wrong size."""
        if data.nbytes != basis_bytes(width, widest):
            raise WireError(f"a basis of {width} columns in blocks of {widest} cannot be {data.nbytes} bytes")
        numbers = torch.frombuffer(bytearray(data), dtype=torch.float16).float()
        blocks, first = [], 0
        for part in blocks_of(width, widest):
            size = part.stop - part.start
            blocks.append(numbers[first : first + size**2].view(size, size))
            first += size**2
        return cls(version, width, widest, blocks)


class Covariance:
    """The mean outer product of the rows seen, older ones counting less and less; in blocks."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._slices = blocks_of(width, WIDEST)
        self._blocks: list[Tensor] = []
        self._num_messages = 0

    def add(self, rows: Tensor) -> None:
        """Counts some of ``rows``, which are of about the same size in all messages."""
        wanted = _SAMPLED_ROWS if self._blocks else 4 * WIDEST
        sampled = rows[:: max(1, len(rows) // wanted)]
        outer = [torch.mm(sampled[:, part].t(), sampled[:, part]).div_(len(sampled)) for part in self._slices]
        self._num_messages += 1
        if not self._blocks:
            self._blocks = outer
            return
        lasting = min(1.0 / _MEMORY, len(sampled) / (_ROWS_A_COLUMN * min(WIDEST, self._width)))
        for block, fresh in zip(self._blocks, outer, strict=True):
            block.lerp_(fresh, max(1.0 / self._num_messages, lasting))

    def basis(self, version: int, widest: int) -> Basis | None:
        """Eigenvectors, the strongest first, of blocks of at most ``widest`` columns; None where there are none to be had."""
        blocks = []
        for part in blocks_of(self._width, widest):
            try:
                vectors = torch.linalg.eigh(self._part(part).cpu())[1]
            except RuntimeError:  # it does not converge
                return None
            blocks.append(vectors.flip(1).half().float())
        return Basis(version, self._width, widest, blocks)

    def _part(self, wanted: slice) -> Tensor:
        """The covariance of some columns, zero between those of different blocks."""
        size = wanted.stop - wanted.start
        part = torch.zeros(size, size, device=self._blocks[0].device)
        for held, block in zip(self._slices, self._blocks, strict=True):
            first, end = max(wanted.start, held.start), min(wanted.stop, held.stop)
            if first < end:
                target = slice(first - wanted.start, end - wanted.start)
                source = slice(first - held.start, end - held.start)
                part[target, target] = block[source, source]
        return part


def widest_block(num_rows: int, width: int, dtype: torch.dtype) -> int:
    """Columns of a block of a basis that a message of so many rows may carry, 0 for none.

    As many as rows, for its basis is then two bytes a value: the message that ships it is little longer than one in half
    precision. Of a type that is no longer itself, half as many. Blocks of few columns are not worth it.
    """
    widest = min(WIDEST, width, num_rows if dtype.itemsize > 2 else num_rows // 2)
    return widest if widest >= min(width, _NARROWEST) and width > 1 else 0
