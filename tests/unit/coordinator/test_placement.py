"""Placement: the best plan for small instances, memory limits, refusals that say by how much."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.coordinator.planning.placement import SLACK, PeerOffer, PlacementRequest, Segments, StageMemory, place
from atoll.coordinator.planning.plan import Plan
from atoll.protocol.errors import PlacementError
from atoll.protocol.ids import NodeIndex, PeerId

GB = 10**9


def make_segments(
    flops: tuple[float, ...], *, crossing: tuple[int, ...] | None = None, fixed: int = 1000, saved: int = 10
) -> Segments:
    """Segments of the given FLOPs; each holds ``fixed`` bytes always and ``saved`` for each microbatch."""
    cumulative = [0.0]
    for value in flops:
        cumulative.append(cumulative[-1] + value)

    def memory(first: int, end: int, recompute: bool) -> StageMemory:
        held = saved * (end - first)
        return StageMemory(fixed_bytes=fixed * (end - first), microbatch_bytes=held // 10 if recompute else held)

    inner = crossing if crossing is not None else (8,) * (len(flops) - 1)
    return Segments(
        positions=tuple(NodeIndex(10 * index) for index in range(len(flops) + 1)),
        flops=tuple(cumulative),
        crossing_bytes=(0, *inner, 0),
        memory=memory,
    )


def make_peers(*speeds: float, memory: int = GB) -> tuple[PeerOffer, ...]:
    return tuple(
        PeerOffer(name=PeerId(f"peer-{index}"), flops_per_second=speed, memory_bytes=memory)
        for index, speed in enumerate(speeds)
    )


def slowest(plan: Plan) -> float:
    return max(stage.microbatch_seconds for stage in plan.stages)


def brute_force(segments: Segments, peers: tuple[PeerOffer, ...]) -> float:
    """The smallest possible time of the slowest stage, where memory is no limit."""
    num = segments.num_segments
    best = float("inf")
    for count in range(1, min(num, len(peers)) + 1):
        for cuts in combinations(range(1, num), count - 1):
            edges = (0, *cuts, num)
            for chosen in combinations(peers, count):
                times = [
                    3 * (segments.flops[edges[k + 1]] - segments.flops[edges[k]]) / chosen[k].flops_per_second
                    for k in range(count)
                ]
                best = min(best, max(times))
    return best


@settings(max_examples=60, deadline=None)
@given(
    flops=st.lists(st.floats(1.0, 100.0), min_size=1, max_size=7),
    speeds=st.lists(st.floats(1.0, 20.0), min_size=1, max_size=4),
)
def test_slowest_stage_is_as_fast_as_brute_force_finds(flops: list[float], speeds: list[float]) -> None:
    segments, peers = make_segments(tuple(flops)), make_peers(*speeds)
    plan = place(PlacementRequest(segments=segments, peers=peers, num_microbatches=8))
    assert slowest(plan) <= brute_force(segments, peers) * SLACK * (1 + 1e-9)
    assert plan.stages[0].first == 0
    assert plan.stages[-1].end == segments.positions[-1]
    assert all(one.end == other.first for one, other in zip(plan.stages, plan.stages[1:], strict=False))
    assert {*plan.peers, *plan.spares} == {peer.name for peer in peers}


def test_equal_peers_get_equal_shares() -> None:
    plan = place(PlacementRequest(segments=make_segments((1.0,) * 8), peers=make_peers(1, 1, 1, 1), num_microbatches=8))
    assert plan.cuts == (20, 40, 60)
    assert plan.peers == ("peer-0", "peer-1", "peer-2", "peer-3")
    assert [stage.in_flight for stage in plan.stages] == [7, 5, 3, 1]


def test_a_faster_peer_gets_more() -> None:
    plan = place(PlacementRequest(segments=make_segments((1.0,) * 8), peers=make_peers(3, 1), num_microbatches=8))
    assert plan.cuts == (60,)


def test_narrow_cut_wins_where_balance_is_alike() -> None:
    segments = make_segments((1.0, 0.02, 1.0), crossing=(1000, 10))
    plan = place(PlacementRequest(segments=segments, peers=make_peers(1, 1), num_microbatches=4))
    assert plan.cuts == (20,)
    assert plan.stages[0].sent_bytes == 10


def test_a_peer_that_would_only_slow_the_others_is_a_spare() -> None:
    plan = place(PlacementRequest(segments=make_segments((1.0,) * 4), peers=make_peers(10, 0.1, 10), num_microbatches=4))
    assert plan.spares == ("peer-1",)


def test_more_peers_than_segments_leaves_spares() -> None:
    plan = place(PlacementRequest(segments=make_segments((1.0, 1.0)), peers=make_peers(1, 1, 1, 1), num_microbatches=4))
    assert len(plan.stages) == 2
    assert len(plan.spares) == 2


def test_in_flight_and_then_recomputation_yield_to_memory() -> None:
    segments = make_segments((1.0,) * 4, fixed=0, saved=100)
    tight = PlacementRequest(
        segments=segments, peers=make_peers(1, 1, memory=410), num_microbatches=8, num_stages=2, memory_share=1.0
    )
    assert [stage.in_flight for stage in place(tight).stages] == [2, 1]
    tighter = PlacementRequest(
        segments=segments, peers=make_peers(1, 1, memory=100), num_microbatches=8, num_stages=2, memory_share=1.0
    )
    assert all(stage.recompute for stage in place(tighter).stages)
    assert all(stage.memory_bytes <= 100 for stage in place(tighter).stages)


def test_memory_moves_the_cut() -> None:
    peers = (
        PeerOffer(name=PeerId("small"), flops_per_second=1.0, memory_bytes=1400),
        PeerOffer(name=PeerId("large"), flops_per_second=1.0, memory_bytes=100_000),
    )
    plan = place(PlacementRequest(segments=make_segments((1.0,) * 4), peers=peers, num_microbatches=2))
    assert plan.cuts == (10,)


def test_refusal_says_by_how_much_and_where() -> None:
    peers = make_peers(1, 1, memory=2 * GB)
    segments = make_segments((1.0,) * 4, fixed=GB, saved=0)
    with pytest.raises(PlacementError) as caught:
        place(PlacementRequest(segments=segments, peers=peers, num_microbatches=2, memory_share=0.9))
    assert caught.value.missing_bytes == pytest.approx(0.4 * GB)
    assert "does not fit: 400.0 MB more memory needed" in str(caught.value)
    assert "peer-0 can give 1.8 GB" in str(caught.value)
    assert "--max-memory" in str(caught.value)


@pytest.mark.parametrize(
    ("num_peers", "wanted", "sentence"),
    [(2, 3, "asks for 3 stages, but only 2 peers joined; start 1 more"), (8, 5, "can be cut into 4 at most")],
)
def test_a_number_of_stages_that_is_not_possible(num_peers: int, wanted: int, sentence: str) -> None:
    request = PlacementRequest(
        segments=make_segments((1.0,) * 4), peers=make_peers(*[1.0] * num_peers), num_microbatches=2, num_stages=wanted
    )
    with pytest.raises(PlacementError, match=sentence):
        place(request)


@pytest.mark.parametrize("wanted", [1, 2, 3, 4])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8])
def test_every_number_of_stages_and_microbatches(wanted: int, num_microbatches: int) -> None:
    request = PlacementRequest(
        segments=make_segments((5.0, 1.0, 1.0, 1.0)),
        peers=make_peers(1, 1, 1, 1),
        num_microbatches=num_microbatches,
        num_stages=wanted,
    )
    plan = place(request)
    assert len(plan.stages) == wanted
    assert all(1 <= stage.in_flight <= num_microbatches for stage in plan.stages)


def test_a_wished_number_in_flight_is_kept() -> None:
    request = PlacementRequest(
        segments=make_segments((1.0,) * 4), peers=make_peers(1, 1), num_microbatches=8, num_stages=2, in_flight=2
    )
    assert [stage.in_flight for stage in place(request).stages] == [2, 2]


def test_a_hundred_cuts_and_eight_peers_are_placed_quickly() -> None:
    plan = place(PlacementRequest(segments=make_segments((1.0,) * 80), peers=make_peers(*[1.0] * 8), num_microbatches=16))
    assert [stage.end - stage.first for stage in plan.stages] == [100] * 8
