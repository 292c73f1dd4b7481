"""Whom a peer exchanges tensors with, where stages have replicas."""

from __future__ import annotations

import torch

from atoll.coordinator.planning.meetings import met_peers
from atoll.coordinator.planning.plan import Plan, StagePlan
from atoll.protocol.graph import Boundary, SharedParameter, StageGraph, TensorSpec, Use, ValueReference
from atoll.protocol.ids import NodeIndex, PeerId, StageIndex

Names = tuple[str, ...]


def plan_of(*stages: tuple[Names, tuple[int, ...]]) -> Plan:
    planned = tuple(
        StagePlan(
            stage=StageIndex(index),
            replicas=tuple(map(PeerId, replicas)),
            first=NodeIndex(index),
            end=NodeIndex(index + 1),
            in_flight=1,
            recompute=False,
            memory_bytes=1,
            microbatch_seconds=1.0,
            sent_bytes=1,
            deal=deal,
        )
        for index, (replicas, deal) in enumerate(stages)
    )
    return Plan(stages=planned, spares=(), step_seconds=1.0)


def crossing(source: int, target: int) -> Boundary:
    value = ValueReference(NodeIndex(source), 0)
    spec = TensorSpec((1,), torch.float32)
    return Boundary(value=value, spec=spec, source=StageIndex(source), target=StageIndex(target), differentiable=True)


def chain(num_stages: int, *tied: int) -> list[StageGraph]:
    """Stages one after the other; those in ``tied`` share a parameter."""
    uses = tuple(Use(node=NodeIndex(stage), position=0, stage=StageIndex(stage)) for stage in tied)
    shared = (SharedParameter(name="tied", uses=uses),) if tied else ()
    return [
        StageGraph(
            stage=StageIndex(stage),
            num_stages=num_stages,
            nodes=(),
            parameters=(),
            buffers=(),
            inputs=(),
            receives=(crossing(stage - 1, stage),) if stage > 0 else (),
            sends=(crossing(stage, stage + 1),) if stage < num_stages - 1 else (),
            shared=shared if stage in tied else (),
        )
        for stage in range(num_stages)
    ]


def test_only_those_meet_that_have_a_microbatch_in_common() -> None:
    plan = plan_of((("a", "b"), (0, 1, 0, 1)), (("c", "d"), (0, 1, 0, 1)))
    assert met_peers(plan, chain(2), PeerId("a")) == ("b", "c")
    assert met_peers(plan, chain(2), PeerId("d")) == ("b", "c")


def test_one_replica_meets_all_of_the_next_stage() -> None:
    plan = plan_of((("a",), ()), (("b", "c"), (0, 1)))
    assert met_peers(plan, chain(2), PeerId("a")) == ("b", "c")
    assert met_peers(plan, chain(2), PeerId("c")) == ("a", "b")


def test_the_first_replicas_speak_for_shared_parameters() -> None:
    plan = plan_of((("a", "b"), (0, 1)), (("c",), ()), (("d", "e"), (0, 1)))
    graphs = chain(3, 0, 2)
    assert met_peers(plan, graphs, PeerId("a")) == ("b", "c", "d", "e")
    assert met_peers(plan, graphs, PeerId("b")) == ("a", "c", "d")
    assert met_peers(plan, graphs, PeerId("e")) == ("a", "c", "d")
