"""Which directions a boundary's tensors lie in: a running covariance, and the Karhunen-Loeve basis made of it.

Eigen-decompositions differ between machines, so the sender makes the basis and ships it, rounded. What it ships is the
*synthesis*, by which the receiver multiplies; the sender multiplies by the inverse of the very numbers that it shipped, so
their rounding costs no accuracy, only a little of the basis' orthogonality: strong components then leak into weak ones. So a
component's direction is rounded the more finely the stronger it is, with a step of a power of two, and the whole numbers are
entropy-coded: 3-6 bits each instead of the 16 of half precision.

A wide tensor is cut into blocks of neighbouring columns, each with a basis of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from atoll.compression.symbols import LARGEST_SYMBOL, SymbolCoder, most_bytes
from atoll.protocol.errors import WireError

WIDEST = 512
"""Columns of a block, at most. Its rotation takes 2 x 512 operations a value, a twelfth of what one layer of a transformer of
this width computes for it going forward; its eigen-decomposition takes some 20 ms of one core, where 1024 columns take 110."""

NARROWEST = 16
_MEMORY = 10  # messages, at least, that the covariance is a mean of
_ROWS_A_COLUMN = 5  # rows, at least, that it is a mean of
_SAMPLED_ROWS = 128  # of a message: adding them up takes a quarter of the time of rotating 512
_LEAK = 0.125  # of a quantiser's step: the root mean square of what a component gets of all others
_COARSEST = 0.5  # of the root mean square of the numbers of a direction
_FINEST_EXPONENT = 14
_CODED_BITS = 5  # of a number, about


def blocks_of(width: int, widest: int) -> list[slice]:
    """Columns in blocks of nearly equal size."""
    number = -(-width // widest)
    return [slice(place * width // number, (place + 1) * width // number) for place in range(number)]


def num_entries(width: int, widest: int) -> int:
    """The numbers of a basis."""
    return sum((block.stop - block.start) ** 2 for block in blocks_of(width, widest))


def most_basis_bytes(width: int, widest: int) -> int:
    """What a basis takes on the wire, at most."""
    return width + 2 * num_entries(width, widest) + most_bytes(num_entries(width, widest))


def mean_basis_bytes(width: int, widest: int) -> int:
    """What a basis takes on the wire, about."""
    return width + _CODED_BITS * num_entries(width, widest) // 8


def _strongest_first(blocks: list[slice]) -> Tensor:
    """An order of all components that has neighbours of like rank in their blocks, for each block begins with its strongest."""
    ranks = [torch.arange(block.stop - block.start) / (block.stop - block.start) for block in blocks]
    return torch.argsort(torch.cat(ranks), stable=True)


@dataclass(slots=True, eq=False)
class Basis:
    """A version of a basis: a matrix for each block of at most ``widest`` columns. A direction is a row of a block's
    ``numbers`` (whole ones, in fp32) times two to the minus ``exponents``, of which there is one for each direction."""

    version: int
    width: int
    widest: int
    numbers: list[Tensor]
    exponents: list[Tensor]
    _synthesis: list[Tensor] = field(default_factory=list)
    _analysis: list[Tensor] = field(default_factory=list)
    _order: Tensor | None = None

    def __post_init__(self) -> None:
        steps = [torch.exp2(-exponents.float()).unsqueeze(1) for exponents in self.exponents]
        self._synthesis = [numbers * step for numbers, step in zip(self.numbers, steps, strict=True)]
        if len(self.numbers) > 1:
            self._order = _strongest_first(blocks_of(self.width, self.widest))

    def analyse(self, rows: Tensor) -> Tensor:
        """The components of ``rows``, a row each."""
        if not self._analysis:
            inverses = [torch.linalg.inv(block.double()) for block in self._synthesis]
            self._analysis = [inverse.t().to(rows.device, torch.float32).contiguous() for inverse in inverses]
        parts = zip(blocks_of(self.width, self.widest), self._analysis, strict=True)
        components = [_product(inverse, rows[:, part].t()) for part, inverse in parts]
        return components[0] if self._order is None else torch.cat(components).index_select(0, self._order.to(rows.device))

    def synthesise(self, components: Tensor) -> Tensor:
        """The rows that have these components. Those that are zero in all rows cost nothing."""
        if self._order is not None:
            components = torch.empty_like(components).index_copy_(0, self._order, components)
        rows = []
        for part, block in zip(blocks_of(self.width, self.widest), self._synthesis, strict=True):
            used = components[part].any(1).nonzero().squeeze(1)
            last = int(used[-1]) + 1 if len(used) else 0
            rows.append(_product(components[part][:last].t(), block[:last]))
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def to_bytes(self) -> bytes:
        """All exponents, a byte each, and all numbers, direction by direction."""
        exponents = torch.cat(self.exponents).to(torch.int8).numpy().tobytes()
        return exponents + SymbolCoder().encode(torch.cat([block.view(-1) for block in self.numbers]))

    @classmethod
    def from_bytes(cls, data: memoryview, version: int, width: int, widest: int) -> Basis:
        """The inverse. Raises WireError for what is none."""
        if data.nbytes < width:
            raise WireError(f"a basis of {width} columns in blocks of {widest} cannot be {data.nbytes} bytes")
        parts = blocks_of(width, widest)
        sizes = [part.stop - part.start for part in parts]
        exponents = torch.frombuffer(bytearray(data[:width]), dtype=torch.int8)
        numbers = SymbolCoder().decode(data[width:], num_entries(width, widest))
        squares = torch.split(numbers, [size**2 for size in sizes])
        blocks = [square.view(size, size) for square, size in zip(squares, sizes, strict=True)]
        return cls(version, width, widest, blocks, list(torch.split(exponents, sizes)))


class Covariance:
    """The mean outer product of the rows seen, older ones counting less and less; in blocks."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._slices = blocks_of(width, WIDEST) if width else []
        self._blocks: list[Tensor] = []
        self._num_messages = 0

    def add(self, rows: Tensor, size: float) -> None:
        """Counts some of ``rows``, divided by ``size``, which makes them of about the same size in all messages."""
        wanted = _SAMPLED_ROWS if self._num_messages >= _MEMORY else 4 * WIDEST
        # Another place to begin at each time, for rows of the same places in their samples may be alike.
        every = max(1, len(rows) // wanted)
        sampled = rows[self._num_messages % every :: every] / size
        outer = [torch.mm(sampled[:, part].t(), sampled[:, part]).div_(len(sampled)) for part in self._slices]
        self._num_messages += 1
        if not self._blocks:
            self._blocks = outer
            return
        lasting = min(1.0 / _MEMORY, len(sampled) / (_ROWS_A_COLUMN * min(WIDEST, self._width)))
        for block, fresh in zip(self._blocks, outer, strict=True):
            block.lerp_(fresh, max(1.0 / self._num_messages, lasting))

    def basis(self, version: int, widest: int, step: float) -> Basis | None:
        """Eigenvectors, the strongest first, of blocks of at most ``widest`` columns, as exact as a quantiser of this step
        needs them; None where there are none to be had."""
        numbers, exponents = [], []
        for part in blocks_of(self._width, widest):
            try:
                variances, vectors = torch.linalg.eigh(self._part(part).cpu())
            except RuntimeError:  # it does not converge
                return None
            whole, fineness = _rounded(vectors.flip(1).t(), variances.flip(0), step)
            numbers.append(whole)
            exponents.append(fineness)
        return Basis(version, self._width, widest, numbers, exponents)

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


def _product(one: Tensor, other: Tensor) -> Tensor:
    """A matrix product in single precision, or in bfloat16 where the processor does that several times as fast: what rounding
    to it loses is a few millionths of the square, and what a quantiser loses is a hundred times more."""
    if _quick_in_bfloat16():  # on other devices as well, so that bytes do not depend on where a tensor is
        return torch.mm(one.bfloat16(), other.bfloat16()).float()
    return torch.mm(one, other)


@cache
def _quick_in_bfloat16() -> bool:
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def _rounded(directions: Tensor, variances: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """Whole numbers and exponents of some directions, a row each.

    Rounded with a step d, a component of deviation s gives each other one d * s / sqrt(12) of itself; ``step`` and deviations
    are in units of the root mean square of all columns.
    """
    size = len(directions)
    coarsest = _COARSEST * size**-0.5
    steps = _LEAK * step * (12.0 / size) ** 0.5 / variances.clamp(min=1e-12).sqrt()
    exponents = steps.clamp(max=coarsest).log2().neg().ceil().clamp(max=_FINEST_EXPONENT)
    numbers = (directions * torch.exp2(exponents).unsqueeze(1)).round().clamp(-LARGEST_SYMBOL, LARGEST_SYMBOL)
    return numbers.contiguous(), exponents.to(torch.int8)


def widest_block(num_rows: int, width: int, dtype: torch.dtype) -> int:
    """Columns of a block of a basis that a message of so many rows may carry, 0 for none.

    As many as rows, for its basis then takes two bytes a value at most: the message that ships it is little longer than one in
    half precision. Of a type that is no longer itself, half as many. Blocks of few columns are not worth it.
    """
    widest = min(WIDEST, width, num_rows if dtype.itemsize > 2 else num_rows // 2)
    return widest if widest >= min(width, NARROWEST) and width > 1 else 0
