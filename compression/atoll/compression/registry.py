"""Codecs by the names that job files and tensor headers use, and whole messages through them.

Both ends of a link hold a :class:`MessageCoder`. State belongs to (codec, edge, direction) and to a generation: the first
message of a newer generation makes each end begin anew, whatever became of the messages before it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from atoll.compression.bases import Bases
from atoll.compression.codec import Codec, RawCodec, decode_tensor, encode_tensor
from atoll.compression.context import CodecContext, Direction, context_of, direction
from atoll.compression.delta import DeltaCodec
from atoll.compression.floating import CastCodec
from atoll.compression.integers import PackedCodec
from atoll.compression.masks import Masks
from atoll.compression.quantization import BlockCodec
from atoll.compression.sparsity import SparseCodec, TopKCodec
from atoll.compression.transform import TransformCodec
from atoll.protocol.errors import WireError
from atoll.protocol.ids import Generation
from atoll.protocol.messages import EncodedMessage, EncodedTensor, Kind, Message, MessageKey
from atoll.protocol.samples import samples_of, without_samples

_logger = logging.getLogger(__name__)

_MAKERS: Mapping[str, Callable[[Masks, Bases], Codec]] = {
    "raw": lambda *_: RawCodec(),
    "fp32": lambda *_: CastCodec("fp32", torch.float32),
    "bf16": lambda *_: CastCodec("bf16", torch.bfloat16),
    "fp16": lambda *_: CastCodec("fp16", torch.float16),
    "int8": lambda *_: BlockCodec("int8", bits=8, block=64, rotated=False),
    "int4": lambda *_: BlockCodec("int4", bits=4, block=64, rotated=True),
    "int3": lambda *_: BlockCodec("int3", bits=3, block=64, rotated=True),
    "int2": lambda *_: BlockCodec("int2", bits=2, block=64, rotated=True),
    "transform": lambda _, bases: TransformCodec("transform", bits=2.0, most_error=0.01, bases=bases),
    "transform-1.75": lambda _, bases: TransformCodec("transform-1.75", bits=1.75, most_error=0.015, bases=bases),
    "transform-1.5": lambda _, bases: TransformCodec("transform-1.5", bits=1.5, most_error=0.02, bases=bases),
    "transform-1": lambda _, bases: TransformCodec("transform-1", bits=1.0, most_error=0.04, bases=bases),
    "transform-0.7": lambda _, bases: TransformCodec("transform-0.7", bits=0.7, most_error=0.06, bases=bases),
    "transform-0.5": lambda _, bases: TransformCodec("transform-0.5", bits=0.5, most_error=0.1, bases=bases),
    "topk-10": lambda masks, _: TopKCodec("topk-10", share=0.1, masks=masks),
    "topk-1": lambda masks, _: TopKCodec("topk-1", share=0.01, masks=masks),
    "delta-4": lambda *_: DeltaCodec("delta-4", bits=4),
    "delta-2": lambda *_: DeltaCodec("delta-2", bits=2),
    "packed": lambda *_: PackedCodec(),
}
_SPARSE = re.compile(r"sparse-([1-9]\d{0,5}(?:\.\d{1,3})?)")  # what AdaTopK gives a link: one element in so many
_BY_SAMPLE = ("delta-4", "delta-2")
"""Those to which it matters which samples a tensor is of."""
_LOSSLESS = (RawCodec.name, PackedCodec.name)


def codec_names() -> tuple[str, ...]:
    """Every name that :func:`codec` knows, but for those that hold a number of the link's own (``sparse-300``)."""
    return tuple(_MAKERS)


def is_codec(name: str) -> bool:
    """Whether :func:`codec` knows it."""
    return name in _MAKERS or _SPARSE.fullmatch(name) is not None


def is_transform(name: str) -> bool:
    """Whether it is a rung of the transform codec, all of which share their bases."""
    return name.partition("-")[0] == "transform"


def sparse_name(ratio: float) -> str:
    """The codec that sends one element in ``ratio``; raw where that is all."""
    return f"sparse-{ratio:.3f}".rstrip("0").rstrip(".") if ratio > 1.0 else RawCodec.name


def codec(name: str, masks: Masks | None = None, bases: Bases | None = None) -> Codec:
    """A new codec of this name; raises WireError for an unknown one. Those that share ``masks`` are of one end of a link, and
    those that share ``bases`` of one edge and direction there."""
    if name in _MAKERS:
        return _MAKERS[name](masks if masks is not None else Masks(), bases if bases is not None else Bases())
    numbered = _SPARSE.fullmatch(name)
    if numbered is None:
        raise WireError(f"unknown codec {name!r}; known are {', '.join(_MAKERS)}")
    return SparseCodec(name, ratio=float(numbered[1]))


class MessageCoder:
    """One end's codecs. Calls must not overlap, but for raw messages, which touch no state."""

    def __init__(self, run_seed: int = 0) -> None:
        self._run_seed = run_seed
        self._stateless: dict[str, Codec] = {RawCodec.name: RawCodec()}
        self._with_state: dict[tuple[str, str, Direction], Codec] = {}
        self._masks = Masks()
        self._bases: dict[tuple[str, Direction], Bases] = {}
        self._generation = Generation(0)

    def encode(self, message: Message, codec_name: str = RawCodec.name) -> EncodedMessage:
        """The message's bytes and their checksum. Reads every byte: call it off the event loop for a large message."""
        self._begin(message.key.generation)
        return EncodedMessage(
            key=message.key,
            tensors=tuple(self._encode(message, name, tensor, codec_name) for name, tensor in message.tensors),
            numbers=_numbers(message, codec_name),
        ).sealed()

    def decode(self, encoded: EncodedMessage) -> Message:
        """The message's tensors, raw ones over the received memory itself. Raises WireError for what cannot be decoded."""
        self._begin(encoded.key.generation)
        tensors = tuple((tensor.name, self._decode(encoded, tensor)) for tensor in encoded.tensors)
        return Message(key=encoded.key, tensors=tensors, numbers=encoded.numbers)

    def lossy(self, message: Message, encoded: EncodedMessage) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The tensors that lost bits, by name, before and after. ``encoded`` is what was encoded last. Costs as much as
        decoding, so ask for a sample of the messages."""
        for (_, original), tensor in zip(message.tensors, encoded.tensors, strict=True):
            if tensor.codec not in _LOSSLESS:
                yield tensor.name, original, self._decode(encoded, tensor)

    def _begin(self, generation: Generation) -> None:
        if generation > self._generation:
            self._generation = generation
            self._masks.clear()
            for stateful in self._with_state.values():
                stateful.reset()
            if self._with_state:
                _logger.info("generation %d: %d codecs forget what they learned", generation, len(self._with_state))

    def _encode(self, message: Message, name: str, tensor: Tensor, codec_name: str) -> EncodedTensor:
        return encode_tensor(name, tensor, self._codec(codec_name, message.key, name), self._context(message, name))

    def _decode(self, message: EncodedMessage, tensor: EncodedTensor) -> Tensor:
        return decode_tensor(tensor, self._codec(tensor.codec, message.key, tensor.name), self._context(message, tensor.name))

    def _context(self, message: Message | EncodedMessage, edge: str) -> CodecContext:
        return context_of(message.key, edge, self._run_seed, samples_of(message.numbers))

    def _codec(self, name: str, key: MessageKey, edge: str) -> Codec:
        place = (name, edge, direction(key.kind))
        current = key.generation == self._generation  # a straggler of an older one must not touch the state
        found = self._stateless.get(name) or (self._with_state.get(place) if current else None)
        if found is None:
            bases = self._bases.setdefault(place[1:], Bases()) if current and is_transform(name) else None
            found = codec(name, self._masks if current else None, bases)
            if not found.has_state:
                if name in _MAKERS:  # a neighbour may name no end of the others
                    self._stateless[name] = found
            elif current:
                self._with_state[place] = found
        return found


def _numbers(message: Message, codec_name: str) -> Mapping[str, float]:
    """What is sent of the numbers: activations name their samples to those codecs alone to which it matters."""
    told = message.key.kind is not Kind.ACTIVATION or codec_name in _BY_SAMPLE
    return message.numbers if told else without_samples(message.numbers)


def encode_message(message: Message, codec_name: str = RawCodec.name) -> EncodedMessage:
    """A message that belongs to no link of a plan, with a coder of its own."""
    return MessageCoder().encode(message, codec_name)


def decode_message(encoded: EncodedMessage) -> Message:
    """The inverse of :func:`encode_message`."""
    return MessageCoder().decode(encoded)


def is_raw(encoded: EncodedMessage) -> bool:
    """Whether decoding needs nothing but the received memory."""
    return all(tensor.codec == RawCodec.name for tensor in encoded.tensors)
