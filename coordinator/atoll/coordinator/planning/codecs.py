"""What codecs cost on a link: how much of a message crosses, and how fast it is encoded and decoded.

A message's checksum is worked out at both ends whatever the codec, so even raw bytes take a processor's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch

from atoll.compression.policy import Rung, ladder
from atoll.compression.registry import codec, codec_names, sparse_name
from atoll.compression.sparsity import adaptive_ratios
from atoll.coordinator.planning.network import Network
from atoll.coordinator.planning.processors import full
from atoll.coordinator.planning.segments import PeerOffer
from atoll.protocol.codec_names import ADAPTIVE, ADAPTIVE_RATIO
from atoll.protocol.ids import PeerId
from atoll.protocol.job import Compression

TYPICAL_SHAPE = (4, 256, 1024)
"""Of what crosses a cut: samples, positions, width. Codecs that work in blocks have their usual overhead on it."""
CHECKSUM_BYTES_PER_SECOND = 6e9
"""A guess for one thread of an ordinary processor; bytes of the message as it crosses, encoded."""
ENCODED_BYTES_PER_SECOND: Mapping[str, float] = {
    "raw": float("inf"),
    "packed": 2e9,
    "fp32": 5e9,
    "bf16": 5e9,
    "fp16": 5e9,
    "int8": 2e9,
    "int4": 1e9,
    "int3": 8e8,
    "int2": 1e9,
    "transform": 1.3e8,
    "transform-1.75": 1.3e8,
    "transform-1.5": 1.3e8,
    "transform-1": 1.3e8,
    "transform-0.7": 1.3e8,
    "transform-0.5": 1.3e8,
}
"""Bytes of the tensor, without the checksum. ``benchmarks/codec_speed.py`` measures the lossy ones; these leave some room, for
a thread that encodes seldom finds its caches warm. Those of packed and fp32 are guesses."""
DECODED_BYTES_PER_SECOND: Mapping[str, float] = {
    "raw": float("inf"),
    "packed": 2e9,
    "fp32": 5e9,
    "bf16": 5e9,
    "fp16": 5e9,
    "int8": 3e9,
    "int4": 1e9,
    "int3": 8e8,
    "int2": 1e9,
    "transform": 2e8,
    "transform-1.75": 2e8,
    "transform-1.5": 2e8,
    "transform-1": 2e8,
    "transform-0.7": 2e8,
    "transform-0.5": 2e8,
}
"""As above: the lossy ones are measured, packed and fp32 guessed."""
OTHER_BYTES_PER_SECOND = 3e8
"""What a codec is taken to do of which nothing is known: a guess on the slow side."""
WITHIN_MACHINE_SECONDS = 0.005
"""One way. Peers of one machine that are farther apart are so on purpose: their network is shaped."""


def codec_cost(name: str) -> Rung:
    """The cost of the codec called ``name`` for tensors in single precision. Raises WireError for an unknown one."""
    plain = prod(TYPICAL_SHAPE) * torch.float32.itemsize
    ratio = codec(name).mean_bytes(TYPICAL_SHAPE, torch.float32) / plain
    checksum = ratio / CHECKSUM_BYTES_PER_SECOND
    return Rung(
        name=name,
        ratio=ratio,
        encode_bytes_per_second=1.0 / (checksum + 1.0 / ENCODED_BYTES_PER_SECOND.get(name, OTHER_BYTES_PER_SECOND)),
        decode_bytes_per_second=1.0 / (checksum + 1.0 / DECODED_BYTES_PER_SECOND.get(name, OTHER_BYTES_PER_SECOND)),
    )


def codec_between(name: str, source: PeerOffer, target: PeerOffer) -> Rung:
    """The cost of a codec from one peer to another, by what was measured there, as far as it was."""
    usual = codec_cost(name)
    at_source = next((cost for cost in source.codecs if cost.name == name), usual)
    at_target = next((cost for cost in target.codecs if cost.name == name), usual)
    return replace(
        usual,
        ratio=at_source.ratio,
        encode_bytes_per_second=at_source.encode_bytes_per_second,
        decode_bytes_per_second=at_target.decode_bytes_per_second,
    )


def slowest_codec(name: str, peers: Iterable[PeerOffer]) -> Rung:
    """The cost of a codec where it is not known yet who will use it: that of the slowest of ``peers`` that measured it."""
    measured = [cost for peer in peers for cost in peer.codecs if cost.name == name] or [codec_cost(name)]
    return Rung(
        name=name,
        ratio=max(cost.ratio for cost in measured),
        encode_bytes_per_second=min(cost.encode_bytes_per_second for cost in measured),
        decode_bytes_per_second=min(cost.decode_bytes_per_second for cost in measured),
    )


def codecs_allowed(chosen: str, compression: Compression) -> tuple[str, ...]:
    """The codecs of one direction, the least lossy first; ``chosen`` is what the job says of it. For AdaTopK it is that of the
    slowest link; :func:`adaptive_codecs` has those of all, once the links are known."""
    if chosen == ADAPTIVE:
        return (sparse_name(3.0 * ADAPTIVE_RATIO),)
    if chosen != "auto":
        return (chosen,)
    return ladder(codec_names(), floor=compression.floor, ceiling=compression.ceiling)


def coding_shares(peers: Sequence[PeerOffer]) -> tuple[float, ...]:
    """What part of a second of encoding or decoding each of ``peers`` loses to computing when all of them compute."""
    crowded = set(full(peers))
    return tuple(1.0 / peer.cores if index in crowded else 0.0 for index, peer in enumerate(peers))


def adaptive_codecs(seconds: Mapping[tuple[PeerId, PeerId], float]) -> dict[tuple[PeerId, PeerId], str]:
    """AdaTopK's codec for each link, from how long its tensors take uncompressed; the same both ways, by the slower one."""
    slower = [max(taken, seconds.get((target, source), 0.0)) for (source, target), taken in seconds.items()]
    return {ends: sparse_name(ratio) for ends, ratio in zip(seconds, adaptive_ratios(slower, ADAPTIVE_RATIO), strict=True)}


def link_rate(
    network: Network, source: PeerOffer, target: PeerOffer, users: tuple[int, int], seen: float | None = None
) -> float:
    """The bytes a second that a link can count on: what ``network`` says, or what has been ``seen`` since, and no more than its
    part of the lines of its ends, where ``users`` links share them.

    Within a machine only what owners allow is a limit: what such a link seems to carry says how busy the processors are, and
    to these a codec is more work.
    """
    one, other = network.names.index(source.name), network.names.index(target.name)
    lines = min(float(network.upload[one]) / users[0], float(network.download[other]) / users[1])
    same = source.machine == target.machine != "" and float(network.latency[one, other]) < WITHIN_MACHINE_SECONDS
    return lines if same else min(lines, float(network.rate[one, other]) if seen is None else seen)
