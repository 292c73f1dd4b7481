"""Blocks of numbers as integers of few bits and a scale, rounded with subtractive dither.

A block is ``block`` neighbouring elements. Its scale maps the largest magnitude to the outermost code that dither cannot push
out of range, so nothing is clipped and the error of each code is uniform in one step, whatever the value: rounding has no
bias. Scales are bfloat16, rounded up: they have the range of float32, which tiny gradients need and float16 has not, and the
rounding costs half a percent of the squared error.

A *rotated* block is multiplied by a Hadamard matrix with signs from the seed before it is quantised, and back afterwards. That
spreads an outlier over the block, without which so few bits would be spent on it alone. The way back is exact but for one
rounding (:mod:`atoll.compression.dither` says why), so it gives the same bits on every machine.

On the wire: the scales, then the codes of block after block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from scipy.linalg import hadamard
from torch import Tensor
from torch.nn import functional

from atoll.compression import dither
from atoll.compression.bits import pack, unpack
from atoll.compression.context import CodecContext, Direction
from atoll.protocol.errors import WireError
from atoll.protocol.tensors import Buffer, num_elements, tensor_from_bytes

_SCALE_BYTES = 2
_LARGEST = 2.0**112  # of a scale: a multiple of a larger one might be infinite, so such tensors travel raw
_SMALLEST = 2.0**-120  # of a scale: the reciprocal of a smaller one might be infinite, so such blocks arrive as zeros
_WINDOWS_AT_ONCE = 256  # where there is no cache to stay in: 32 MiB for each intermediate result


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """``bits`` a code, ``block`` codes a scale."""

    bits: int
    block: int
    rotated: bool

    def num_blocks(self, count: int) -> int:
        return -(-count // self.block)

    def num_bytes(self, count: int) -> int:
        """What ``count`` elements take. A rotated block is whole, for each of its codes depends on all of its elements."""
        coded = self.num_blocks(count) * self.block if self.rotated else count
        return _SCALE_BYTES * self.num_blocks(count) + coded * self.bits // 8

    @property
    def middle(self) -> float:
        """What is added to a scaled number so that codes begin at 0."""
        return 2.0 ** (self.bits - 1)

    def split(self, packed: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The scales, and the codes' bytes with a block a row, of bytes for whole blocks."""
        edge = _SCALE_BYTES * self.num_blocks(count)
        return packed[:edge].view(torch.int16), packed[edge:].view(-1, self.block * self.bits // 8)

    def windows(self, count: int, at_once: int) -> Iterator[tuple[int, slice, slice]]:
        """Number, elements and blocks of each piece of ``at_once`` windows."""
        elements = at_once * dither.WINDOW
        blocks = elements // self.block
        for piece in range(-(-count // elements)):
            first, end = piece * elements, min((piece + 1) * elements, count)
            yield piece * at_once, slice(first, end), slice(piece * blocks, self.num_blocks(end))

    def rotation(self, seed: int) -> Tensor:
        """The orthogonal matrix that rows are multiplied by, times the root of the block's size: its entries are signs."""
        return dither.signs(seed, self.block).unsqueeze(1) * _hadamard(self.block)


class BlockCodec:
    """Declines what is not real floating point, tensors that it would not make shorter, and tensors with an infinity, a NaN or
    a magnitude above some 1e34. Blocks whose magnitudes are all below some 1e-34 arrive as zeros.
    """

    has_state = False
    fixed_rate = True

    def __init__(self, name: str, *, bits: int, block: int, rotated: bool) -> None:
        assert dither.WINDOW % block == 0
        self.name = name
        self._format = BlockFormat(bits=bits, block=block, rotated=rotated)

    def encode(self, tensor: Tensor, context: CodecContext) -> Buffer | None:
        if not self._shortens(tuple(tensor.shape), tensor.dtype):
            return None
        flat = tensor.detach().reshape(-1)
        count, form = flat.numel(), self._format
        coded = form.num_bytes(count)
        whole = form.num_blocks(count) * form.block
        packed = torch.empty(form.num_bytes(whole), dtype=torch.uint8, device=flat.device)
        scales, codes = form.split(packed, count)
        at_once = _windows_at_once(flat.device)
        encoding = _Encoding(form, context.seed, flat.device, at_once, count)
        for window, elements, blocks in form.windows(count, at_once):
            encoding.run(window, flat[elements], blocks, codes[blocks])
        return packed[:coded].cpu().numpy().data if encoding.finish(scales) else None

    def decode(self, data: Buffer, dtype: torch.dtype, shape: tuple[int, ...], context: CodecContext) -> Tensor:
        if not self._shortens(shape, dtype):
            raise WireError(f"{self.name} never encodes {dtype} of shape {list(shape)}")
        count, form = num_elements(shape), self._format
        packed = tensor_from_bytes(data, torch.uint8, (form.num_bytes(count),))
        missing = form.num_bytes(form.num_blocks(count) * form.block) - packed.numel()
        if missing:
            packed = functional.pad(packed, (0, missing))
        scales, codes = form.split(packed, count)
        result = torch.empty(count, dtype=dtype)
        decoding = _Decoding(form, context.seed, count)
        for window, elements, blocks in form.windows(count, at_once=1):
            decoding.run(window, scales[blocks], codes[blocks], result[elements])
        return result.reshape(shape)

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        count = num_elements(shape)
        return self._format.num_bytes(count) if self._shortens(shape, dtype) else count * dtype.itemsize

    def mean_bytes(self, shape: tuple[int, ...], dtype: torch.dtype, direction: Direction = Direction.FORWARD) -> int:
        return self.num_bytes(shape, dtype)

    def reset(self) -> None:
        """There is no state."""

    def _shortens(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        count = num_elements(shape)
        return dtype.is_floating_point and dtype.itemsize > 1 and self._format.num_bytes(count) < count * dtype.itemsize


@cache
def _hadamard(size: int) -> Tensor:
    return torch.from_numpy(hadamard(size)).float()


def _windows_at_once(device: torch.device) -> int:
    return 1 if device.type == "cpu" else _WINDOWS_AT_ONCE


class _Encoding:
    """Encodes one tensor piece by piece, in memory that is allocated once."""

    def __init__(self, form: BlockFormat, seed: int, device: torch.device, at_once: int, count: int) -> None:
        rows = min(at_once * dither.WINDOW // form.block, form.num_blocks(count))
        self._format = form
        self._device = device
        self._at_once = at_once
        # With half a step on top, so that cutting off the fraction rounds.
        self._dither = dither.Dither(seed, -(-count // dither.WINDOW), form.middle)
        self._rotation = (form.rotation(seed) / form.block**0.5).to(device) if form.rotated else None
        self._values, self._turned, self._work = (torch.empty(rows, form.block, device=device) for _ in range(3))
        self._codes = torch.empty(rows, form.block, dtype=torch.int32, device=device)
        self._factors = torch.empty(rows, 1, device=device)
        self._scales = torch.empty(form.num_blocks(count), device=device)
        self._scale_bits = self._scales.view(torch.int32)

    def run(self, window: int, source: Tensor, blocks: slice, packed: Tensor) -> None:
        """Encodes the elements ``source``, which are these blocks of the tensor, into ``packed``."""
        rows = len(packed)
        values, work, codes = self._in_blocks(source, rows), self._work[:rows], self._codes[:rows]
        scales = torch.amax(torch.abs(values, out=work), 1, out=self._scales[blocks])
        scales.div_(self._format.middle - 0.5)
        self._scale_bits[blocks].add_(0xFFFF).bitwise_and_(-0x10000)  # up to the next bfloat16
        factors = torch.clamp(scales.unsqueeze(1), min=_SMALLEST, out=self._factors[:rows]).reciprocal_()
        torch.addcmul(self._dither_of(window, rows), values, factors, out=work)
        codes.copy_(work)
        pack(codes, self._format.bits, packed)

    def finish(self, scales: Tensor) -> bool:
        """Writes all scales; false when some number was too large for its block to be decoded."""
        if not bool(self._scales.amax() <= _LARGEST):  # a NaN is not
            return False
        functional.threshold(self._scales, _SMALLEST, 0.0, inplace=True)
        scales.copy_(self._scale_bits.bitwise_right_shift_(16))
        return True

    def _in_blocks(self, source: Tensor, rows: int) -> Tensor:
        values = self._values[:rows]
        if source.numel() == values.numel() and source.dtype == values.dtype:
            values = source.view(values.shape)
        else:
            flat = values.view(-1)
            flat[: source.numel()] = source
            flat[source.numel() :] = 0.0
        return values if self._rotation is None else torch.mm(values, self._rotation, out=self._turned[:rows])

    def _dither_of(self, window: int, rows: int) -> Tensor:
        if self._at_once == 1:
            flat = self._dither.window(window)
        else:
            flat = self._dither.windows(window, window + self._at_once, self._device)
        return flat[: rows * self._format.block].view(rows, -1)


class _Decoding:
    """Decodes one tensor window by window."""

    def __init__(self, form: BlockFormat, seed: int, count: int) -> None:
        rows = min(dither.WINDOW // form.block, form.num_blocks(count))
        self._format = form
        self._dither = dither.Dither(seed, -(-count // dither.WINDOW), form.middle - 0.5)
        self._rotation = form.rotation(seed).t().contiguous() if form.rotated else None
        self._work, self._turned = (torch.empty(rows, form.block) for _ in range(2))
        self._steps = torch.empty(rows, 1)

    def run(self, window: int, scales: Tensor, packed: Tensor, result: Tensor) -> None:
        """Decodes ``scales`` and ``packed`` into the elements ``result``."""
        rows, form = len(scales), self._format
        values = self._work[:rows]
        unpack(packed, form.bits, values)
        values.sub_(self._dither.window(window)[: values.numel()].view(values.shape))
        steps = self._steps[:rows].copy_(scales.view(torch.bfloat16).unsqueeze(1))
        if self._rotation is not None:
            values = torch.mm(values, self._rotation, out=self._turned[:rows])
            steps.mul_(form.block**-0.5)
        if result.numel() == values.numel() and result.dtype == values.dtype:
            torch.mul(values, steps, out=result.view(values.shape))
            return
        values.mul_(steps)
        if result.dtype == torch.float16:
            largest = torch.finfo(torch.float16).max
            values.clamp_(-largest, largest)
        result.copy_(values.view(-1)[: result.numel()])
