"""The planner on instances whose answer is known, and against brute force."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.compression.policy import Rung
from atoll.coordinator.planning.bounds import LowerBounds
from atoll.coordinator.planning.changes import even_layouts
from atoll.coordinator.planning.costs import Constraints, allowed_bytes
from atoll.coordinator.planning.layouts import layout_excess
from atoll.coordinator.planning.network import Relayed
from atoll.coordinator.planning.pipeline import StageTimes
from atoll.coordinator.planning.planner import (
    MicrobatchOption,
    Planned,
    PlanRequest,
    as_plan,
    plan_microbatches,
    plan_placement,
)
from atoll.coordinator.planning.prediction import BESIDE_COMPUTING, CARRIED_BYTES_PER_SECOND, HANDOVER_SECONDS
from atoll.coordinator.planning.segments import RAW, MeasuredSeconds, SharedBytes
from atoll.coordinator.planning.simulator import simulate
from atoll.protocol.errors import PlacementError
from atoll.protocol.ids import PeerId
from support.planning import (
    brute_force,
    equal_segments,
    every_layout,
    network_of,
    on_shared_machines,
    peers_of,
    predictor_of,
    random_request,
    segments_of,
)

OFF_BRUTE_FORCE = 1.03


def request_of(segments: object, peers: object, network: object, **constraints: object) -> PlanRequest:
    return PlanRequest(
        segments=segments,  # type: ignore[arg-type]
        peers=peers,  # type: ignore[arg-type]
        network=network,  # type: ignore[arg-type]
        constraints=Constraints(**{"num_microbatches": 8, **constraints}),  # type: ignore[arg-type]
    )


def assert_sound(request: PlanRequest, planned: Planned) -> None:
    """Every segment once, in order, on different peers, within memory; what is predicted is what the simulator says."""
    assert planned.seats[0].first == 0
    assert planned.seats[-1].end == request.segments.num_segments
    assert all(stage.end == following.first for stage, following in pairwise(planned.seats))
    names = [stage.peer for stage in planned.seats] + [spare.peer for spare in planned.spares]
    assert sorted(names) == sorted(peer.name for peer in request.peers)
    by_name = {peer.name: peer for peer in request.peers}
    for stage in planned.seats:
        need = request.segments.memory(stage.first, stage.end, stage.recompute)
        assert stage.memory_bytes == need.fixed_bytes + stage.in_flight * need.microbatch_bytes
        assert stage.memory_bytes <= allowed_bytes(by_name[stage.peer], request.constraints)
        assert 1 <= stage.in_flight <= request.constraints.num_microbatches
    assert planned.step_seconds == simulate(planned.pipeline).step_seconds == planned.simulation.step_seconds


def assert_near_optimum(seed: int, num_peers: int, num_segments: int, *, shared: bool = False) -> bool:
    """Compare with brute force and with even splits; False when the instance has no solution, which both must say."""
    request = random_request(seed, num_peers, num_segments)
    if shared:
        request = on_shared_machines(request, seed)
    best, layout = brute_force(request)
    if layout is None:
        with pytest.raises(PlacementError, match="more memory needed") as raised:
            plan_placement(request)
        assert raised.value.missing_bytes > 0
        return False
    planned = plan_placement(request)
    assert_sound(request, planned)
    assert planned.step_seconds <= best * OFF_BRUTE_FORCE, f"seed {seed}: {planned.step_seconds / best:.3f} times the best"
    predictor = predictor_of(request)
    for even in even_layouts(predictor):
        excess = layout_excess(predictor.table, even)
        assert planned.step_seconds <= predictor.step_seconds(even) * 1.0041 * (1.0 + 0.01 * excess)
    return True


@pytest.mark.parametrize("seed", range(60))
def test_small_instances_are_near_brute_force(seed: int) -> None:
    generator = np.random.default_rng(seed + 10**6)
    assert_near_optimum(seed, int(generator.integers(2, 5)), int(generator.integers(3, 8)))


@pytest.mark.parametrize("seed", range(2000, 2040))
def test_small_instances_on_shared_machines_are_near_brute_force(seed: int) -> None:
    generator = np.random.default_rng(seed + 10**6)
    assert_near_optimum(seed, int(generator.integers(2, 5)), int(generator.integers(3, 8)), shared=True)


@pytest.mark.release
@pytest.mark.timeout(1800)
def test_five_hundred_instances_are_near_brute_force() -> None:
    solved = 0
    for seed in range(1000, 1540):
        generator = np.random.default_rng(seed + 10**6)
        solved += assert_near_optimum(seed, int(generator.integers(2, 7)), int(generator.integers(3, 11)))
    assert solved >= 500


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shared", [False, True])
def test_bounds_are_below_every_simulation(seed: int, shared: bool) -> None:
    request = random_request(seed, 3, 5)
    predictor = predictor_of(on_shared_machines(request, seed) if shared else request)
    for bound, layout in LowerBounds(predictor).of(list(every_layout(predictor))[::7]):
        assert bound <= predictor.step_seconds(layout) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_the_order_of_the_inputs_changes_nothing(seed: int) -> None:
    """Row 20: simultaneous joiners get one plan, every layer once, for any order of arrival."""
    request = random_request(seed, 8, 12)
    first = plan_placement(request)
    assert_sound(request, first)
    generator = np.random.default_rng(seed)
    for _ in range(3):
        peers = tuple(request.peers[int(index)] for index in generator.permutation(len(request.peers)))
        names = tuple(request.network.names[int(index)] for index in generator.permutation(len(request.peers)))
        again = plan_placement(dataclasses.replace(request, peers=peers, network=request.network.select(names)))
        assert again.seats == first.seats
        assert again.spares == first.spares
        assert again.step_seconds == first.step_seconds


@pytest.mark.parametrize("num_peers", [4, 8])
def test_one_cut_alone_crosses_the_slow_link_between_two_clusters(num_peers: int) -> None:
    peers = peers_of([1e9] * num_peers)
    near = np.arange(num_peers) % 2
    rate = np.where(near[:, None] == near[None, :], 100e6, 2e6)
    request = request_of(equal_segments(16, crossing=2e6), peers, network_of([peer.name for peer in peers], rate, 0.001))
    planned = plan_placement(request)
    sides = [int(stage.peer[-2:]) % 2 for stage in planned.seats]
    assert len(planned.seats) == num_peers
    assert sum(one != other for one, other in pairwise(sides)) == 1


def test_a_peer_that_would_slow_the_pipeline_down_is_left_as_a_spare() -> None:
    peers = peers_of([1e9, 1e9, 0.01e9])
    request = request_of(equal_segments(8), peers, network_of([peer.name for peer in peers], 1e9))
    planned = plan_placement(request)
    assert [stage.peer for stage in planned.seats] != []
    (spare,) = planned.spares
    assert spare.peer == "peer-02"
    assert spare.code == "compute"
    assert "even the smallest part of the model takes it 300 s" in spare.reason


def test_a_peer_behind_a_thin_line_is_left_as_a_spare() -> None:
    peers = peers_of([1e9, 1e9, 1e9])
    upload = np.array([100e6, 100e6, 1e3])
    request = request_of(
        equal_segments(8), peers, network_of([peer.name for peer in peers], 1e9, upload=upload, download=100e6)
    )
    (spare,) = plan_placement(request).spares
    assert (spare.peer, spare.code) == ("peer-02", "line")
    assert "its line (8 kbit/s)" in spare.reason


def test_a_peer_too_small_for_any_part_is_left_as_a_spare() -> None:
    peers = peers_of([1e9, 1e9, 1e9], [1e12, 1e12, 1e6])
    request = request_of(equal_segments(8), peers, network_of([peer.name for peer in peers], 1e9))
    (spare,) = plan_placement(request).spares
    assert (spare.peer, spare.code) == ("peer-02", "memory")


def on_one_machine(count: int, cores: int, latency: float, num_microbatches: int) -> Planned:
    """Peers with a thread each, on one machine, joined by links that cost ``latency`` alone."""
    peers = tuple(dataclasses.replace(peer, machine="attic", cores=cores) for peer in peers_of([1e9] * count))
    network = network_of([peer.name for peer in peers], 1e12, latency)
    return plan_placement(request_of(equal_segments(8, flops=0.1e9), peers, network, num_microbatches=num_microbatches))


def test_peers_that_share_two_cores_are_not_four_peers() -> None:
    """Two stages keep both cores busy; two more would only make the way longer, so their peers are spares."""
    planned = on_one_machine(4, 2, latency=0.3, num_microbatches=64)
    assert [stage.end - stage.first for stage in planned.seats] == [4, 4]
    used = [stage.peer for stage in planned.seats]
    assert [spare.code for spare in planned.spares] == ["processors"] * 2
    words = f"it shares its processors with {' and '.join(sorted(used))}, and these keep them busy"
    assert [spare.reason for spare in planned.spares] == [words] * 2
    assert planned.bottleneck.kind == "compute"


def test_a_plan_says_how_long_its_stages_compute_beside_one_another() -> None:
    """Two stages on one core: each is at its work for twice as long as that takes alone, while the other computes."""
    peers = tuple(dataclasses.replace(peer, machine="attic", cores=1) for peer in peers_of([1e9] * 2))
    network = network_of([peer.name for peer in peers], 1e12)
    halves = ((3, peers[0].name), (4, peers[1].name))
    segments = equal_segments(8, crossing=1.0)
    request = request_of(segments, peers, network, num_stages=2, in_flight=16, num_microbatches=32, pins=halves)
    plan = as_plan(plan_placement(request), request.segments)
    alone = 32 * 8 * 3.0
    assert plan.step_seconds == pytest.approx(alone, rel=0.01)
    assert sum(stage.step_compute_seconds for stage in plan.stages) == pytest.approx(2 * alone, rel=0.1)


def test_on_one_core_a_second_stage_is_of_no_use() -> None:
    planned = on_one_machine(3, 1, latency=0.0, num_microbatches=8)
    assert len(planned.seats) == 1
    assert planned.step_seconds == pytest.approx(8 * 8 * 0.3, rel=0.01)


def test_with_a_core_for_each_all_peers_of_a_machine_are_used() -> None:
    assert len(on_one_machine(4, 4, latency=0.0, num_microbatches=32).seats) == 4


def test_many_peers_on_few_machines() -> None:
    """Beyond what is tried out as a whole: three machines of two cores with four peers each are worth six peers."""
    peers = tuple(
        dataclasses.replace(peer, machine=f"machine-{index // 4}", cores=2) for index, peer in enumerate(peers_of([1e9] * 12))
    )
    network = network_of([peer.name for peer in peers], 1e9, 0.001)
    planned = plan_placement(request_of(equal_segments(24, flops=0.1e9), peers, network, num_microbatches=32))
    work = 32 * 24 * 0.3 / 6
    assert work <= planned.step_seconds <= (1 + 5 / 32) * work * 1.02
    assert all(sum(stage.machine == f"machine-{number}" for stage in planned.pipeline.stages) >= 2 for number in range(3))


def test_measured_times_replace_the_estimate_and_the_first_stage_makes_its_gradients_at_once() -> None:
    measured = MeasuredSeconds(
        forward=(0.0, 1.0, 3.0), backward=(0.0, 4.0, 9.0), accumulate=(0.0, 0.0, 6.0), update=(0.0, 0.5, 1.25)
    )
    peers = tuple(dataclasses.replace(peer, measured=measured) for peer in peers_of([1e9, 1e9]))
    request = request_of(equal_segments(2), peers, network_of([peer.name for peer in peers], 1e12), num_stages=2)
    first, last = plan_placement(request).pipeline.stages
    assert once(first) == pytest.approx((1.0, 4.0, 0.0, 0.5))
    assert once(last) == pytest.approx((2.0, 5.0, 6.0, 0.75))
    (only,) = plan_placement(
        request_of(equal_segments(2), peers[:1], network_of([peers[0].name], 1e12), num_stages=1)
    ).pipeline.stages
    assert once(only) == pytest.approx((3.0, 15.0, 0.0, 1.25))


def once(stage: StageTimes) -> tuple[float, ...]:
    """What is measured once a step is the update with the norms before it."""
    assert 0.0 < stage.finish_seconds <= stage.update_seconds
    last = stage.finish_seconds + stage.update_seconds
    return stage.forward_seconds, stage.backward_seconds, stage.accumulate_seconds, last


def test_the_way_to_the_coordinator_is_part_of_the_step() -> None:
    near = peers_of([1e9])
    far = (dataclasses.replace(near[0], coordinator_round_trip_seconds=0.25),)
    network = network_of([near[0].name], 1e9)
    steps = [
        plan_placement(request_of(equal_segments(4), peers, network, commit_seconds=0.5)).step_seconds for peers in (near, far)
    ]
    assert steps[1] - steps[0] == pytest.approx(0.25)
    assert steps[0] == pytest.approx(8 * 4 * 3.0 + 0.5, rel=0.001)


def test_messages_take_computing_time_where_no_core_is_free() -> None:
    def stages(cores: int) -> tuple[StageTimes, ...]:
        peers = tuple(dataclasses.replace(peer, machine="attic", cores=cores) for peer in peers_of([1e9] * 3))
        network = network_of([peer.name for peer in peers], 1e9)
        return plan_placement(request_of(equal_segments(3, crossing=1e7), peers, network, num_stages=3)).pipeline.stages

    message = HANDOVER_SECONDS + 1e7 / CARRIED_BYTES_PER_SECOND
    extra = [one.forward_seconds - other.forward_seconds for one, other in zip(stages(3), stages(4), strict=True)]
    assert extra == pytest.approx([message, 2 * message, message])


def test_handling_messages_takes_from_computing_where_all_cores_compute() -> None:
    """A stage's batch and every end of its messages, and its part of what the coordinator beside it does for all stages."""

    def stages(cores: int, *, beside: bool, handling: float) -> tuple[StageTimes, ...]:
        peers = [
            dataclasses.replace(peer, machine="attic", cores=cores, beside_coordinator=beside, handling_seconds=handling)
            for peer in peers_of([1e9] * 3)
        ]
        network = network_of([peer.name for peer in peers], 1e9)
        return plan_placement(request_of(equal_segments(3, crossing=0.0), peers, network, num_stages=3)).pipeline.stages

    def extra(cores: int, *, beside: bool) -> list[float]:
        with_them, without = stages(cores, beside=beside, handling=0.01), stages(cores, beside=beside, handling=0.0)
        return [one.microbatch_seconds - other.microbatch_seconds for one, other in zip(with_them, without, strict=True)]

    end = BESIDE_COMPUTING * 0.01
    message = end - HANDOVER_SECONDS
    own = [end + 2 * message, end + 4 * message, end + 2 * message]
    assert extra(4, beside=True) == pytest.approx([0.0] * 3)
    assert extra(3, beside=False) == pytest.approx(own)
    assert extra(3, beside=True) == pytest.approx([seconds + end for seconds in own])


def test_each_direction_has_its_own_codec() -> None:
    peers = peers_of([1e9, 1e9])
    bf16, int8 = Rung(name="bf16", ratio=0.5), Rung(name="int8", ratio=0.26, encode_bytes_per_second=1e8)
    request = request_of(
        equal_segments(6, crossing=1e6),
        peers,
        network_of([peer.name for peer in peers], 1e6),
        forward_codecs=(bf16,),
        backward_codecs=(int8,),
        num_stages=2,
    )
    planned = plan_placement(request)
    (link,) = planned.pipeline.links
    assert (link.forward.num_bytes, link.backward.num_bytes) == (0.5e6, 0.26e6)
    assert link.backward.encode_seconds == pytest.approx(0.01 + HANDOVER_SECONDS)
    (codecs,) = planned.codecs
    assert (codecs.forward.name, codecs.backward.name) == ("bf16", "int8")


def test_more_peers_than_segments_become_spares() -> None:
    """Row 19's last part: S_max + 2 peers."""
    peers = peers_of([1e9] * 6)
    request = request_of(equal_segments(4), peers, network_of([peer.name for peer in peers], 1e12))
    planned = plan_placement(request)
    assert len(planned.seats) == 4
    assert [spare.reason for spare in planned.spares] == ["the model has 4 parts, and each has a peer"] * 2


def test_speed_and_memory_are_balanced_apart() -> None:
    """Speeds 1:2:4, memory in another order: the uneven plan beats the even one, and nobody exceeds its memory."""
    speeds, room = [1e9, 2e9, 4e9], [200e6, 60e6, 120e6]
    peers = peers_of(speeds, room)
    request = request_of(equal_segments(14, weights=3e6), peers, network_of([peer.name for peer in peers], 1e9))
    planned = plan_placement(request)
    assert_sound(request, planned)
    predictor = predictor_of(request)
    evens = [layout for layout in even_layouts(predictor) if layout.num_stages == 3]
    assert not evens or planned.step_seconds < predictor.step_seconds(evens[0])
    share = {stage.peer: stage.end - stage.first for stage in planned.seats}
    assert share[PeerId("peer-02")] > share.get(PeerId("peer-00"), 0)
    assert {stage.peer for stage in planned.seats} == {"peer-00", "peer-01", "peer-02"}


def test_uneven_speeds_beat_an_even_split() -> None:
    peers = peers_of([1e9, 2e9, 4e9])
    request = request_of(equal_segments(14), peers, network_of([peer.name for peer in peers], 1e9), num_microbatches=32)
    predictor = predictor_of(request)
    even = next(layout for layout in even_layouts(predictor) if layout.num_stages == 3)
    assert plan_placement(request).step_seconds < 0.55 * predictor.step_seconds(even)


def test_uplink_and_downlink_are_told_apart() -> None:
    """From west to east is slow; a pipeline that runs from east to west sends as much back, so neither order avoids it,
    and the peer with the thin upload belongs at an end, where it sends one way alone."""
    peers = peers_of([1e9] * 3)
    upload = np.array([100e6, 1e6, 100e6])
    network = network_of([peer.name for peer in peers], 100e6, upload=upload, download=100e6)
    planned = plan_placement(request_of(equal_segments(12, crossing=1e6), peers, network, num_stages=3))
    assert planned.seats[1].peer != "peer-01"


def test_recomputation_is_chosen_where_memory_demands_it() -> None:
    segments = segments_of([1e9] * 6, [1e4] * 5, [1e6] * 6, [50e6] * 6)
    peers = peers_of([1e9, 1e9], [5e9, 250e6])
    network = network_of([peer.name for peer in peers], 1e9)
    planned = plan_placement(request_of(segments, peers, network))
    assert {stage.peer: stage.recompute for stage in planned.seats}[PeerId("peer-00")] is False
    forced = plan_placement(request_of(segments, peers, network, recompute=True))
    assert all(stage.recompute for stage in forced.seats)
    assert planned.step_seconds <= forced.step_seconds


def test_a_tight_fit_leaves_headroom() -> None:
    """Row 27: 24, 8, 8 and 4 GB for a model whose weights, optimizer and activations take most of that."""
    peers = peers_of([1e12] * 4, [24e9, 8e9, 8e9, 4e9])
    segments = segments_of([1e9] * 20, [1e6] * 19, [370e6] * 20, [20e6] * 20)
    request = request_of(segments, peers, network_of([peer.name for peer in peers], 1e9))
    planned = plan_placement(request)
    assert_sound(request, planned)
    share = {stage.peer: stage.end - stage.first for stage in planned.seats}
    assert share[PeerId("peer-00")] > share[PeerId("peer-01")]
    tighter = tuple(dataclasses.replace(peer, memory_bytes=int(0.6 * peer.memory_bytes)) for peer in peers)
    with pytest.raises(PlacementError, match=r"the model does not fit: [0-9.]+ GiB more memory needed"):
        plan_placement(dataclasses.replace(request, peers=tighter))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    num_peers=st.integers(1, 9),
    num_segments=st.integers(2, 14),
    num_stages=st.one_of(st.none(), st.integers(1, 4)),
    in_flight=st.one_of(st.none(), st.integers(1, 4)),
    recompute=st.one_of(st.none(), st.booleans()),
)
def test_any_request_gets_a_sound_plan_or_a_reason(
    seed: int,
    num_peers: int,
    num_segments: int,
    num_stages: int | None,
    in_flight: int | None,
    recompute: bool | None,
) -> None:
    request = random_request(seed, num_peers, num_segments)
    constraints = dataclasses.replace(request.constraints, num_stages=num_stages, in_flight=in_flight, recompute=recompute)
    request = dataclasses.replace(request, constraints=constraints)
    planned, refusal = None, ""
    try:
        planned = plan_placement(request)
    except PlacementError as error:
        refusal = str(error)
    if planned is None:
        assert "; " in refusal
        return
    assert_sound(request, planned)
    assert num_stages in (None, len(planned.seats))
    for stage in planned.seats:
        assert in_flight is None or stage.in_flight == min(in_flight, constraints.num_microbatches)
        assert recompute in (None, stage.recompute)


def test_wishes_are_kept() -> None:
    peers = peers_of([1e9, 2e9, 3e9, 4e9])
    network = network_of([peer.name for peer in peers], 1e8, 0.001)
    segments = equal_segments(9)
    staged = plan_placement(request_of(segments, peers, network, num_stages=2, in_flight=3))
    assert [stage.in_flight for stage in staged.seats] == [3, 3]
    pinned = plan_placement(request_of(segments, peers, network, pins=((0, "peer-01"), (8, "peer-00"))))
    assert (pinned.seats[0].peer, pinned.seats[-1].peer) == ("peer-01", "peer-00")
    doubtful = tuple(dataclasses.replace(peer, trusted=peer.name in ("peer-00", "peer-01")) for peer in peers)
    kept = plan_placement(request_of(segments, doubtful, network, trusted_ends=True))
    assert {kept.seats[0].peer, kept.seats[-1].peer} <= {"peer-00", "peer-01"}


def test_codecs_are_chosen_for_slow_links_alone() -> None:
    peers = peers_of([1e9] * 3)
    rate = np.full((3, 3), 1e8)
    rate[0, 1] = rate[1, 0] = rate[0, 2] = rate[2, 0] = 0.4e6
    network = network_of([peer.name for peer in peers], rate)
    small = Rung(name="int8", ratio=0.26)
    planned = plan_placement(
        request_of(
            equal_segments(6, flops=1e9, crossing=4e6),
            peers,
            network,
            forward_codecs=(RAW, small),
            backward_codecs=(RAW, small),
            num_stages=3,
        )
    )
    names = [(codecs.forward.name, codecs.backward.name) for codecs in planned.codecs]
    assert sorted(names) == [("int8", "int8"), ("raw", "raw")]


def test_shared_parameters_cost_their_exchange() -> None:
    peers = peers_of([1e9, 1e9])
    network = network_of([peer.name for peer in peers], 1e6)
    segments = equal_segments(6, crossing=1e3)
    tied = dataclasses.replace(segments, shared=(SharedBytes(segments=(0, 5), num_bytes=int(1e9)),))
    apart = plan_placement(request_of(segments, peers, network))
    together = plan_placement(request_of(tied, peers, network))
    assert len(apart.seats) == 2
    assert len(together.seats) == 1


def test_every_size_of_microbatch_is_planned_for() -> None:
    peers = peers_of([1e9, 1e9])
    network = network_of([peer.name for peer in peers], 1e8, 0.2)
    options = []
    for size in (1, 2, 16):
        segments = equal_segments(8, flops=size * 1e7, crossing=size * 1e5)
        slow_start = tuple(dataclasses.replace(peer, overhead_seconds=0.05) for peer in peers)
        options.append(
            MicrobatchOption(num_samples=size, request=request_of(segments, slow_start, network, num_microbatches=16 // size))
        )
    plans = plan_microbatches(options)
    assert [option.num_samples for option, _ in plans] == [16, 2, 1]
    assert [planned.step_seconds for _, planned in plans] == [
        plan_placement(option.request).step_seconds for option, _ in plans
    ]
    assert plans[-1][1].step_seconds == max(planned.step_seconds for _, planned in plans)


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"num_stages": 3}, "plan.stages asks for 3 stages, but only 2 peers joined; start 1 more, or lower plan.stages"),
        ({"pins": ((0, "nobody"),)}, "segment 0 is pinned to 'nobody', which has not joined"),
    ],
)
def test_impossible_wishes_are_refused(constraints: dict[str, object], message: str) -> None:
    peers = peers_of([1e9, 1e9])
    request = request_of(equal_segments(4), peers, network_of([peer.name for peer in peers], 1e9), **constraints)
    with pytest.raises(PlacementError, match=message):
        plan_placement(request)


def test_what_is_missing_is_said() -> None:
    peers = peers_of([1e9, 1e9], [20e6, 10e6])
    request = request_of(equal_segments(8, weights=2e6), peers, network_of([peer.name for peer in peers], 1e9))
    with pytest.raises(PlacementError, match=r"the model does not fit: .* more memory needed \(stage \d needs") as raised:
        plan_placement(request)
    assert raised.value.missing_bytes > 0


def test_nobody_is_too_few() -> None:
    with pytest.raises(PlacementError, match="no peer has joined"):
        plan_placement(request_of(equal_segments(4), (), network_of([], 1e9)))


def test_two_peers_of_one_name_are_refused() -> None:
    peers = peers_of([1e9, 1e9])
    twins = (peers[0], dataclasses.replace(peers[1], name=peers[0].name))
    with pytest.raises(PlacementError, match="two peers are named 'peer-00'"):
        plan_placement(request_of(equal_segments(4), twins, network_of([peers[0].name, peers[1].name], 1e9)))


@pytest.mark.parametrize(
    ("speeds", "rate", "latency", "microbatches", "kind"),
    [
        ([1e9, 0.4e9], 1e9, 0.0, 64, "compute"),
        ([1e9, 1e9], 0.5e6, 0.0, 64, "link"),
        ([1e9, 1e9], 1e9, 20.0, 1, "filling"),
    ],
)
def test_the_bottleneck_is_named(speeds: list[float], rate: float, latency: float, microbatches: int, kind: str) -> None:
    peers = peers_of(speeds)
    network = network_of([peer.name for peer in peers], rate, latency)
    request = request_of(equal_segments(10, crossing=8e6), peers, network, num_microbatches=microbatches, num_stages=2)
    bottleneck = plan_placement(request).bottleneck
    assert bottleneck.kind == kind
    assert "peer-0" in bottleneck.sentence


def test_a_plan_counts_on_the_line_that_relayed_pairs_share() -> None:
    """Four peers of two houses: through the coordinator each pair gets what it measured, but not all at the same time. So the
    plan crosses from house to house once, though every pair is as fast as any other by itself."""
    peers = peers_of([1e9] * 4)
    names = [peer.name for peer in peers]
    houses = (names[0], names[2]), (names[1], names[3])
    across = frozenset(frozenset((one, other)) for one in houses[0] for other in houses[1])
    plain = network_of(names, 1e6)
    relayed = dataclasses.replace(plain, relayed=Relayed(pairs=across, bytes_per_second=1e6))
    segments = equal_segments(4, flops=1e8)
    constraints = Constraints(num_microbatches=8, num_stages=4)
    request = PlanRequest(segments=segments, peers=peers, network=relayed, constraints=constraints)
    planned = plan_placement(request)
    order = [seat.peer for seat in planned.seats]
    assert sum(frozenset(pair) in across for pair in pairwise(order)) == 1
    assert len(planned.pipeline.relayed) >= 1
    blind = plan_placement(dataclasses.replace(request, network=plain))
    assert planned.step_seconds >= blind.step_seconds
