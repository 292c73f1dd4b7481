"""The simulator against the closed forms of pipeline theory, and what must hold for any pipeline."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.coordinator.planning.disturbances import Jitter, Outage
from atoll.coordinator.planning.pipeline import Duplex, Exchange, Link, Pipeline, StageTimes, Transfer, WorkKind
from atoll.coordinator.planning.simulator import simulate

STAGES = (1, 2, 3, 4, 8)
MICROBATCHES = (1, 2, 4, 8, 32)


def equal_pipeline(
    num_stages: int,
    num_microbatches: int,
    *,
    forward: float = 0.0,
    backward: float = 0.0,
    transfer: Transfer | None = None,
    duplex: Duplex = Duplex.FULL,
    in_flight: int | None = None,
) -> Pipeline:
    """Equal stages and links; in flight as 1F1B has it unless given."""
    crossing = transfer or Transfer(num_bytes=0.0, bytes_per_second=1.0)
    stages = tuple(
        StageTimes(forward_seconds=forward, backward_seconds=backward, in_flight=in_flight or num_stages - stage)
        for stage in range(num_stages)
    )
    link = Link(forward=crossing, backward=crossing, duplex=duplex)
    return Pipeline(stages=stages, links=(link,) * (num_stages - 1), num_microbatches=num_microbatches)


@pytest.mark.parametrize("in_flight", [None, 64])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), list(itertools.product(STAGES, MICROBATCHES)))
def test_compute_bound_pipelines_take_m_plus_p_minus_1_rounds(
    num_stages: int, num_microbatches: int, in_flight: int | None
) -> None:
    pipeline = equal_pipeline(num_stages, num_microbatches, forward=1.0, backward=2.0, in_flight=in_flight)
    assert simulate(pipeline).step_seconds == pytest.approx((num_microbatches + num_stages - 1) * 3.0)


@pytest.mark.parametrize(("num_hops", "num_microbatches"), list(itertools.product(STAGES, MICROBATCHES)))
def test_serial_links_take_m_plus_p_minus_1_rounds_of_transfer_and_latency(num_hops: int, num_microbatches: int) -> None:
    crossing = Transfer(num_bytes=3e6, bytes_per_second=2e6, latency_seconds=0.25)
    pipeline = equal_pipeline(
        num_hops + 1, num_microbatches, transfer=crossing, duplex=Duplex.SERIAL, in_flight=num_microbatches
    )
    assert simulate(pipeline).step_seconds == pytest.approx(2 * (num_microbatches + num_hops - 1) * (1.5 + 0.25))


def test_pairs_that_meet_at_a_relay_share_its_line() -> None:
    """Two hops, forward only: each may be as fast as the relay, so half of that is left while both are busy."""
    crossing = Transfer(num_bytes=2e6, bytes_per_second=2e6)
    alone = replace(equal_pipeline(3, 8, transfer=crossing, in_flight=8), relay_bytes_per_second=2e6)
    one, both = (replace(alone, relayed=frozenset(pairs)) for pairs in (((0, 1),), ((0, 1), (1, 2))))
    direct, some, shared = (simulate(pipeline).step_seconds for pipeline in (alone, one, both))
    assert direct < some < shared
    assert shared == pytest.approx(8 * 4 * 1.0), "all that crosses goes over the one line, one byte after the other"
    plenty = replace(both, relay_bytes_per_second=8e6)
    assert simulate(plenty).step_seconds == pytest.approx(direct)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), list(itertools.product((2, 3, 4), MICROBATCHES)))
def test_overlapped_transfers_take_the_sum_once_and_then_the_slowest(num_stages: int, num_microbatches: int) -> None:
    """Communication-bound and full duplex: sum of all + (m - 1) times the slowest."""
    crossing = Transfer(num_bytes=4.0, bytes_per_second=1.0, latency_seconds=0.5)
    pipeline = equal_pipeline(
        num_stages, num_microbatches, forward=0.5, backward=1.0, transfer=crossing, in_flight=num_microbatches
    )
    once = num_stages * 1.5 + (num_stages - 1) * 2 * 4.5
    assert simulate(pipeline).step_seconds == pytest.approx(once + (num_microbatches - 1) * 4.0)


def test_too_few_in_flight_wait_for_the_round_trip() -> None:
    crossing = Transfer(num_bytes=0.0, bytes_per_second=1.0, latency_seconds=5.0)
    slow = equal_pipeline(2, 4, forward=1.0, backward=1.0, transfer=crossing, in_flight=1)
    assert simulate(slow).step_seconds == pytest.approx(4 * (4.0 + 10.0))
    hidden = equal_pipeline(2, 4, forward=1.0, backward=1.0, transfer=crossing, in_flight=4)
    assert simulate(hidden).step_seconds < 4 * 4.0 + 10.0
    assert simulate(hidden).peak_in_flight == (4, 1)


def test_a_gradient_leaves_before_the_gradients_of_the_weights_are_computed() -> None:
    def pipeline(backward: float, accumulate: float) -> Pipeline:
        stage = StageTimes(forward_seconds=1.0, backward_seconds=backward, accumulate_seconds=accumulate, in_flight=8)
        free = Transfer(num_bytes=0.0, bytes_per_second=1.0)
        return Pipeline(stages=(stage,) * 4, links=(Link(forward=free, backward=free),) * 3, num_microbatches=8)

    joint, split = simulate(pipeline(2.0, 0.0)), simulate(pipeline(1.0, 1.0))
    assert split.step_seconds < joint.step_seconds
    assert split.compute_seconds == joint.compute_seconds == (24.0,) * 4


def test_a_step_is_everything_between_two_words_of_the_coordinator() -> None:
    stage = StageTimes(
        forward_seconds=1.0,
        backward_seconds=2.0,
        recompute_seconds=1.0,
        update_seconds=0.5,
        finish_seconds=0.125,
        coordinator_seconds=0.0625,
        in_flight=1,
    )
    pipeline = Pipeline(stages=(stage,), links=(), num_microbatches=3, commit_seconds=0.25)
    assert simulate(pipeline).step_seconds == pytest.approx(3 * 4.0 + 0.5 + 0.125 + 2 * 0.0625 + 0.25)


def test_a_later_stage_updates_while_the_first_microbatch_is_on_its_way() -> None:
    def seconds(update: float) -> float:
        stages = [
            StageTimes(forward_seconds=1.0, backward_seconds=2.0, update_seconds=value, in_flight=2) for value in (0.5, update)
        ]
        free = Transfer(num_bytes=0.0, bytes_per_second=1.0)
        return simulate(
            Pipeline(stages=tuple(stages), links=(Link(forward=free, backward=free),), num_microbatches=4)
        ).step_seconds

    assert seconds(0.0) == seconds(1.5) == pytest.approx(5 * 3.0 + 0.5)
    assert seconds(4.0) == pytest.approx(5 * 3.0 + 4.0 - 1.0)


def test_an_uplink_is_shared_by_both_neighbours() -> None:
    """The middle stage sends two messages at a time over a line that carries one at full rate."""
    crossing = Transfer(num_bytes=1.0, bytes_per_second=1.0)
    stages = [StageTimes(forward_seconds=0.0, backward_seconds=0.0, in_flight=20) for _ in range(3)]
    stages[1] = StageTimes(forward_seconds=0.0, backward_seconds=0.0, in_flight=20, upload_bytes_per_second=1.0)
    link = Link(forward=crossing, backward=crossing)
    shared = simulate(Pipeline(stages=tuple(stages), links=(link, link), num_microbatches=20))
    alone = simulate(equal_pipeline(3, 20, transfer=crossing, in_flight=20))
    assert alone.step_seconds == pytest.approx(4 + 19)
    assert 40.0 <= shared.step_seconds <= 44.0


def test_a_line_gives_what_a_slow_neighbour_leaves() -> None:
    """Upload 10, one neighbour takes 2 at most: the other gets 8, not half."""
    slow, fast = Transfer(num_bytes=2.0, bytes_per_second=2.0), Transfer(num_bytes=8.0, bytes_per_second=20.0)
    none = Transfer(num_bytes=0.0, bytes_per_second=1.0)
    stages = tuple(
        StageTimes(forward_seconds=0.0, backward_seconds=0.0, in_flight=1, upload_bytes_per_second=rate)
        for rate in (math.inf, 10.0, math.inf)
    )
    exchanges = (Exchange(source=1, target=0, transfer=slow), Exchange(source=1, target=2, transfer=fast))
    links = (Link(forward=none, backward=none),) * 2
    pipeline = Pipeline(stages=stages, links=links, num_microbatches=1, exchanges=exchanges)
    assert simulate(pipeline).step_seconds == pytest.approx(1.0)


def test_half_duplex_links_share_their_rate() -> None:
    crossing = Transfer(num_bytes=1.0, bytes_per_second=1.0)
    full = simulate(equal_pipeline(2, 16, transfer=crossing, in_flight=16)).step_seconds
    half = simulate(equal_pipeline(2, 16, transfer=crossing, in_flight=16, duplex=Duplex.HALF)).step_seconds
    assert full == pytest.approx(17.0)
    assert 32.0 <= half <= 34.0


def test_coding_goes_on_beside_computing_one_message_at_a_time() -> None:
    crossing = Transfer(num_bytes=1.0, bytes_per_second=10.0, encode_seconds=2.0, decode_seconds=1.0)
    seconds = simulate(equal_pipeline(2, 10, transfer=crossing, in_flight=10)).step_seconds
    assert seconds == pytest.approx(2 * 3.1 + 9 * 2.0)


def test_shared_parameters_are_exchanged_before_the_step_ends() -> None:
    base = equal_pipeline(2, 2, forward=1.0, backward=1.0)
    tied = Transfer(num_bytes=6.0, bytes_per_second=2.0)
    exchanges = (Exchange(source=0, target=1, transfer=tied), Exchange(source=1, target=0, transfer=tied))
    pipeline = Pipeline(stages=base.stages, links=base.links, num_microbatches=2, exchanges=exchanges)
    assert simulate(pipeline).step_seconds == pytest.approx(simulate(base).step_seconds + 3.0)


def test_an_outage_delays_what_it_hits() -> None:
    pipeline = equal_pipeline(1, 4, forward=1.0, backward=1.0)
    assert simulate(pipeline, outages=[Outage(stage=0, start_seconds=2.5, seconds=10.0)]).step_seconds == pytest.approx(18.0)


def test_jitter_is_a_function_of_its_seed_and_costs_time() -> None:
    pipeline = equal_pipeline(4, 16, forward=1.0, backward=2.0, transfer=Transfer(num_bytes=1.0, bytes_per_second=1.0))
    seconds = [simulate(pipeline, jitter=Jitter(compute=0.3, network=0.3, seed=seed)).step_seconds for seed in (1, 1, 2)]
    assert seconds[0] == seconds[1] != seconds[2]
    assert min(seconds) > simulate(pipeline).step_seconds


@pytest.mark.parametrize(
    "wrong",
    [
        {"links": (), "stages": (StageTimes(forward_seconds=1.0, backward_seconds=1.0, in_flight=1),) * 2},
        {"links": (), "stages": (StageTimes(forward_seconds=1.0, backward_seconds=1.0, in_flight=0),)},
    ],
)
def test_impossible_pipelines_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="need"):
        Pipeline(num_microbatches=1, **wrong)  # type: ignore[arg-type]


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """Anything: unequal stages, links of each kind, shared lines."""
    seconds = st.floats(0.0, 3.0)
    num_stages = draw(st.integers(1, 5))
    line = st.one_of(st.just(math.inf), st.floats(0.3, 3.0))
    stages = tuple(
        StageTimes(
            forward_seconds=draw(seconds),
            backward_seconds=draw(seconds),
            accumulate_seconds=draw(st.one_of(st.just(0.0), seconds)),
            recompute_seconds=draw(st.one_of(st.just(0.0), seconds)),
            in_flight=draw(st.integers(1, 6)),
            upload_bytes_per_second=draw(line),
            download_bytes_per_second=draw(line),
        )
        for _ in range(num_stages)
    )
    transfers = st.builds(
        Transfer,
        num_bytes=st.floats(0.0, 2.0),
        bytes_per_second=st.floats(0.3, 3.0),
        latency_seconds=st.floats(0.0, 1.0),
        encode_seconds=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    )
    links = tuple(
        Link(forward=draw(transfers), backward=draw(transfers), duplex=draw(st.sampled_from(Duplex)))
        for _ in range(num_stages - 1)
    )
    return Pipeline(stages=stages, links=links, num_microbatches=draw(st.integers(1, 6)))


@settings(max_examples=200)
@given(pipelines())
def test_every_pipeline_finishes_does_all_its_work_and_keeps_its_limits(pipeline: Pipeline) -> None:
    simulation = simulate(pipeline, record=True)
    count = pipeline.num_microbatches
    for stage, times in enumerate(pipeline.stages):
        assert simulation.compute_seconds[stage] == pytest.approx(count * times.microbatch_seconds)
        assert simulation.peak_in_flight[stage] <= times.in_flight
        own = sorted(
            (activity.start_seconds, activity.end_seconds)
            for activity in simulation.activities
            if activity.stage == stage and activity.kind in (WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.ACCUMULATE)
        )
        assert all(following[0] >= current[1] - 1e-9 for current, following in itertools.pairwise(own))
    once = sum(stage.microbatch_seconds for stage in pipeline.stages)
    assert simulation.step_seconds >= max(simulation.compute_seconds) - 1e-9
    assert simulation.step_seconds >= once - sum(stage.accumulate_seconds for stage in pipeline.stages) - 1e-9
    assert simulation.step_seconds == simulate(pipeline).step_seconds
