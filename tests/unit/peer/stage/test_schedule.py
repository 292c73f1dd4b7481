"""The schedule of one stage, and of whole pipelines of stages that each follow it."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.stage.schedule import Action, Awaited, Need, StepSchedule, StepShape, Work
from atoll.protocol.ids import MicrobatchIndex, StageIndex


def m(index: int) -> MicrobatchIndex:
    return MicrobatchIndex(index)


def middle_stage(*, num_microbatches: int = 3, in_flight: int = 2) -> StepSchedule:
    return StepSchedule(
        StepShape(
            microbatches=tuple(map(m, range(num_microbatches))),
            in_flight=in_flight,
            activation_sources=frozenset({StageIndex(0)}),
            gradient_sources=frozenset({StageIndex(2)}),
            activation_targets=frozenset({StageIndex(2)}),
        )
    )


def feed(schedule: StepSchedule, index: int) -> None:
    schedule.arrived(Need.BATCH, m(index))
    schedule.arrived(Need.ACTIVATION, m(index), StageIndex(0))


def do(schedule: StepSchedule) -> Action | None:
    action = schedule.next_action()
    if action is not None:
        schedule.finished(action)
    return action


def test_forward_waits_for_batch_and_activation() -> None:
    schedule = middle_stage()
    assert schedule.next_action() is None
    assert schedule.waiting_for() == (
        Awaited(Need.BATCH, m(0)),
        Awaited(Need.ACTIVATION, m(0), StageIndex(0)),
    )
    schedule.arrived(Need.BATCH, m(0))
    assert schedule.next_action() is None
    schedule.arrived(Need.ACTIVATION, m(0), StageIndex(0))
    assert schedule.next_action() == Action(Work.FORWARD, m(0))
    assert schedule.waiting_for() == ()


def test_backward_goes_before_forward_and_accumulate_fills_gaps() -> None:
    schedule = middle_stage()
    for index in range(3):
        feed(schedule, index)
    assert do(schedule) == Action(Work.FORWARD, m(0))
    schedule.arrived(Need.GRADIENT, m(0), StageIndex(2))
    assert do(schedule) == Action(Work.BACKWARD, m(0))
    assert do(schedule) == Action(Work.FORWARD, m(1))
    assert do(schedule) == Action(Work.ACCUMULATE, m(0))
    assert do(schedule) == Action(Work.FORWARD, m(2))
    assert do(schedule) is None


def test_in_flight_limit_holds_back_forward_until_accumulated() -> None:
    schedule = middle_stage(in_flight=1)
    feed(schedule, 0)
    feed(schedule, 1)
    assert do(schedule) == Action(Work.FORWARD, m(0))
    assert do(schedule) is None
    assert schedule.waiting_for() == (Awaited(Need.GRADIENT, m(0), StageIndex(2)),)
    schedule.arrived(Need.GRADIENT, m(0), StageIndex(2))
    assert [do(schedule) for _ in range(3)] == [
        Action(Work.BACKWARD, m(0)),
        Action(Work.ACCUMULATE, m(0)),
        Action(Work.FORWARD, m(1)),
    ]


def test_messages_that_arrive_early_are_used_in_order() -> None:
    schedule = middle_stage()
    feed(schedule, 1)
    assert schedule.next_action() is None
    feed(schedule, 0)
    assert do(schedule) == Action(Work.FORWARD, m(0))
    assert do(schedule) == Action(Work.FORWARD, m(1))


def test_evaluation_is_forward_alone_and_bounded_by_deliveries() -> None:
    shape = StepShape(
        microbatches=(m(0), m(1), m(2)), in_flight=1, evaluation=True, activation_targets=frozenset({StageIndex(1)})
    )
    schedule = StepSchedule(shape)
    for index in range(3):
        schedule.arrived(Need.BATCH, m(index))
    assert do(schedule) == Action(Work.FORWARD, m(0))
    assert do(schedule) is None
    assert schedule.waiting_for() == (Awaited(Need.DELIVERY, m(0), StageIndex(1)),)
    schedule.arrived(Need.DELIVERY, m(0), StageIndex(1))
    assert do(schedule) == Action(Work.FORWARD, m(1))
    schedule.arrived(Need.DELIVERY, m(1), StageIndex(1))
    assert do(schedule) == Action(Work.FORWARD, m(2))
    assert schedule.complete


@pytest.mark.parametrize(("num_microbatches", "in_flight"), [(0, 1), (1, 0)])
def test_a_step_needs_microbatches_and_room(num_microbatches: int, in_flight: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        StepShape(microbatches=tuple(map(m, range(num_microbatches))), in_flight=in_flight)


class SimulatedPipeline:
    """Stages that follow the schedule; messages take a random time, but each pair of stages keeps its order."""

    def __init__(
        self, seed: int, skips: list[tuple[int, int]], limits: list[int], num_microbatches: int, evaluation: bool
    ) -> None:
        self.random = random.Random(seed)
        edges = {(stage, stage + 1) for stage in range(len(limits) - 1)} | set(skips)
        self.targets = {stage: sorted(b for a, b in edges if a == stage) for stage in range(len(limits))}
        self.sources = {stage: sorted(a for a, b in edges if b == stage) for stage in range(len(limits))}
        self.stages = [
            StepSchedule(
                StepShape(
                    microbatches=tuple(map(m, range(num_microbatches))),
                    in_flight=limit,
                    evaluation=evaluation,
                    activation_sources=frozenset(StageIndex(a) for a in self.sources[stage]),
                    gradient_sources=frozenset(StageIndex(b) for b in self.targets[stage]),
                    activation_targets=frozenset(StageIndex(b) for b in self.targets[stage]),
                )
            )
            for stage, limit in enumerate(limits)
        ]
        self.limits = limits
        self.evaluation = evaluation
        self.wires: dict[tuple[int, int, Need], list[int]] = defaultdict(list)
        self.history: dict[int, list[Action]] = defaultdict(list)
        for schedule in self.stages:
            for index in range(num_microbatches):
                schedule.arrived(Need.BATCH, m(index))

    def run(self) -> None:
        """Until nothing can happen any more."""
        while True:
            moves: list[tuple[str, object]] = [("deliver", wire) for wire, waiting in self.wires.items() if waiting]
            moves += [("work", stage) for stage, schedule in enumerate(self.stages) if schedule.next_action() is not None]
            if not moves:
                return
            kind, what = self.random.choice(moves)
            if kind == "work":
                assert isinstance(what, int)
                self.work(what)
            else:
                assert isinstance(what, tuple)
                self.deliver(*what)

    def work(self, stage: int) -> None:
        action = do(self.stages[stage])
        assert action is not None
        self.history[stage].append(action)
        if action.work is Work.FORWARD:
            for target in self.targets[stage]:
                self.wires[stage, target, Need.ACTIVATION].append(action.microbatch)
        elif action.work is Work.BACKWARD:
            for source in self.sources[stage]:
                self.wires[stage, source, Need.GRADIENT].append(action.microbatch)
        assert self.stages[stage].num_in_flight <= self.limits[stage]

    def deliver(self, source: int, target: int, need: Need) -> None:
        index = self.wires[source, target, need].pop(0)
        self.stages[target].arrived(need, m(index), StageIndex(source))
        if need is Need.ACTIVATION and self.evaluation:
            self.stages[source].arrived(Need.DELIVERY, m(index), StageIndex(target))


@given(data=st.data())
def test_any_pipeline_finishes_in_order_within_its_limits(data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, 5))
    pairs = [(a, b) for a in range(num_stages) for b in range(a + 2, num_stages)]
    skips = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    limits = data.draw(st.lists(st.integers(1, 4), min_size=num_stages, max_size=num_stages))
    num_microbatches = data.draw(st.integers(1, 6))
    evaluation = data.draw(st.booleans())
    pipeline = SimulatedPipeline(data.draw(st.integers(0, 2**16)), skips, limits, num_microbatches, evaluation)
    pipeline.run()
    for stage, schedule in enumerate(pipeline.stages):
        assert schedule.complete, f"stage {stage} waits for {schedule.waiting_for()}"
        assert schedule.waiting_for() == ()
        for work in [Work.FORWARD] if evaluation else Work:
            done = [action.microbatch for action in pipeline.history[stage] if action.work is work]
            assert done == list(range(num_microbatches))
