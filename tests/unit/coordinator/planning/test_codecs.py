"""What codecs cost a plan."""

from __future__ import annotations

import pytest

from atoll.compression.registry import codec_names
from atoll.coordinator.planning.codecs import codec_cost, coding_shares
from atoll.coordinator.planning.segments import PeerOffer
from atoll.protocol.errors import WireError
from atoll.protocol.ids import PeerId


@pytest.mark.parametrize("name", codec_names())
def test_every_codec_has_a_cost(name: str) -> None:
    cost = codec_cost(name)
    assert cost.name == name
    assert 0.0 < cost.ratio <= 1.0
    assert 1e7 < cost.encode_bytes_per_second < 1e11
    assert 1e7 < cost.decode_bytes_per_second < 1e11


def test_half_precision_is_half_the_bytes_and_raw_is_all() -> None:
    assert [codec_cost(name).ratio for name in ("raw", "fp32", "bf16", "fp16")] == [1.0, 1.0, 0.5, 0.5]
    assert codec_cost("bf16").encode_bytes_per_second < codec_cost("raw").encode_bytes_per_second


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(WireError, match="unknown codec 'best'"):
        codec_cost("best")


def test_fewer_bits_are_fewer_bytes() -> None:
    costs = [codec_cost(name) for name in ("bf16", "int8", "int4", "int3", "int2")]
    assert [round(32 * cost.ratio, 2) for cost in costs] == [16.0, 8.25, 4.25, 3.25, 2.25]
    assert all(cost.encode_bytes_per_second < 1.0 / (cost.ratio / 6e9) for cost in costs)


def test_coding_takes_from_computing_where_no_core_is_free() -> None:
    alone = PeerOffer(name=PeerId("alone"), flops_per_second=1e9, memory_bytes=1, machine="a", cores=2)
    crowd = [
        PeerOffer(name=PeerId(name), flops_per_second=1e9, memory_bytes=1, machine="b", cores=2)
        for name in ("one", "two", "three")
    ]
    assert coding_shares([alone, *crowd]) == (0.0, 0.5, 0.5, 0.5)
    assert coding_shares([alone, crowd[0]]) == (0.0, 0.0)
