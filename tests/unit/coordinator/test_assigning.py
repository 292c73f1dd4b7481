"""How an owner's cap on what is received becomes what each neighbour may send."""

from __future__ import annotations

import torch

from atoll.coordinator.assigning import share_downloads
from atoll.protocol.graph import Boundary, StageGraph, TensorSpec, ValueReference
from atoll.protocol.ids import NodeIndex, PeerId, StageIndex
from support.simulated_peers import make_plan

A, B, C = (PeerId(name) for name in "abc")


def boundary(source: int, target: int) -> Boundary:
    return Boundary(
        value=ValueReference(NodeIndex(0), 0),
        spec=TensorSpec((1,), torch.float32),
        source=StageIndex(source),
        target=StageIndex(target),
        differentiable=True,
    )


def chain() -> list[StageGraph]:
    """Three stages, one after the other."""
    return [
        StageGraph(
            stage=StageIndex(stage),
            num_stages=3,
            nodes=(),
            parameters=(),
            buffers=(),
            inputs=(),
            receives=(boundary(stage - 1, stage),) if stage > 0 else (),
            sends=(boundary(stage, stage + 1),) if stage < 2 else (),
        )
        for stage in range(3)
    ]


def test_all_neighbours_together_send_no_more_than_the_cap() -> None:
    shares = share_downloads(make_plan((A, B, C), 3), chain(), {A: 3e6, B: 4e6, C: None})
    assert shares == {A: 3e6, B: 2e6}


def test_a_peer_without_neighbours_has_nothing_to_share() -> None:
    alone = StageGraph(stage=StageIndex(0), num_stages=1, nodes=(), parameters=(), buffers=(), inputs=(), receives=(), sends=())
    assert share_downloads(make_plan((A,), 1), [alone], {A: 1e6}) == {}
