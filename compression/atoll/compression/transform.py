"""A transform codec: directions that matter little get few bits, or none.

A tensor is seen as rows of its last dimension. Its rows are rotated into the basis of their running covariance, in which the
components are uncorrelated; all components are rounded with one step, so those of small variance become mostly zeros (this is
the best way to share bits out: "reverse water-filling"); the symbols are entropy-coded, strong components apart from weak ones.
The step follows the rate: it is set so that a value takes the given number of bits, whatever the values are.

Gradients are rounded with subtractive dither: unbiased, which matters more to them than the error. Activations are rounded to
the nearest: dither would add noise to every direction that is weaker than the step.

State. The sender has the covariance, the step and the version of the basis; the receiver the latest bases. A message says which
version it uses and with which step it was rounded, and the first one of a version carries the basis. Version 0 is no rotation.
A message that overtook the one with its basis raises :class:`MissingState`: it can be decoded after that one.

On the wire: a header; a mask of the rows that are not all zero, if some are; the basis, if it is new; the symbols, component by
component. Tensors below SMALLEST elements travel as blocks of 8-bit integers, zeros as a header.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.compression import dither
from atoll.compression.basis import Basis, Covariance, basis_bytes, widest_block
from atoll.compression.bits import pack_booleans, unpack_booleans
from atoll.compression.context import CodecContext, Direction
from atoll.compression.quantization import BlockCodec
from atoll.compression.rate import StepControl
from atoll.compression.symbols import LARGEST_SYMBOL, SymbolCoder, most_bytes
from atoll.protocol.errors import MissingState, WireError
from atoll.protocol.tensors import Buffer, num_elements, tensor_to_bytes

SMALLEST = 1024
"""Elements below which headers and tables are no small part of the message."""

_HEADER = struct.Struct("<BHIf")  # flags, columns of a block of the basis, its version, step
_INTEGERS, _ZEROS, _MASK, _BASIS, _DITHERED = 1, 2, 4, 8, 16
_REFRESH_MESSAGES = 20  # a covariance of 10 messages' memory has changed by then
_REFRESH_PAYLOAD = 16  # bytes of symbols for a byte of basis: bases take 6 % at most in the long run
_YOUNG_MESSAGES = 2  # a first basis is soon old: the second comes after so many, the next when there are about twice as many
_OVERRUN = 1.3  # of the bits asked for, at most: a later message makes up for it
_MOST_BITS = 5.0  # where the error is bounded: 1 % takes normal numbers 3.6 bits
_UNBIASED = (Direction.BACKWARD,)  # where rounding is dithered
_KEPT_BASES = 4  # a message may be as many versions late, having been damaged on the way
_LARGEST = 2.0**100  # magnitudes above, or a largest one below its inverse, travel raw: squares and steps stay finite
_FIRST_TOLERANCE, _TOLERANCE = 0.05, 0.25
_FIRST_ATTEMPTS, _ATTEMPTS = 8, 3


@dataclass(frozen=True, slots=True)
class _Payload:
    """Symbols and the step they were rounded with, as the receiver sees it."""

    data: bytes
    step: float


class _Sender:
    """The sender's state for tensors of one width."""

    def __init__(self, width: int, control: StepControl) -> None:
        self.width = width
        self.covariance = Covariance(width)
        self.control = control
        self.basis: Basis | None = None
        self._before = 0  # messages before the present basis, and since
        self._messages = 0
        self._payload = 0

    def renewed(self, version: int, num_rows: int, dtype: torch.dtype) -> Basis | None:
        """A new basis, if it is time for one and a message of so many rows may carry it."""
        widest = widest_block(num_rows, self.width, dtype)
        if not widest:
            return None
        paid = self._messages >= _REFRESH_MESSAGES and self._payload >= _REFRESH_PAYLOAD * basis_bytes(self.width, widest)
        young = self._messages >= self._before + _YOUNG_MESSAGES
        return self.covariance.basis(version, widest) if self.basis is None or paid or young else None

    def sent(self, num_bytes: int, fresh: Basis | None) -> None:
        """Counts a message, which carried ``fresh``."""
        if fresh is not None:
            self._before += self._messages
            self.basis, self._messages, self._payload = fresh, 0, 0
        self._messages += 1
        self._payload += num_bytes


class TransformCodec:
    """``bits`` a value, without bases; more for activations that would lose more than ``most_error`` of their squared norm, as
    they do while the weights are new. Declines what is not real floating point, tensors that it would not make shorter, and
    tensors with an infinity, a NaN, or magnitudes above 1e30 or all below 1e-30."""

    has_state = True
    fixed_rate = False

    def __init__(self, name: str, *, bits: float, most_error: float = math.inf) -> None:
        self.name = name
        self._bits = bits
        self._most_error = most_error
        self._integers = BlockCodec("int8", bits=8, block=64, rotated=False)
        self._symbols = SymbolCoder()
        self._sender: _Sender | None = None
        self._version = 0
        self._bases: dict[int, Basis] = {}

    def encode(self, tensor: Tensor, context: CodecContext) -> Buffer | None:
        shape = tuple(tensor.shape)
        if not self._shortens(shape, tensor.dtype):
            return None
        if tensor.numel() < SMALLEST:
            data = self._integers.encode(tensor, context)
            return None if data is None else _HEADER.pack(_INTEGERS, 0, 0, 0.0) + bytes(data)
        rows = tensor.detach().reshape(-1, shape[-1]).float()
        heights = rows.abs().amax(1)
        largest = float(heights.amax())
        if largest == 0.0:
            return _HEADER.pack(_ZEROS, 0, 0, 0.0)
        if not 1.0 / _LARGEST <= largest <= _LARGEST:  # a NaN is not
            return None
        mask = heights > 0
        if bool(mask.all()):
            return self._encode_rows(rows, tensor.dtype, context, 0, b"")
        return self._encode_rows(rows[mask], tensor.dtype, context, _MASK, bytes(tensor_to_bytes(pack_booleans(mask))))

    def decode(self, data: Buffer, dtype: torch.dtype, shape: tuple[int, ...], context: CodecContext) -> Tensor:
        view = memoryview(data).cast("B")
        if not self._shortens(shape, dtype) or view.nbytes < _HEADER.size:
            raise WireError(f"{self.name} never encodes {dtype} of shape {list(shape)} in {view.nbytes} bytes")
        flags, widest, version, step = _HEADER.unpack_from(view)
        rest = view[_HEADER.size :]
        if flags == _INTEGERS:
            return self._integers.decode(rest, dtype, shape, context)
        if num_elements(shape) < SMALLEST:
            raise WireError(f"{self.name} never encodes {list(shape)} with flags {flags}")
        rows = torch.zeros(num_elements(shape) // shape[-1], shape[-1], dtype=dtype)
        if flags == _ZEROS and not rest.nbytes:
            return rows.reshape(shape)
        if flags & (_INTEGERS | _ZEROS) or not 0.0 < step < float("inf"):
            raise WireError(f"{self.name} never encodes with flags {flags} and step {step}")
        mask, rest = _read_mask(rest, len(rows), flags)
        if flags & _BASIS:
            rest = self._read_basis(rest, version, shape[-1], widest)
        count = len(rows) if mask is None else int(mask.sum())
        values = self._symbols.decode(rest, count * shape[-1])
        if flags & _DITHERED:
            _dithered(values, context.seed, -1.0, 0.0)
        values.mul_(step)
        decoded = self._synthesise(values.view(shape[-1], count), version)
        if dtype == torch.float16:
            decoded.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        if mask is None:
            return decoded.to(dtype).reshape(shape)
        rows[mask] = decoded.to(dtype)
        return rows.reshape(shape)

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """At most; with a basis, which few messages carry."""
        count = num_elements(shape)
        raw = count * dtype.itemsize
        if not dtype.is_floating_point or dtype.itemsize == 1 or not count:
            return raw
        if count < SMALLEST:
            return min(raw, _HEADER.size + self._integers.num_bytes(shape, dtype))
        rows, width = count // shape[-1], shape[-1]
        widest = widest_block(rows, width, dtype)
        basis = basis_bytes(width, widest) if widest else 0
        return min(raw, self._most_payload(count) + _HEADER.size + -(-rows // 8) + basis)

    def mean_bytes(self, shape: tuple[int, ...], dtype: torch.dtype, direction: Direction = Direction.FORWARD) -> int:
        """The bits asked for, and a basis as often as there is a new one."""
        count, most = num_elements(shape), self.num_bytes(shape, dtype)
        if count < SMALLEST or not self._shortens(shape, dtype):
            return most
        payload, widest = self._bits * count / 8, widest_block(count // shape[-1], shape[-1], dtype)
        basis = basis_bytes(shape[-1], widest) if widest else 0
        messages = max(_REFRESH_MESSAGES, _REFRESH_PAYLOAD * basis / payload)
        return min(most, _HEADER.size + int(payload + basis / messages))

    def reset(self) -> None:
        self._sender = None
        self._version = 0
        self._bases = {}

    def _shortens(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return self.num_bytes(shape, dtype) < num_elements(shape) * dtype.itemsize

    def _most_payload(self, count: int) -> int:
        bits = _OVERRUN * self._bits if self._most_error == math.inf else max(_MOST_BITS, _OVERRUN * self._bits)
        return int(bits * count / 8) + most_bytes(count)

    def _encode_rows(self, rows: Tensor, dtype: torch.dtype, context: CodecContext, flags: int, bitmap: bytes) -> Buffer | None:
        dithered = context.direction in _UNBIASED
        sender = self._sender
        if sender is None or sender.width != rows.shape[1]:
            most_error = math.inf if dithered else self._most_error
            sender = _Sender(rows.shape[1], StepControl(self._bits, dithered=dithered, most_error=most_error))
            self._sender = sender
        size = _root_mean_square(rows)
        normal = rows / size
        sender.covariance.add(normal)
        fresh = sender.renewed(self._version + 1, len(rows), dtype)
        basis = fresh or sender.basis
        components = basis.analyse(normal) if basis else normal.t().contiguous()
        payload = self._quantise(sender.control, components, context.seed if dithered else None)
        if len(payload.data) > self._most_payload(rows.numel()):
            return None
        sender.sent(len(payload.data), fresh)
        shipped = b""
        if fresh:
            self._version, shipped = fresh.version, fresh.to_bytes()
            self._bases = {fresh.version: fresh}  # so that it can decode what it has just encoded
        flags |= (_DITHERED if dithered else 0) | (_BASIS if fresh else 0)
        header = _HEADER.pack(flags, basis.widest if basis else 0, basis.version if basis else 0, payload.step * size)
        return b"".join([header, bitmap, shipped, payload.data])

    def _quantise(self, control: StepControl, components: Tensor, seed: int | None) -> _Payload:
        first = control.step is None
        if first:
            control.begin(components.square().mean(1).cpu())
        symbols = torch.empty_like(components).view(-1)
        for _ in range(_FIRST_ATTEMPTS if first else _ATTEMPTS):
            assert control.step is not None
            step = control.step
            torch.mul(components.view(-1), 1.0 / step, out=symbols)
            error = 0.0
            if seed is not None:
                _dithered(symbols, seed, 1.0, 0.5).floor_()
            else:
                scaled = symbols.clone()
                error = float(scaled.sub_(symbols.round_()).square_().mean()) * step**2
            payload = _Payload(self._symbols.encode(_on_the_cpu(symbols.clamp_(-LARGEST_SYMBOL, LARGEST_SYMBOL))), step)
            bits = 8 * len(payload.data) / symbols.numel()
            off = control.misses(bits, error, _FIRST_TOLERANCE if first else _TOLERANCE)
            control.learn(bits, error)
            if not off:
                break
        return payload

    def _read_basis(self, data: memoryview, version: int, width: int, widest: int) -> memoryview:
        if not 1 <= widest <= width:
            raise WireError(f"a block of a basis of {width} columns cannot have {widest}")
        num_bytes = basis_bytes(width, widest)
        self._bases[version] = Basis.from_bytes(data[:num_bytes], version, width, widest)
        for old in sorted(self._bases)[:-_KEPT_BASES]:
            del self._bases[old]
        return data[num_bytes:]

    def _synthesise(self, components: Tensor, version: int) -> Tensor:
        if version == 0:
            return components.t().contiguous()
        basis = self._bases.get(version)
        if basis is None or basis.width != len(components):
            raise MissingState(f"basis {version} of {len(components)} columns is not here")
        return basis.synthesise(components)


def _root_mean_square(rows: Tensor) -> float:
    """Of numbers whose largest is within bounds; their squares in fp32 need not be."""
    scale = float(rows.abs().amax())
    return scale * max(2.0**-20, float(torch.linalg.vector_norm(rows / scale)) / math.sqrt(rows.numel()))


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
