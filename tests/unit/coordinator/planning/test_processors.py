"""Stages that share a machine's processors, against closed forms of processor sharing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.coordinator.planning.pipeline import Link, Pipeline, StageTimes, Transfer, WorkKind
from atoll.coordinator.planning.processors import crowded
from atoll.coordinator.planning.simulator import simulate

FREE = Transfer(num_bytes=0.0, bytes_per_second=1.0)


def pipeline_of(stages: list[StageTimes], num_microbatches: int) -> Pipeline:
    links = (Link(forward=FREE, backward=FREE),) * (len(stages) - 1)
    return Pipeline(stages=tuple(stages), links=links, num_microbatches=num_microbatches)


def on_one_machine(count: int, cores: int, num_microbatches: int, *, accumulate: float = 0.0) -> Pipeline:
    """One-thread stages that take 1 s forward and 2 s backward."""
    stage = StageTimes(
        forward_seconds=1.0,
        backward_seconds=2.0 - accumulate,
        accumulate_seconds=accumulate,
        in_flight=num_microbatches,
        machine="attic",
        cores=cores,
    )
    return pipeline_of([stage] * count, num_microbatches)


@pytest.mark.parametrize(("count", "cores"), list(itertools.product((1, 2, 3, 4, 7), (1, 2, 4))))
def test_equal_independent_works_take_their_sum_over_the_cores(count: int, cores: int) -> None:
    """What stages do at the beginning waits for nobody: k equal works on c cores take max(1, k / c) times as long as one."""
    stage = StageTimes(forward_seconds=0.0, backward_seconds=0.0, update_seconds=3.0, in_flight=1, machine="attic", cores=cores)
    assert simulate(pipeline_of([stage] * count, 1)).step_seconds == pytest.approx(3.0 * max(1.0, count / cores))


def test_unequal_works_leave_their_share_to_those_that_remain() -> None:
    """1, 2 and 3 s of work on one core: done at 3, 5 and 6 s."""
    stages = [
        StageTimes(forward_seconds=0.0, backward_seconds=0.0, update_seconds=seconds, in_flight=1, machine="attic", cores=1)
        for seconds in (1.0, 2.0, 3.0)
    ]
    simulation = simulate(pipeline_of(stages, 1), record=True)
    ends = {activity.stage: activity.end_seconds for activity in simulation.activities if activity.kind is WorkKind.UPDATE}
    assert [ends[stage] for stage in range(3)] == pytest.approx([3.0, 5.0, 6.0])


def test_each_gets_cores_over_threads_of_its_speed() -> None:
    """Two threads of one stage and four of another on four cores: both run at two thirds until the shorter is done."""
    stages = [
        StageTimes(
            forward_seconds=0.0,
            backward_seconds=0.0,
            update_seconds=seconds,
            in_flight=1,
            machine="attic",
            cores=4,
            threads=threads,
        )
        for seconds, threads in ((2.0, 2), (4.0, 4))
    ]
    simulation = simulate(pipeline_of(stages, 1), record=True)
    ends = {activity.stage: activity.end_seconds for activity in simulation.activities if activity.kind is WorkKind.UPDATE}
    assert ends == pytest.approx({0: 3.0, 1: 5.0})


@pytest.mark.parametrize("accumulate", [0.0, 1.0])
@pytest.mark.parametrize(("count", "num_microbatches"), list(itertools.product((1, 2, 3, 4), (1, 2, 8, 32))))
def test_on_one_core_a_pipeline_takes_all_its_work(count: int, num_microbatches: int, accumulate: float) -> None:
    """There is always something to do, and only one thing at a time is done."""
    pipeline = on_one_machine(count, 1, num_microbatches, accumulate=accumulate)
    assert simulate(pipeline).step_seconds == pytest.approx(count * num_microbatches * 3.0)


@pytest.mark.parametrize("num_microbatches", [4, 8, 32, 128])
def test_four_stages_on_two_cores_take_their_work_over_the_cores_and_the_fill(num_microbatches: int) -> None:
    """12 s of work a microbatch on two cores. Only the first forward and the last backward leave a core idle for certain;
    at worst it is as slow as two stages of twice the size, each with a core of its own: (m + 1) * 6 s."""
    seconds = simulate(on_one_machine(4, 2, num_microbatches)).step_seconds
    assert 6.0 * num_microbatches + (1.0 + 2.0) / 2 <= seconds <= 6.0 * (num_microbatches + 1)


@pytest.mark.parametrize("num_microbatches", [1, 4, 32])
def test_enough_cores_for_all_change_nothing(num_microbatches: int) -> None:
    seconds = simulate(on_one_machine(4, 4, num_microbatches)).step_seconds
    assert seconds == simulate(on_one_machine(4, 0, num_microbatches)).step_seconds
    assert seconds == pytest.approx((num_microbatches + 3) * 3.0)


def test_the_norms_at_the_end_share_the_processors_too() -> None:
    stage = StageTimes(forward_seconds=0.0, backward_seconds=0.0, finish_seconds=1.0, in_flight=1, machine="attic", cores=2)
    assert simulate(pipeline_of([stage] * 3, 1)).step_seconds == pytest.approx(1.5)


def test_only_machines_that_can_be_short_are_looked_at() -> None:
    def stage(machine: str, cores: int, threads: int = 1) -> StageTimes:
        return StageTimes(forward_seconds=1.0, backward_seconds=1.0, in_flight=1, machine=machine, cores=cores, threads=threads)

    stages = [stage("a", 2), stage("b", 2), stage("a", 2), stage("", 1), stage("", 1), stage("c", 0), stage("c", 0)]
    assert crowded(stages) == []
    assert crowded([*stages, stage("a", 2)]) == [([0, 2, 7], 2)]
    # More threads than cores are in the measured speed already.
    assert crowded([stage("d", 2, threads=8)]) == []
    assert crowded([stage("d", 2, threads=8), stage("d", 2)]) == [([0, 1], 2)]


@st.composite
def crowded_pipelines(draw: st.DrawFn) -> Pipeline:
    seconds = st.floats(0.0, 3.0)
    stages = [
        StageTimes(
            forward_seconds=draw(seconds),
            backward_seconds=draw(seconds),
            accumulate_seconds=draw(st.one_of(st.just(0.0), seconds)),
            update_seconds=draw(seconds),
            finish_seconds=draw(seconds),
            in_flight=draw(st.integers(1, 5)),
            machine=draw(st.sampled_from(["", "attic", "cellar"])),
            cores=2,
            threads=draw(st.integers(1, 3)),
        )
        for _ in range(draw(st.integers(1, 5)))
    ]
    return pipeline_of(stages, draw(st.integers(1, 5)))


@settings(max_examples=150)
@given(crowded_pipelines())
def test_no_machine_does_more_than_its_cores_can(pipeline: Pipeline) -> None:
    simulation = simulate(pipeline, record=True)
    assert simulation.step_seconds == simulate(pipeline).step_seconds
    for machine in ("attic", "cellar"):
        work = sum(
            min(stage.threads, 2)
            * (stage.update_seconds + stage.finish_seconds + pipeline.num_microbatches * stage.microbatch_seconds)
            for stage in pipeline.stages
            if stage.machine == machine
        )
        assert simulation.step_seconds >= work / 2 - 1e-9
    for index, stage in enumerate(pipeline.stages):
        own = [activity for activity in simulation.activities if activity.stage == index]
        spent = sum(activity.end_seconds - activity.start_seconds for activity in own)
        alone = stage.update_seconds + stage.finish_seconds + pipeline.num_microbatches * stage.microbatch_seconds
        assert spent >= alone - 1e-9
        updating = sum(activity.end_seconds - activity.start_seconds for activity in own if activity.kind is WorkKind.UPDATE)
        assert simulation.busy_seconds[index] == pytest.approx(spent - updating)
        if not stage.machine:
            assert spent == pytest.approx(alone)
