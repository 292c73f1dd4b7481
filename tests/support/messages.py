"""Keys and encoded messages for tests of what is below their meaning."""

from __future__ import annotations

import torch

from atoll.compression.registry import encode_message
from atoll.protocol.ids import Generation, MicrobatchIndex, StageIndex, StepNumber
from atoll.protocol.messages import EncodedMessage, EncodedTensor, Kind, Message, MessageKey


def key_of(kind: Kind = Kind.ACTIVATION, *, generation: int = 1, microbatch: int = 0, step: int = 1) -> MessageKey:
    """A key from stage 0 to stage 1."""
    return MessageKey(
        generation=Generation(generation),
        step=StepNumber(step),
        microbatch=MicrobatchIndex(microbatch),
        kind=kind,
        source=StageIndex(0),
        target=StageIndex(1),
    )


def message_of(key: MessageKey, num_elements: int = 8) -> Message:
    """One fp32 tensor that differs for each microbatch."""
    generator = torch.Generator().manual_seed(int(key.microbatch))
    return Message(key=key, tensors=(("0:0", torch.randn(num_elements, generator=generator)),))


def encoded_of(key: MessageKey, *sizes: int) -> EncodedMessage:
    """A sealed message of byte tensors of these sizes, with contents that depend on the key."""
    generator = torch.Generator().manual_seed(hash((key.kind, key.microbatch, key.generation)) & 0xFFFF)
    return encode_message(
        Message(
            key=key,
            tensors=tuple(
                (f"t{index}", torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator))
                for index, size in enumerate(sizes)
            ),
            numbers={"scale": 0.25, "size:s0": 7.0},
        )
    )


def contents(message: EncodedMessage) -> tuple[MessageKey, dict[str, float], list[tuple[str, bytes]]]:
    """What must arrive as it was sent."""
    return message.key, dict(message.numbers), [(tensor.name, bytes(tensor.data)) for tensor in message.tensors]


def tensor_of(name: str, data: bytes) -> EncodedTensor:
    """A raw byte tensor."""
    return EncodedTensor(name=name, dtype=torch.uint8, shape=(len(data),), codec="raw", data=data)
