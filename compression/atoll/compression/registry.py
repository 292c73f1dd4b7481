"""Codecs by the names that job files and tensor headers use, and whole messages through them.

Both ends of a link hold a :class:`MessageCoder`. State belongs to (codec, edge, direction) and to a generation: the first
message of a newer generation makes each end begin anew, whatever became of the messages before it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from atoll.compression.codec import Codec, RawCodec, decode_tensor, encode_tensor
from atoll.compression.context import CodecContext, Direction, context_of, direction
from atoll.compression.floating import CastCodec
from atoll.compression.integers import PackedCodec
from atoll.compression.quantization import BlockCodec
from atoll.compression.transform import TransformCodec
from atoll.protocol.errors import WireError
from atoll.protocol.ids import Generation
from atoll.protocol.messages import EncodedMessage, EncodedTensor, Message, MessageKey

_logger = logging.getLogger(__name__)

_MAKERS: Mapping[str, Callable[[], Codec]] = {
    "raw": RawCodec,
    "fp32": lambda: CastCodec("fp32", torch.float32),
    "bf16": lambda: CastCodec("bf16", torch.bfloat16),
    "fp16": lambda: CastCodec("fp16", torch.float16),
    "int8": lambda: BlockCodec("int8", bits=8, block=64, rotated=False),
    "int4": lambda: BlockCodec("int4", bits=4, block=64, rotated=True),
    "int3": lambda: BlockCodec("int3", bits=3, block=64, rotated=True),
    "int2": lambda: BlockCodec("int2", bits=2, block=64, rotated=True),
    "transform": lambda: TransformCodec("transform", bits=2.0),
    "transform-1.5": lambda: TransformCodec("transform-1.5", bits=1.5),
    "transform-1": lambda: TransformCodec("transform-1", bits=1.0),
    "transform-0.5": lambda: TransformCodec("transform-0.5", bits=0.5),
    "packed": PackedCodec,
}
_LOSSLESS = (RawCodec.name, PackedCodec.name)


def codec_names() -> tuple[str, ...]:
    """Every name that :func:`codec` knows."""
    return tuple(_MAKERS)


def codec(name: str) -> Codec:
    """A new codec of this name; raises WireError for an unknown one."""
    try:
        return _MAKERS[name]()
    except KeyError:
        raise WireError(f"unknown codec {name!r}; known are {', '.join(_MAKERS)}") from None


class MessageCoder:
    """One end's codecs. Calls must not overlap, but for raw messages, which touch no state."""

    def __init__(self, run_seed: int = 0) -> None:
        self._run_seed = run_seed
        self._stateless: dict[str, Codec] = {RawCodec.name: RawCodec()}
        self._with_state: dict[tuple[str, str, Direction], Codec] = {}
        self._generation = Generation(0)

    def encode(self, message: Message, codec_name: str = RawCodec.name) -> EncodedMessage:
        """The message's bytes and their checksum. Reads every byte: call it off the event loop for a large message."""
        self._begin(message.key.generation)
        return EncodedMessage(
            key=message.key,
            tensors=tuple(self._encode(message.key, name, tensor, codec_name) for name, tensor in message.tensors),
            numbers=message.numbers,
        ).sealed()

    def decode(self, encoded: EncodedMessage) -> Message:
        """The message's tensors, raw ones over the received memory itself. Raises WireError for what cannot be decoded."""
        self._begin(encoded.key.generation)
        tensors = tuple((tensor.name, self._decode(encoded.key, tensor)) for tensor in encoded.tensors)
        return Message(key=encoded.key, tensors=tensors, numbers=encoded.numbers)

    def lossy(self, message: Message, encoded: EncodedMessage) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The tensors that lost bits, by name, before and after. ``encoded`` is what was encoded last. Costs as much as
        decoding, so ask for a sample of the messages."""
        for (_, original), tensor in zip(message.tensors, encoded.tensors, strict=True):
            if tensor.codec not in _LOSSLESS:
                yield tensor.name, original, self._decode(message.key, tensor)

    def _begin(self, generation: Generation) -> None:
        if generation > self._generation:
            self._generation = generation
            for stateful in self._with_state.values():
                stateful.reset()
            if self._with_state:
                _logger.info("generation %d: %d codecs forget what they learned", generation, len(self._with_state))

    def _encode(self, key: MessageKey, name: str, tensor: Tensor, codec_name: str) -> EncodedTensor:
        return encode_tensor(name, tensor, self._codec(codec_name, key, name), self._context(key, name))

    def _decode(self, key: MessageKey, tensor: EncodedTensor) -> Tensor:
        return decode_tensor(tensor, self._codec(tensor.codec, key, tensor.name), self._context(key, tensor.name))

    def _context(self, key: MessageKey, edge: str) -> CodecContext:
        return context_of(key, edge, self._run_seed)

    def _codec(self, name: str, key: MessageKey, edge: str) -> Codec:
        place = (name, edge, direction(key.kind))
        current = key.generation == self._generation  # a straggler of an older one must not touch the state
        found = self._stateless.get(name) or (self._with_state.get(place) if current else None)
        if found is None:
            found = codec(name)
            if not found.has_state:
                self._stateless[name] = found
            elif current:
                self._with_state[place] = found
        return found


def encode_message(message: Message, codec_name: str = RawCodec.name) -> EncodedMessage:
    """A message that belongs to no link of a plan, with a coder of its own."""
    return MessageCoder().encode(message, codec_name)


def decode_message(encoded: EncodedMessage) -> Message:
    """The inverse of :func:`encode_message`."""
    return MessageCoder().decode(encoded)


def is_raw(encoded: EncodedMessage) -> bool:
    """Whether decoding needs nothing but the received memory."""
    return all(tensor.codec == RawCodec.name for tensor in encoded.tensors)
