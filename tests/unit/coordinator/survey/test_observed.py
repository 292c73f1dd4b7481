"""What real traffic shows of peers and links."""

from __future__ import annotations

import pytest

from atoll.coordinator.planning.plan import Plan, StagePlan
from atoll.coordinator.survey.observed import Observed
from atoll.protocol.ids import NodeIndex, PeerId, StageIndex
from atoll.protocol.v1 import session_pb2

A, B = PeerId("a"), PeerId("b")


def plan(**predicted: float) -> Plan:
    stages = tuple(
        StagePlan(
            stage=StageIndex(index),
            replicas=(PeerId(name),),
            first=NodeIndex(index),
            end=NodeIndex(index + 1),
            in_flight=1,
            recompute=False,
            memory_bytes=1,
            microbatch_seconds=seconds,
            sent_bytes=1,
            step_compute_seconds=seconds,
        )
        for index, (name, seconds) in enumerate(predicted.items())
    )
    return Plan(stages=stages, spares=(), step_seconds=1.0)


def report(seconds: float, *, evaluation: bool = False) -> session_pb2.StageReport:
    return session_pb2.StageReport(compute_seconds=seconds, evaluation=evaluation)


def use(target: PeerId, seconds: float, rate: float = 0.0, direction: str = "forward") -> session_pb2.LinkUse:
    return session_pb2.LinkUse(
        source=A, target=target, direction=direction, bytes=1, seconds_busy=seconds, bytes_per_second=rate
    )


def test_a_peer_is_as_slow_as_its_steps_show() -> None:
    observed = Observed()
    observed.planned(plan(a=0.5, b=0.5), {})
    observed.reported(A, report(9.0))  # warming up
    assert observed.slowdown(A) == 1.0
    observed.reported(A, report(1.0))
    assert observed.slowdown(A) == pytest.approx(2.0)
    assert observed.slowdown(B) == 1.0
    observed.reported(A, report(1.0, evaluation=True))
    assert observed.compute_seconds(A) == 1.0


def test_one_slow_step_changes_little_and_many_change_all() -> None:
    observed = Observed()
    observed.planned(plan(a=1.0), {})
    for _ in range(5):
        observed.reported(A, report(1.0))
    observed.reported(A, report(10.0))
    assert 1.0 < observed.slowdown(A) < 2.0
    for _ in range(20):
        observed.reported(A, report(10.0))
    assert observed.slowdown(A) == pytest.approx(10.0, rel=0.05)
    assert observed.compute_seconds(A) == 10.0


def test_a_new_plan_is_made_with_what_was_seen_and_judged_by_itself() -> None:
    observed = Observed()
    observed.planned(plan(a=1.0), {})
    for _ in range(2):
        observed.reported(A, report(3.0))
    assert observed.factor(A) == pytest.approx(3.0)
    observed.planned(plan(a=6.0), {A: 3.0})  # two layers now, and three times as slow each as was measured
    assert observed.slowdown(A) == 1.0
    assert observed.factor(A) == pytest.approx(3.0)
    for _ in range(2):
        observed.reported(A, report(6.0))
    assert observed.slowdown(A) == pytest.approx(1.0)
    observed.forget(A)
    assert observed.factor(A) == 1.0


def test_a_plan_is_judged_by_what_it_counted_on() -> None:
    """A step that came while the plan was being made is not in it."""
    observed = Observed()
    observed.planned(plan(a=1.0), {})
    for _ in range(2):
        observed.reported(A, report(3.0))
    observed.planned(plan(a=2.0), {A: 2.0})
    assert observed.is_seen(A)
    for _ in range(2):
        observed.reported(A, report(3.0))
    assert observed.slowdown(A) == pytest.approx(1.5)
    assert observed.factor(A) == pytest.approx(3.0)


def test_an_evaluation_is_no_step_of_a_link() -> None:
    observed = Observed()
    observed.carried(A, [use(B, 1.0)])
    observed.carried(A, [use(B, 6.0)], evaluation=True)
    observed.carried(A, [use(B, 7.0)])
    assert observed.transfer_seconds(A, B) == 1.0


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 0.0])
def test_nonsense_is_no_measurement(seconds: float) -> None:
    observed = Observed()
    observed.planned(plan(a=1.0), {})
    for _ in range(3):
        observed.reported(A, report(seconds))
    assert observed.slowdown(A) == 1.0
    assert observed.compute_seconds(A) == 0.0


def test_a_link_tells_its_rate_when_it_knows_it() -> None:
    observed = Observed()
    observed.carried(A, [use(B, 0.1)])
    assert observed.rates == {}
    observed.carried(A, [use(B, 0.2, 1e6)])
    assert observed.rates == {(A, B): 1e6}
    observed.carried(A, [use(B, 0.2, 2e6), use(B, 0.2, 2e6, "backward")])
    assert 1e6 < observed.rates[A, B] < 2e6
    observed.forget(B)
    assert observed.rates == {}


def test_sending_is_counted_for_each_step_in_both_roles() -> None:
    observed = Observed()
    for total in (0.1, 0.2, 0.3):
        observed.carried(A, [use(B, total), use(B, 2.0 * total, direction="backward")])
    assert observed.transfer_seconds(A, B) == pytest.approx(0.3)
    assert observed.transfer_seconds(B, A) == 0.0
    observed.carried(A, [use(B, 0.01)])  # it has started anew
    observed.carried(A, [use(B, 0.41)])
    assert observed.transfer_seconds(A, B) == pytest.approx(0.3, rel=0.2)
