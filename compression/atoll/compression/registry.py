"""Codecs by the names that job files and tensor headers use, and whole messages through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from atoll.compression.codec import Codec, RawCodec, decode_tensor, encode_tensor
from atoll.compression.floating import CastCodec
from atoll.protocol.errors import WireError
from atoll.protocol.messages import EncodedMessage, Message

_MAKERS: Mapping[str, Callable[[], Codec]] = {
    "raw": RawCodec,
    "fp32": RawCodec,  # what a job file may say for "as computed"; on the wire it is raw
    "bf16": lambda: CastCodec("bf16", torch.bfloat16),
    "fp16": lambda: CastCodec("fp16", torch.float16),
}


def codec_names() -> tuple[str, ...]:
    """Every name that :func:`codec` knows."""
    return tuple(_MAKERS)


def codec(name: str) -> Codec:
    """The codec called ``name``; raises WireError for an unknown one."""
    try:
        return _MAKERS[name]()
    except KeyError:
        raise WireError(f"unknown codec {name!r}; known are {', '.join(_MAKERS)}") from None


def encode_message(message: Message, codec_name: str = "raw") -> EncodedMessage:
    """The message's bytes and their checksum. Reads every byte: call it off the event loop for a large message."""
    chosen = codec(codec_name)
    tensors = tuple(encode_tensor(name, tensor, chosen) for name, tensor in message.tensors)
    return EncodedMessage(key=message.key, tensors=tensors, numbers=message.numbers).sealed()


def decode_message(encoded: EncodedMessage) -> Message:
    """The message's tensors, raw ones over the received memory itself. Raises WireError for bytes that cannot be decoded."""
    tensors = tuple((tensor.name, decode_tensor(tensor, codec(tensor.codec))) for tensor in encoded.tensors)
    return Message(key=encoded.key, tensors=tensors, numbers=encoded.numbers)


def is_lossless(encoded: EncodedMessage) -> bool:
    """Whether every tensor arrives as it was, and decoding costs next to nothing."""
    return all(tensor.codec == RawCodec.name for tensor in encoded.tensors)
