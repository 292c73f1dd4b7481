"""Codecs, and what lies below them: symbols, bases, places."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.compression import places
from atoll.compression.basis import Basis, Covariance
from atoll.compression.codec import decode_tensor, encode_tensor
from atoll.compression.context import CodecContext, Direction
from atoll.compression.registry import codec, codec_names
from atoll.compression.symbols import SymbolCoder
from atoll.protocol.ids import MicrobatchIndex, StepNumber
from atoll.protocol.messages import EncodedTensor
from atoll.protocol.tensors import dtype_from_name, num_elements
from support.fuzzing.target import LARGEST_INPUT, RAW_BYTES, Choices, Target, framed

_DTYPES = tuple(
    dtype_from_name(name)
    for name in ("float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool", "uint16", "complex64", "float8_e5m2")
)
_THOUSANDS = {"raw": 150, "packed": 60, "bf16": 150, "fp16": 100, "fp32": 100, "sparse-12.5": 100}
_FEWEST_THOUSANDS = 20


def codec_targets() -> list[Target]:
    """One for each codec, and for its parts."""
    names = [*codec_names(), "sparse-12.5"]
    return [
        *(
            Target(
                name=name,
                decode=_decoder(name),
                seeds=_seeds_of(name),
                thousands=_THOUSANDS.get(name, _FEWEST_THOUSANDS),
            )
            for name in names
        ),
        Target(name="symbols", decode=_symbols, seeds=_symbol_seeds, thousands=250),
        Target(name="basis", decode=_basis, seeds=_basis_seeds, thousands=150),
        Target(name="places", decode=_places, seeds=_place_seeds, thousands=700),
    ]


def _context(choices: Choices) -> CodecContext:
    flags = choices.below(8)
    samples = tuple(range(choices.below(5)))
    return CodecContext(
        edge="9:0",
        direction=Direction.BACKWARD if flags & 1 else Direction.FORWARD,
        step=StepNumber(1 + (flags >> 1 & 1)),
        microbatch=MicrobatchIndex(flags >> 2 & 1),
        samples=samples,
    )


class _decoder:
    """A receiver's codec that is sent tensor after tensor. Its name, shape and dtype are the sender's word, its size is bounded
    before a byte is taken."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, data: bytes) -> None:
        choices, chosen = Choices(data), codec(self._name)
        while choices:
            dtype = choices.pick(range(len(_DTYPES)))
            shape = tuple(choices.below(2**16, 2) for _ in range(choices.below(4)))
            order = tuple(reversed(range(len(shape)))) if choices.below(2) else ()
            context = _context(choices)
            encoded = EncodedTensor(
                name="9:0", dtype=_DTYPES[dtype], shape=shape, codec=self._name, data=choices.piece(), order=order
            )
            raw = num_elements(shape) * encoded.dtype.itemsize
            if not len(encoded.data) <= raw <= RAW_BYTES:  # such a header is refused
                return
            decoded = decode_tensor(encoded, chosen, context)
            assert (tuple(decoded.shape), decoded.dtype) == (shape, encoded.dtype)


def _sent(dtype: int, tensor: Tensor, data: bytes, flags: int, samples: int) -> bytes:
    sizes = b"".join(size.to_bytes(2, "little") for size in tensor.shape)
    return bytes([dtype, len(tensor.shape)]) + sizes + bytes([0, flags, samples]) + framed([data])


class _seeds_of:
    """Tensors as this codec encodes them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self) -> list[bytes]:
        found = []
        for shape in ((3, 5), (4, 8, 16), (64, 32), (130,)):
            for dtype in (0, 1, 4, 6):
                sender, stream = codec(self._name), b""
                for step in (1, 2):
                    tensor = _values(shape, _DTYPES[dtype], step)
                    context = CodecContext(edge="9:0", step=StepNumber(step), samples=tuple(range(4)))
                    encoded = encode_tensor("9:0", tensor, sender, context)
                    if encoded.codec == self._name:
                        stream += _sent(dtype, tensor, bytes(encoded.data), 2 * (step - 1), 4)
                if stream:
                    found.append(stream[:LARGEST_INPUT])
        return found or [_sent(0, torch.empty(2, 2), bytes(4), 0, 0)]


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    drawn[0] = 0.0
    return (drawn * 3).to(dtype)


def _symbols(data: bytes) -> None:
    choices = Choices(data)
    SymbolCoder().decode(memoryview(choices.rest()), choices.below(1) + 500)
    SymbolCoder().decode(memoryview(data[2:]), int.from_bytes(data[:2], "little"))


def _symbol_seeds() -> list[bytes]:
    chance = torch.Generator().manual_seed(0)
    found = []
    for scale in (0.0, 0.02, 0.7, 20.0, 2000.0):
        symbols = (scale * torch.randn(600, generator=chance)).round()
        symbols[7] = 2.0**20 if scale else 0.0
        found.append((600).to_bytes(2, "little") + SymbolCoder().encode(symbols))
    return found


def _basis(data: bytes) -> None:
    choices = Choices(data)
    width = 1 + choices.below(256)
    widest = 1 + choices.below(width)
    Basis.from_bytes(memoryview(choices.rest()), 1, width, widest).synthesise(torch.ones(width, 3))


def _basis_seeds() -> list[bytes]:
    found = []
    for width, widest in ((16, 16), (40, 20)):
        seen = Covariance(width)
        seen.add(torch.randn(64, width, generator=torch.Generator().manual_seed(1)), 1.0)
        basis = seen.basis(1, widest, 0.25)
        assert basis is not None
        found.append(bytes([width - 1, widest - 1]) + basis.to_bytes())
    return found


def _places(data: bytes) -> None:
    choices = Choices(data)
    count, size = choices.below(2**16, 2), choices.below(2**17, 3)
    places.from_bytes(torch.frombuffer(bytearray(choices.rest() or b"\0"), dtype=torch.uint8), count, size)


def _place_seeds() -> list[bytes]:
    found = []
    for count, size in ((3, 9), (5, 3000), (2, 100000)):
        where = torch.arange(count) * (size // count)
        found.append(count.to_bytes(2, "little") + size.to_bytes(3, "little") + places.to_bytes(where, size).numpy().tobytes())
    return found
