"""What the plan predicted beside what the reports of its peers show."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.compression.context import Direction
from atoll.coordinator.events import LinkEvent, PredictionEvent, StepEvent
from atoll.coordinator.measurements import Measurements
from atoll.coordinator.planning.plan import LinkPlan, Plan, StagePlan
from atoll.protocol.ids import NodeIndex, PeerId, StageIndex
from atoll.protocol.job import Compression
from atoll.protocol.v1 import session_pb2

A, B = PeerId("a"), PeerId("b")


def plan() -> Plan:
    stages = tuple(
        StagePlan(
            stage=StageIndex(index),
            replicas=(peer,),
            first=NodeIndex(index),
            end=NodeIndex(index + 1),
            in_flight=1,
            recompute=False,
            memory_bytes=1000,
            microbatch_seconds=0.1,
            sent_bytes=8,
            step_compute_seconds=0.25,
        )
        for index, peer in enumerate((A, B))
    )
    link = LinkPlan(
        source=A,
        target=B,
        direction=Direction.FORWARD,
        codec="raw",
        num_bytes=1e4,
        bytes_per_second=1e6,
        latency_seconds=0.01,
        step_seconds=0.01,
    )
    return Plan(stages=stages, spares=(), step_seconds=0.5, links=(link,))


def report(peer: PeerId, step: int, seconds: float) -> session_pb2.PeerMessage:
    other = B if peer == A else A
    use = session_pb2.LinkUse(
        source=peer, target=other, direction="forward", codec="raw", bytes=100 * step, seconds_busy=0.02 * step
    )
    use.bytes_per_second = 2e6
    content = session_pb2.StageReport(compute_seconds=seconds, resident_bytes=5000 + step, links=[use])
    return session_pb2.PeerMessage(report=content)


def step(number: int, seconds: float) -> StepEvent:
    return StepEvent(
        step=number,
        loss=1.0,
        tokens=1,
        tokens_per_second=1.0,
        seconds=seconds,
        learning_rate=0.1,
        grad_norm=1.0,
        generation=1,
        samples="",
    )


def after_steps(measurements: Measurements, count: int) -> list[LinkEvent | PredictionEvent]:
    told: list[LinkEvent | PredictionEvent] = []
    for number in range(1, count + 1):
        for peer in (A, B):
            measurements.reported(peer, report(peer, number, 0.5))
        told = list(measurements.after_step(step(number, 9.0 if number == 1 else 0.75)))
    return told


def compared(events: Iterable[object]) -> dict[tuple[str, str, str], tuple[float, float]]:
    found = [event for event in events if isinstance(event, PredictionEvent)]
    return {(event.what, event.peer, event.target): (event.predicted, event.measured) for event in found}


def test_each_prediction_stands_beside_its_measurement() -> None:
    measurements = Measurements(Compression())
    measurements.planned(plan(), {A: 4000, B: 4000}, {})
    told = compared(after_steps(measurements, 3))
    assert {key: (predicted, round(measured, 9)) for key, (predicted, measured) in told.items()} == {
        ("step_seconds", "", ""): (0.5, 0.75),
        ("memory_bytes", "a", ""): (1000.0, 1003.0),
        ("memory_bytes", "b", ""): (1000.0, 1003.0),
        ("compute_seconds", "a", ""): (0.25, 0.5),
        ("compute_seconds", "b", ""): (0.25, 0.5),
        ("transfer_seconds", "a", "b"): (0.01, 0.02),
        ("bytes_per_second", "a", "b"): (1e6, 2e6),
    }
    assert measurements.observed.slowdown(A) == 2.0
    assert measurements.link_bytes(A, B) == 300


def test_predictions_and_links_are_told_after_three_steps_and_every_ten() -> None:
    measurements = Measurements(Compression())
    measurements.planned(plan(), {}, {})
    assert after_steps(measurements, 2) == []
    told = after_steps(measurements, 10)
    assert compared(told)
    assert [(event.source, event.target) for event in told if isinstance(event, LinkEvent)] == [("a", "b"), ("b", "a")]


def test_without_a_step_there_is_nothing_to_compare() -> None:
    measurements = Measurements(Compression())
    assert list(measurements.predictions()) == []
    measurements.planned(plan(), {}, {})
    assert list(measurements.predictions()) == []
    assert measurements.step_seconds == 0.0
