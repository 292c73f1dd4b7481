"""Our codecs where hivemind expects its own: a part of a round's values as one message."""

from __future__ import annotations

import torch
from hivemind.compression import CompressionBase, CompressionInfo
from hivemind.proto import runtime_pb2
from torch import Tensor

from atoll.compression.codec import Codec, RawCodec, decode_tensor, encode_tensor
from atoll.compression.context import CodecContext, Direction
from atoll.compression.registry import codec as new_codec
from atoll.peer.averaging.averager import Round
from atoll.protocol.errors import WireError
from atoll.protocol.ids import StepNumber
from atoll.protocol.messages import EncodedTensor

_SUM = "sum"


class PartCodec(CompressionBase):  # type: ignore[misc]
    """Of one round. Both ends know a part's place and length; the message says which codec its bytes are under, for a codec may
    decline."""

    compression_type = runtime_pb2.CompressionType.NONE

    def __init__(self, round: Round) -> None:
        self._codec: Codec = new_codec(round.codec)
        assert not self._codec.has_state, f"{round.codec} keeps state from tensor to tensor, and parts of a sum have no past"
        self._seed, self._step = round.seed, StepNumber(round.step)

    @property
    def ratio(self) -> float:
        """Encoded bytes by raw ones."""
        return self._codec.num_bytes((2**16,), torch.float32) / (4 * 2**16)

    def key(self, whose: int | str) -> str:
        """Of all parts of one member, or of the sums; what codecs draw depends on it."""
        return f"replica/{whose}"

    def compress(self, tensor: Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        """hivemind's way of saying :meth:`encode`."""
        return self._encode(tensor, f"{info.key}/{info.part_index}")

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> Tensor:
        """hivemind asks for this where it does not say which part it is."""
        raise NotImplementedError

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """hivemind's way of asking for :attr:`ratio`."""
        return self.ratio

    def decode(self, message: runtime_pb2.Tensor, member: int, place: int, length: int) -> Tensor:
        """The values of a member's part; raises WireError."""
        return self._decode(message, f"{self.key(member)}/{place}", length)

    def decode_sum(self, message: runtime_pb2.Tensor, place: int, length: int) -> Tensor:
        """The values of a sum; raises WireError."""
        return self._decode(message, f"{self.key(_SUM)}/{place}", length)

    def round_trip(self, part: Tensor, member: int, place: int) -> Tensor:
        """What the others would decode of one's own part."""
        return self.decode(self._encode(part, f"{self.key(member)}/{place}"), member, place, len(part))

    def sum(self, total: Tensor, place: int) -> tuple[runtime_pb2.Tensor, Tensor]:
        """A sum as a message, and what all decode."""
        message = self._encode(total, f"{self.key(_SUM)}/{place}")
        return message, self.decode_sum(message, place, len(total))

    def _encode(self, tensor: Tensor, edge: str) -> runtime_pb2.Tensor:
        encoded = encode_tensor("", tensor, self._codec, self._context(edge))
        return runtime_pb2.Tensor(buffer=bytes(encoded.data), size=tensor.shape, dtype=encoded.codec)

    def _decode(self, message: runtime_pb2.Tensor, edge: str, length: int) -> Tensor:
        if message.dtype not in (self._codec.name, RawCodec.name):
            raise WireError(f"a part is under {message.dtype!r}, agreed is {self._codec.name}")
        used = self._codec if message.dtype == self._codec.name else RawCodec()
        encoded = EncodedTensor(name="", dtype=torch.float32, shape=(length,), codec=used.name, data=message.buffer)
        return decode_tensor(encoded, used, self._context(edge))

    def _context(self, edge: str) -> CodecContext:
        return CodecContext(edge=edge, direction=Direction.BACKWARD, run_seed=self._seed, step=self._step)
