"""Codecs that send the largest elements alone, as baselines: at every rate quantisers have cost training less.

:class:`TopKCodec` sends values as 8-bit integers and places in their shortest form. A gradient is sent for the elements that
its activation was sent for, without places, or for the largest of these where it is to have fewer; without the mask of its
activation (that one used another codec, was sent raw, or is of another shape) it gets one of its own. A message says which;
a receiver that has not got the mask it was made with refuses it: the step is void, and both ends begin anew.

:class:`SparseCodec` is the wire format of FusionLLM's AdaTopK (arXiv 2410.12707): single precision and 64-bit places, and
:func:`adaptive_ratios` what each link keeps there.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.compression import places
from atoll.compression.context import CodecContext, Direction
from atoll.compression.masks import Mask, Masks
from atoll.compression.quantization import BlockCodec
from atoll.protocol.errors import WireError
from atoll.protocol.tensors import Buffer, num_elements, tensor_from_bytes, tensor_to_bytes

_HEADER = struct.Struct("<BI")  # whether the places are those of the activation, elements sent
_SHARED = 1
_MOST_ELEMENTS = 2**31 - 1  # of a tensor: places are counted in 32 bits
_PLACE_BYTES, _VALUE_BYTES = 8, 4


def largest(values: Tensor, count: int) -> Tensor:
    """The places of the ``count`` largest magnitudes, ascending. NaN counts as the largest of all."""
    return torch.topk(values.abs(), count, sorted=False).indices.sort().values


class TopKCodec:
    """Sends the fraction ``share`` of the elements, at least one. Declines what is not real floating point, tensors that it
    would not make shorter, and those of which an infinity, a NaN or a magnitude above some 1e34 would be sent."""

    has_state = True
    fixed_rate = False

    def __init__(self, name: str, *, share: float, masks: Masks) -> None:
        self.name = name
        self._share = share
        self._masks = masks
        self._integers = BlockCodec("int8", bits=8, block=64, rotated=False)

    def encode(self, tensor: Tensor, context: CodecContext) -> Buffer | None:
        shape = tuple(tensor.shape)
        if not self._shortens(shape, tensor.dtype):
            return None
        flat = tensor.detach().reshape(-1)
        mask = self._masks.take(context, shape) if context.direction is Direction.BACKWARD else None
        domain = flat if mask is None else flat[mask.places.to(flat.device)]
        count = min(self._count(len(flat)), len(domain))
        chosen = largest(domain, count) if count < len(domain) else None
        values = domain if chosen is None else domain[chosen]
        coded = self._integers.encode(values, context)
        if coded is None:
            return None
        if context.direction is Direction.FORWARD and chosen is not None:
            self._masks.keep(context, Mask(chosen, shape))
        header = _HEADER.pack(0 if mask is None else _SHARED, count)
        where = b"" if chosen is None else tensor_to_bytes(places.to_bytes(chosen, len(domain)))
        return b"".join([header, where, coded])

    def decode(self, data: Buffer, dtype: torch.dtype, shape: tuple[int, ...], context: CodecContext) -> Tensor:
        view = memoryview(data).cast("B")
        if not self._shortens(shape, dtype) or view.nbytes < _HEADER.size:
            raise WireError(f"{self.name} never encodes {dtype} of shape {list(shape)} in {view.nbytes} bytes")
        flags, count = _HEADER.unpack_from(view)
        rest = view[_HEADER.size :]
        domain = self._domain(flags, shape, context)
        size = num_elements(shape) if domain is None else len(domain)
        if not 0 < count <= size:
            raise WireError(f"{count} elements of {size} cannot have been sent")
        num_places = places.num_bytes(count, size) if count < size else 0
        chosen = (
            places.from_bytes(tensor_from_bytes(rest[:num_places], torch.uint8, (num_places,)), count, size)
            if num_places
            else None
        )
        values = self._integers.decode(rest[num_places:], dtype, (count,), context)
        if context.direction is Direction.FORWARD and chosen is not None:
            self._masks.keep(context, Mask(chosen, shape))
        where = chosen if domain is None else domain if chosen is None else domain[chosen]
        if where is None:
            return values.reshape(shape)
        return torch.zeros(num_elements(shape), dtype=dtype).index_copy_(0, where, values).reshape(shape)

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        count = num_elements(shape)
        return self._sent_bytes(count, dtype) if self._shortens(shape, dtype) else count * dtype.itemsize

    def mean_bytes(self, shape: tuple[int, ...], dtype: torch.dtype, direction: Direction = Direction.FORWARD) -> int:
        """Gradients are counted without places, as they are where activations use this codec too."""
        size = self.num_bytes(shape, dtype)
        if direction is Direction.FORWARD or not self._shortens(shape, dtype):
            return size
        count = num_elements(shape)
        return size - places.num_bytes(self._count(count), count)

    def reset(self) -> None:
        self._masks.clear()

    def _count(self, size: int) -> int:
        return max(1, round(self._share * size))

    def _sent_bytes(self, size: int, dtype: torch.dtype) -> int:
        count = self._count(size)
        where = places.num_bytes(count, size) if count < size else 0
        return _HEADER.size + where + self._integers.num_bytes((count,), dtype)

    def _shortens(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        size = num_elements(shape)
        if not dtype.is_floating_point or not 0 < size <= _MOST_ELEMENTS:
            return False
        count = self._count(size)
        coded = self._integers.num_bytes((count,), dtype) < count * dtype.itemsize
        return coded and self._sent_bytes(size, dtype) < size * dtype.itemsize

    def _domain(self, flags: int, shape: tuple[int, ...], context: CodecContext) -> Tensor | None:
        if not flags:
            return None
        mask = self._masks.take(context, shape) if context.direction is Direction.BACKWARD else None
        if flags != _SHARED or mask is None:
            raise WireError(f"{self.name}: no mask of {context.edge} in microbatch {context.microbatch} of step {context.step}")
        return mask.places.cpu()


class SparseCodec:
    """Sends one element in ``ratio``, the largest, each as its value in fp32 and its place in 64 bits. Declines what is not
    real floating point of at least 32 bits, tensors that it would not make shorter, and those with an infinity or a NaN."""

    has_state = False
    fixed_rate = True

    def __init__(self, name: str, *, ratio: float) -> None:
        self.name = name
        self._ratio = ratio

    def encode(self, tensor: Tensor, context: CodecContext) -> Buffer | None:
        if not self._shortens(tuple(tensor.shape), tensor.dtype):
            return None
        flat = tensor.detach().reshape(-1)
        where = largest(flat, self._count(len(flat)))
        values = flat[where].float()
        if not bool(values.isfinite().all()):
            return None
        return tensor_to_bytes(torch.cat([where.view(torch.uint8), values.view(torch.uint8)]))

    def decode(self, data: Buffer, dtype: torch.dtype, shape: tuple[int, ...], context: CodecContext) -> Tensor:
        size = num_elements(shape)
        count = self._count(size)
        if not self._shortens(shape, dtype):
            raise WireError(f"{self.name} never encodes {dtype} of shape {list(shape)}")
        packed = tensor_from_bytes(data, torch.uint8, ((_PLACE_BYTES + _VALUE_BYTES) * count,))
        where, values = packed[: _PLACE_BYTES * count].view(torch.int64), packed[_PLACE_BYTES * count :].view(torch.float32)
        if int(where[0]) < 0 or int(where[-1]) >= size or not bool((where[1:] > where[:-1]).all()):
            raise WireError(f"these are not {count} ascending places below {size}")
        return torch.zeros(size, dtype=dtype).index_copy_(0, where, values.to(dtype)).reshape(shape)

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        size = num_elements(shape)
        return (_PLACE_BYTES + _VALUE_BYTES) * self._count(size) if self._shortens(shape, dtype) else size * dtype.itemsize

    def mean_bytes(self, shape: tuple[int, ...], dtype: torch.dtype, direction: Direction = Direction.FORWARD) -> int:
        return self.num_bytes(shape, dtype)

    def reset(self) -> None:
        """There is no state."""

    def _count(self, size: int) -> int:
        return max(1, round(size / self._ratio))

    def _shortens(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        size = num_elements(shape)
        wide = dtype.is_floating_point and dtype.itemsize >= _VALUE_BYTES
        return wide and 0 < (_PLACE_BYTES + _VALUE_BYTES) * self._count(size) < size * dtype.itemsize


def adaptive_ratios(seconds: Sequence[float], ratio: float) -> tuple[float, ...]:
    """AdaTopK: of how many elements each link sends one, ``r_p = max(1, 3 r R_p / max R)``, from the ``seconds`` that each
    takes for its tensor uncompressed. The 3 pays for places: with it the slowest link sends 1/``ratio`` of the bytes."""
    slowest = max(seconds, default=0.0)
    return tuple(max(1.0, 3.0 * ratio * one / slowest) if slowest > 0.0 else 1.0 for one in seconds)
