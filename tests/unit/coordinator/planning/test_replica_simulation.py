"""Replicas in the simulator: microbatches go where they are dealt, and gradients are summed at the step's end."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.coordinator.planning.dealing import deal
from atoll.coordinator.planning.disturbances import Outage
from atoll.coordinator.planning.pipeline import (
    Averaging,
    Exchange,
    Group,
    Link,
    Pipeline,
    StageTimes,
    Transfer,
    WorkKind,
    ends_of,
    holders_of,
    seats_of,
)
from atoll.coordinator.planning.simulator import simulate

FREE = Transfer(num_bytes=0.0, bytes_per_second=1.0)


def group_of(dealt: tuple[int, ...], num_bytes: float = 0.0, rate: float = 1.0, latency: float = 0.0) -> Group:
    """Replicas whose gradients have ``num_bytes``, every two of them joined by an equal link."""
    count = max(dealt) + 1
    part = Transfer(num_bytes=num_bytes / count, bytes_per_second=rate, latency_seconds=latency)
    return Group(
        deal=dealt,
        averaging=Averaging(
            parts=tuple(tuple(None if one == other else part for other in range(count)) for one in range(count))
        ),
    )


def pipeline_of(
    times: list[list[StageTimes]], groups: list[Group | None], num_microbatches: int, link: Link | None = None
) -> Pipeline:
    """``times`` of the replicas of each stage; all links are alike, free by default."""
    deals = [group.deal if group is not None else () for group in groups]
    ends = ends_of(holders_of(deals, seats_of([len(stage) for stage in times]), num_microbatches))
    return Pipeline(
        stages=tuple(one for stage in times for one in stage),
        links=(link or Link(forward=FREE, backward=FREE),) * len(ends),
        num_microbatches=num_microbatches,
        groups=tuple(groups),
    )


def stage_of(seconds: float, in_flight: int = 64, *, upload: float = math.inf, download: float = math.inf) -> StageTimes:
    return StageTimes(
        forward_seconds=seconds / 2,
        backward_seconds=seconds / 2,
        in_flight=in_flight,
        upload_bytes_per_second=upload,
        download_bytes_per_second=download,
    )


def test_groups_of_one_change_nothing() -> None:
    link = Link(
        forward=Transfer(num_bytes=3.0, bytes_per_second=2.0, latency_seconds=0.1),
        backward=Transfer(num_bytes=1.0, bytes_per_second=3.0),
    )
    plain = Pipeline(
        stages=(stage_of(2.0), stage_of(3.0), stage_of(1.0, 2)),
        links=(link, link),
        num_microbatches=7,
        exchanges=(Exchange(source=2, target=0, transfer=link.forward),),
    )
    assert simulate(replace(plain, groups=(None, None, None)), record=True) == simulate(plain, record=True)


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_two_replicas_of_the_bottleneck_are_nearly_twice_as_fast(num_replicas: int) -> None:
    """Three quick stages around one that takes four times as long."""
    count, quick, slow = 32, 1.0, 4.0
    alone = pipeline_of([[stage_of(quick)], [stage_of(slow)], [stage_of(quick)]], [None] * 3, count)
    dealt = deal([1.0] * num_replicas, count)
    times = [[stage_of(quick)], [stage_of(slow)] * num_replicas, [stage_of(quick)]]
    together = pipeline_of(times, [None, group_of(dealt, num_bytes=1.0, rate=1.0), None], count)
    ratio = simulate(alone).step_seconds / simulate(together).step_seconds
    assert 0.85 * num_replicas <= ratio <= num_replicas


def test_three_slow_ones_beside_a_fast_one_get_what_they_can_do() -> None:
    seconds = [1.0, 3.0, 3.0, 3.0]
    dealt = deal([1.0 / one for one in seconds], 24)
    assert [dealt.count(index) for index in range(4)] == [12, 4, 4, 4]
    pipeline = pipeline_of([[stage_of(one) for one in seconds]], [group_of(dealt)], 24)
    found = simulate(pipeline)
    assert found.step_seconds == pytest.approx(12.0)
    assert found.compute_seconds == pytest.approx((12.0, 12.0, 12.0, 12.0))


@pytest.mark.parametrize("num_replicas", [2, 3, 4, 7])
def test_summing_takes_what_the_theory_says(num_replicas: int) -> None:
    """2 (n - 1) / n of the bytes over each line, and two delays: reduce-scatter and all-gather."""
    dealt = deal([1.0] * num_replicas, num_replicas)
    stage = stage_of(1.0, upload=5.0, download=5.0)
    pipeline = pipeline_of([[stage] * num_replicas], [group_of(dealt, num_bytes=60.0, rate=5.0, latency=0.25)], num_replicas)
    found = simulate(pipeline)
    expected = 2 * (num_replicas - 1) / num_replicas * 60.0 / 5.0 + 2 * 0.25
    assert found.averaging_seconds == pytest.approx((expected,))
    assert found.step_seconds == pytest.approx(1.0 + expected)


def test_the_slowest_line_decides() -> None:
    lines = (10.0, 10.0, 1.0)
    stages = [stage_of(1.0, upload=line, download=10.0) for line in lines]
    pipeline = pipeline_of([stages], [group_of(deal([1.0] * 3, 3), num_bytes=30.0, rate=10.0)], 3)
    assert simulate(pipeline).averaging_seconds[0] >= 4 / 3 * 30.0 / 1.0


def test_a_replica_sends_its_gradients_while_another_still_computes() -> None:
    """Half of the exchange is over when the slower one is through; both its own parts are still to be sent."""
    times = [[stage_of(1.0), stage_of(9.0)]]
    early = simulate(pipeline_of(times, [group_of((0, 1), num_bytes=8.0, rate=1.0)], 2))
    both = simulate(pipeline_of([[stage_of(9.0)] * 2], [group_of((0, 1), num_bytes=8.0, rate=1.0)], 2))
    assert early.averaging_seconds[0] == pytest.approx(8.0)
    assert both.averaging_seconds[0] == pytest.approx(8.0)
    sent = simulate(pipeline_of(times, [group_of((0, 1), num_bytes=8.0, rate=1.0)], 2), record=True).activities
    assert min(one.start_seconds for one in sent if one.kind is WorkKind.AVERAGE) == pytest.approx(1.0)
    # The sum of the early one's part waits for the late one; that of the late one's can leave as soon as it is through.
    assert early.step_seconds == pytest.approx(17.0)


def test_a_link_carries_what_its_two_seats_share() -> None:
    """Equal deals pair the replicas of neighbouring stages: nobody talks to everybody."""
    count, crossing = 8, Transfer(num_bytes=1.0, bytes_per_second=1.0)
    group = group_of(deal([1.0, 1.0], count))
    times = [[stage_of(0.0)] * 2, [stage_of(0.0)] * 2]
    paired = pipeline_of(times, [group, group], count, Link(forward=crossing, backward=crossing))
    assert (paired.ends, paired.loads) == (((0, 2), (1, 3)), (4, 4))
    assert simulate(paired).sent_seconds == ((4.0, 4.0), (4.0, 4.0))
    uneven = pipeline_of(times, [group, group_of(deal([3.0, 1.0], count))], count, Link(forward=crossing, backward=crossing))
    assert sum(uneven.loads) == count
    assert len(uneven.ends) > 2


def test_the_gradients_of_shared_parameters_leave_when_they_are_summed() -> None:
    group = group_of((0, 1, 0, 1), num_bytes=4.0, rate=1.0)
    pipeline = pipeline_of([[stage_of(1.0)] * 2, [stage_of(1.0)]], [group, None], 4)
    transfer = Transfer(num_bytes=5.0, bytes_per_second=1.0)
    onward = Exchange(source=0, target=2, transfer=transfer)
    back = tuple(Exchange(source=2, target=replica, transfer=transfer) for replica in (0, 1))
    shared = replace(pipeline, exchanges=(onward, *back))
    late = simulate(pipeline)
    assert simulate(shared).step_seconds == pytest.approx(late.step_seconds + 5.0)


def test_an_outage_of_one_replica_holds_up_its_own_microbatches() -> None:
    pipeline = pipeline_of([[stage_of(1.0)] * 2], [group_of((0, 1, 0, 1))], 4)
    assert simulate(pipeline, outages=[Outage(stage=1, start_seconds=0.0, seconds=5.0)]).step_seconds == pytest.approx(7.0)


def test_a_group_must_deal_every_microbatch_and_to_everyone() -> None:
    for dealt in ((0, 1), (0, 0, 0)):
        group = replace(group_of((0, 1)), deal=dealt)
        with pytest.raises(ValueError, match="goes to a replica"):
            pipeline_of([[stage_of(1.0)] * 2], [group], 3)


@st.composite
def replicated(draw: st.DrawFn) -> Pipeline:
    num_microbatches = draw(st.integers(4, 9))
    times, groups = [], []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 3))
        seconds = [draw(st.floats(0.1, 4.0)) for _ in range(size)]
        times.append([stage_of(one, draw(st.integers(1, 4)), upload=2.0) for one in seconds])
        dealt = deal([1.0 + number for number in range(size)], num_microbatches)
        groups.append(group_of(dealt, num_bytes=draw(st.floats(0.0, 9.0)), rate=1.5) if size > 1 else None)
    crossing = Transfer(num_bytes=draw(st.floats(0.0, 2.0)), bytes_per_second=1.0, latency_seconds=draw(st.floats(0.0, 1.0)))
    return pipeline_of(times, groups, num_microbatches, Link(forward=crossing, backward=crossing))


@given(pipeline=replicated())
@settings(max_examples=120, deadline=None)
def test_every_work_is_done_once_and_where_it_was_dealt(pipeline: Pipeline) -> None:
    found = simulate(pipeline, record=True)
    assert math.isfinite(found.step_seconds)
    for stage, holders in enumerate(pipeline.holders):
        for kind in (WorkKind.FORWARD, WorkKind.BACKWARD):
            done = {(one.microbatch, one.stage) for one in found.activities if one.kind is kind and one.stage in holders}
            assert done == set(enumerate(holders))
        last = max(one.end_seconds for one in found.activities if one.kind is WorkKind.BACKWARD and one.stage in holders)
        assert found.step_seconds >= last + found.averaging_seconds[stage] - 1e-9
    for seat, own in enumerate(pipeline.stages):
        assert found.peak_in_flight[seat] <= own.in_flight
        works = sorted(
            (one.start_seconds, one.end_seconds)
            for one in found.activities
            if one.stage == seat and one.kind in (WorkKind.FORWARD, WorkKind.BACKWARD)
        )
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(works))
    sums = [one for one in found.activities if one.kind is WorkKind.AVERAGE]
    assert len(sums) == 2 * sum(len(list(permutations(seats, 2))) for seats in pipeline.seats)
