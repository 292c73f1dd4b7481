"""A transform codec: directions that matter little get few bits, or none.

A tensor is seen as rows of its last dimension. Its rows are rotated into the basis of their running covariance, in which the
components are uncorrelated; all components are rounded with one step, so those of small variance become mostly zeros (this is
the best way to share bits out: "reverse water-filling"); the symbols are entropy-coded, strong components apart from weak ones.
The step follows the rate: it is set so that a value takes the given number of bits, whatever the values are.

Gradients are rounded with subtractive dither: unbiased, which matters more to them than the error. Activations are rounded to
the nearest: dither would add noise to every direction that is weaker than the step.

State. The sender has the covariance, the step and the version of the basis; the receiver the latest bases
(:mod:`atoll.compression.bases`). A message says which version it uses and with which step it was rounded. Version 0 is no
rotation. A message that needs a piece of a basis which is still on its way raises :class:`MissingState`: it can be decoded
after that one.

Of a tensor of four dimensions whose second is longer than its last, as images with few places left have them, the rows go along
the second: its channels.

On the wire: a header; a mask of the rows that are not all zero, if some are; a piece of a basis, if one is on its way; the
symbols, component by component. Tensors below SMALLEST elements travel as blocks of 8-bit integers, zeros as a header.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from atoll.compression import dither
from atoll.compression.bases import Bases, mean_shipped, most_shipped
from atoll.compression.bits import pack_booleans, unpack_booleans
from atoll.compression.context import CodecContext, Direction
from atoll.compression.quantization import BlockCodec
from atoll.compression.rate import StepControl
from atoll.compression.symbols import LARGEST_SYMBOL, SymbolCoder, most_bytes
from atoll.protocol.errors import WireError
from atoll.protocol.tensors import Buffer, num_elements, tensor_to_bytes

SMALLEST = 1024
"""Elements below which headers and tables are no small part of the message."""

_HEADER = struct.Struct("<BIf")  # flags, version of the basis, step
_INTEGERS, _ZEROS, _MASK, _PIECE, _DITHERED = 1, 2, 4, 8, 16
_OVERRUN = 1.3  # of the bits asked for, at most: a later message makes up for it
_MOST_BITS = 5.0  # where the error is bounded: 1 % takes normal numbers 3.6 bits
_UNBIASED = (Direction.BACKWARD,)  # where rounding is dithered
_DITHERED_FINENESS = 1.0 / 16  # weak components that strong ones leak into cost bits under dither, else they are zeros
_FIRST_STEP = 0.25  # before there is one
_LARGEST = 2.0**100  # magnitudes above, or a largest one below its inverse, travel raw: squares and steps stay finite
_FIRST_TOLERANCE, _TOLERANCE = 0.05, 0.25
_FIRST_ATTEMPTS, _ATTEMPTS = 8, 3


@dataclass(frozen=True, slots=True)
class _Payload:
    """Symbols and the step they were rounded with, as the receiver sees it."""

    data: bytes
    step: float


class TransformCodec:
    """``bits`` a value, without bases; more for activations that would lose more than ``most_error`` of their squared norm, as
    they do while the weights are new. Declines what is not real floating point, tensors that it would not make shorter, and
    tensors with an infinity, a NaN, or magnitudes above 1e30 or all below 1e-30. Codecs of one edge and direction at one end
    may share ``bases``."""

    has_state = True
    fixed_rate = False

    def __init__(self, name: str, *, bits: float, most_error: float, bases: Bases | None = None) -> None:
        self.name = name
        self._bits = bits
        self._most_error = most_error
        self._integers = BlockCodec("int8", bits=8, block=64, rotated=False)
        self._symbols = SymbolCoder()
        self._bases = Bases() if bases is None else bases
        self._control: StepControl | None = None
        self._width = 0  # of the tensors that the step is for

    def encode(self, tensor: Tensor, context: CodecContext) -> Buffer | None:
        shape = tuple(tensor.shape)
        if not self._shortens(shape, tensor.dtype):
            return None
        if tensor.numel() < SMALLEST:
            data = self._integers.encode(tensor, context)
            return None if data is None else _HEADER.pack(_INTEGERS, 0, 0.0) + bytes(data)
        rows = _as_rows(tensor.detach()).float()
        heights = torch.linalg.vector_norm(rows, math.inf, dim=1)
        largest = float(heights.amax())
        if largest == 0.0:
            return _HEADER.pack(_ZEROS, 0, 0.0)
        if not 1.0 / _LARGEST <= largest <= _LARGEST:  # a NaN is not
            return None
        mask = heights > 0
        if bool(mask.all()):
            return self._encode_rows(rows, largest, tensor.dtype, context, 0, b"")
        bitmap = bytes(tensor_to_bytes(pack_booleans(mask)))
        return self._encode_rows(rows[mask], largest, tensor.dtype, context, _MASK, bitmap)

    def decode(self, data: Buffer, dtype: torch.dtype, shape: tuple[int, ...], context: CodecContext) -> Tensor:
        view = memoryview(data).cast("B")
        if not self._shortens(shape, dtype) or view.nbytes < _HEADER.size:
            raise WireError(f"{self.name} never encodes {dtype} of shape {list(shape)} in {view.nbytes} bytes")
        flags, version, step = _HEADER.unpack_from(view)
        rest = view[_HEADER.size :]
        if flags == _INTEGERS:
            return self._integers.decode(rest, dtype, shape, context)
        if num_elements(shape) < SMALLEST:
            raise WireError(f"{self.name} never encodes {list(shape)} with flags {flags}")
        if flags == _ZEROS and not rest.nbytes:
            return torch.zeros(shape, dtype=dtype)
        if flags & (_INTEGERS | _ZEROS) or not 0.0 < step < float("inf"):
            raise WireError(f"{self.name} never encodes with flags {flags} and step {step}")
        width = _width_of(shape)
        num_rows = num_elements(shape) // width
        mask, rest = _read_mask(rest, num_rows, flags)
        if flags & _PIECE:
            rest = self._bases.read_piece(rest, width, num_rows)
        count = num_rows if mask is None else int(mask.sum())
        basis = self._bases.find(version, width) if version else None
        values = self._symbols.decode(rest, count * width)
        if flags & _DITHERED:
            _dithered(values, context.seed, -1.0, 0.0)
        components = values.mul_(step).view(width, count)
        decoded = components.t().contiguous() if basis is None else basis.synthesise(components)
        if dtype == torch.float16:
            decoded.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        if mask is None:
            return _from_rows(decoded.to(dtype), shape)
        rows = torch.zeros(num_rows, width, dtype=dtype)
        rows[mask] = decoded.to(dtype)
        return _from_rows(rows, shape)

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """At most; with a whole basis, which few messages carry."""
        count = num_elements(shape)
        raw = count * dtype.itemsize
        if not dtype.is_floating_point or dtype.itemsize == 1 or not count:
            return raw
        if count < SMALLEST:
            return min(raw, _HEADER.size + self._integers.num_bytes(shape, dtype))
        width = _width_of(shape)
        rows = count // width
        return min(raw, self._most_payload(count) + _HEADER.size + -(-rows // 8) + most_shipped(rows, width, dtype))

    def mean_bytes(self, shape: tuple[int, ...], dtype: torch.dtype, direction: Direction = Direction.FORWARD) -> int:
        """The bits asked for, and a basis as often as there is a new one."""
        count, most = num_elements(shape), self.num_bytes(shape, dtype)
        if count < SMALLEST or not self._shortens(shape, dtype):
            return most
        payload, width = self._bits * count / 8, _width_of(shape)
        return min(most, _HEADER.size + int(payload + mean_shipped(payload, count // width, width, dtype)))

    def reset(self) -> None:
        """Also the bases, so whoever resets one of the codecs that share them resets all."""
        self._control = None
        self._bases.reset()

    def _shortens(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return self.num_bytes(shape, dtype) < num_elements(shape) * dtype.itemsize

    def _most_payload(self, count: int) -> int:
        return int(max(_MOST_BITS, _OVERRUN * self._bits) * count / 8) + most_bytes(count)

    def _encode_rows(
        self, rows: Tensor, largest: float, dtype: torch.dtype, context: CodecContext, flags: int, bitmap: bytes
    ) -> Buffer | None:
        dithered = context.direction in _UNBIASED
        control, bases = self._control_of(rows.shape[1], dithered), self._bases.to_send
        size = _root_mean_square(rows, largest)
        step = control.step or _FIRST_STEP
        bases.learn(rows, size, dtype, step * _DITHERED_FINENESS if dithered else step)
        basis = bases.used
        components = basis.analyse(rows) if basis else rows.t().contiguous()
        payload = self._quantise(control, components, size, context.seed if dithered else None)
        if len(payload.data) > self._most_payload(rows.numel()):
            return None
        piece = bases.piece(len(payload.data))
        flags |= (_DITHERED if dithered else 0) | (_PIECE if piece else 0)
        header = _HEADER.pack(flags, basis.version if basis else 0, payload.step * size)
        return b"".join([header, bitmap, piece, payload.data])

    def _control_of(self, width: int, dithered: bool) -> StepControl:
        if self._control is None or self._width != width:
            most_error = math.inf if dithered else self._most_error
            self._control = StepControl(self._bits, dithered=dithered, most_error=most_error)
            self._width = width
        return self._control

    def _quantise(self, control: StepControl, components: Tensor, size: float, seed: int | None) -> _Payload:
        """The symbols of components whose root mean square is about ``size``; the step is relative to that."""
        first = control.step is None
        if first:
            control.begin((components / size).square_().mean(1).cpu())
        flat, symbols = components.view(-1), torch.empty_like(components).view(-1)
        for _ in range(_FIRST_ATTEMPTS if first else _ATTEMPTS):
            assert control.step is not None
            step = control.step
            torch.mul(flat, 1.0 / (step * size), out=symbols)
            error = 0.0
            if seed is not None:
                _dithered(symbols, seed, 1.0, 0.5).floor_()
            else:
                whole = symbols.round()
                error = float(functional.mse_loss(symbols, whole)) * step**2
                symbols = whole
            payload = _Payload(self._symbols.encode(_on_the_cpu(symbols.clamp_(-LARGEST_SYMBOL, LARGEST_SYMBOL))), step)
            bits = 8 * len(payload.data) / symbols.numel()
            off = control.misses(bits, error, _FIRST_TOLERANCE if first else _TOLERANCE)
            control.learn(bits, error)
            if not off:
                break
        return payload


def _channels_second(shape: tuple[int, ...]) -> bool:
    return len(shape) == 4 and shape[1] > shape[3]


def _width_of(shape: tuple[int, ...]) -> int:
    return shape[1] if _channels_second(shape) else shape[-1]


def _as_rows(tensor: Tensor) -> Tensor:
    along = tensor.movedim(1, -1) if _channels_second(tuple(tensor.shape)) else tensor
    return along.reshape(-1, along.shape[-1])


def _from_rows(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    if not _channels_second(shape):
        return rows.reshape(shape)
    return rows.reshape(shape[0], shape[2], shape[3], shape[1]).movedim(-1, 1).contiguous()


def _root_mean_square(rows: Tensor, largest: float) -> float:
    """Of numbers whose largest is within bounds; their squares in fp32 need not be."""
    scaled = rows if 2.0**-40 < largest < 2.0**40 else rows / largest
    factor = 1.0 if scaled is rows else largest
    return max(2.0**-20 * largest, factor * float(torch.linalg.vector_norm(scaled)) / math.sqrt(rows.numel()))


def _on_the_cpu(symbols: Tensor) -> Tensor:
    """Entropy coding is the processor's work; symbols go there in a byte each where they are as small as nearly all are."""
    if symbols.device.type == "cpu":
        return symbols
    small = float(symbols.abs().amax()) <= torch.iinfo(torch.int8).max
    return symbols.to(torch.int8 if small else torch.int32).cpu().float()


def _dithered(values: Tensor, seed: int, sign: float, shift: float) -> Tensor:
    """Adds the dither times ``sign``, and ``shift``."""
    num_windows = -(-values.numel() // dither.WINDOW)
    drawn = dither.Dither(seed, num_windows, shift)
    if values.device.type != "cpu":
        return values.add_(drawn.windows(0, num_windows, values.device)[: values.numel()], alpha=sign)
    for window, first in enumerate(range(0, values.numel(), dither.WINDOW)):
        part = values[first : first + dither.WINDOW]
        part.add_(drawn.window(window)[: len(part)], alpha=sign)
    return values


def _read_mask(data: memoryview, num_rows: int, flags: int) -> tuple[Tensor | None, memoryview]:
    if not flags & _MASK:
        return None, data
    num_bytes = -(-num_rows // 8)
    if data.nbytes < num_bytes:
        raise WireError(f"{data.nbytes} bytes cannot hold a mask of {num_rows} rows")
    mask = unpack_booleans(torch.frombuffer(bytearray(data[:num_bytes]), dtype=torch.uint8), num_rows)
    if not bool(mask.any()):
        raise WireError("a mask of no rows")
    return mask, data[num_bytes:]
