"""Plans for peers whose memory just suffices: headroom is left, and no byte is lost or won by rounding."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.coordinator.planning.costs import Constraints, allowed_bytes
from atoll.coordinator.planning.planner import Planned, PlanRequest, plan_placement
from atoll.coordinator.planning.segments import PeerOffer, Segments
from atoll.protocol.errors import PlacementError
from support.planning import network_of, peers_of, segments_of

GB = 1e9
OFFERS = (24 * GB, 8 * GB, 8 * GB, 4 * GB)
SEGMENTS = 48


def segments_for(share: float) -> Segments:
    """A model whose weights, gradients and AdamW moments take ``share`` of all that a plan may use; one segment is a 48th."""
    whole = share * 0.9 * sum(OFFERS)
    weights = [0.9 * whole / SEGMENTS / 4] * SEGMENTS
    return segments_of([1e12] * SEGMENTS, [1e6] * (SEGMENTS - 1), weights, [0.1 * whole / SEGMENTS] * SEGMENTS)


def plan_of(segments: Segments, offers: tuple[float, ...]) -> Planned:
    peers = peers_of([1e12] * len(offers), list(offers))
    network = network_of([peer.name for peer in peers], 1e9, 0.001)
    return plan_placement(
        PlanRequest(segments=segments, peers=peers, network=network, constraints=Constraints(num_microbatches=4))
    )


def assert_within(planned: Planned, segments: Segments, offers: tuple[float, ...], share: float = 0.9) -> None:
    by_name = dict(zip([peer.name for peer in peers_of([1.0] * len(offers))], offers, strict=True))
    for stage in planned.seats:
        need = segments.memory(stage.first, stage.end, stage.recompute)
        assert isinstance(stage.memory_bytes, int)
        assert stage.memory_bytes == need.fixed_bytes + stage.in_flight * need.microbatch_bytes
        assert stage.memory_bytes <= share * by_name[stage.peer]


def test_a_model_that_just_fits_leaves_headroom_everywhere() -> None:
    segments = segments_for(0.85)
    planned = plan_of(segments, OFFERS)
    assert_within(planned, segments, OFFERS)
    assert len(planned.seats) == len(OFFERS)


def test_a_model_that_would_fit_without_headroom_is_refused_with_what_is_missing() -> None:
    with pytest.raises(PlacementError, match="GiB more memory needed"):
        plan_of(segments_for(1.05), OFFERS)


@settings(max_examples=25)
@given(st.integers(0, 2**40), st.floats(0.5, 0.95), st.integers(1, 4))
def test_no_plan_is_a_byte_over(offset: int, share: float, count: int) -> None:
    offers = tuple(offer + offset % 9973 for offer in OFFERS[:count])
    segments = segments_for(share * sum(OFFERS[:count]) / sum(OFFERS))
    try:
        planned = plan_of(segments, offers)
    except PlacementError:
        return
    assert_within(planned, segments, offers)


@given(st.integers(1, 2**50), st.floats(0.1, 1.0))
def test_the_allowed_bytes_are_whole_and_never_above_the_share(memory: int, share: float) -> None:
    offer = PeerOffer(name=peers_of([1.0])[0].name, flops_per_second=1.0, memory_bytes=memory)
    found = allowed_bytes(offer, dataclasses.replace(Constraints(num_microbatches=1), memory_share=share))
    assert isinstance(found, int)
    assert found <= memory * share
