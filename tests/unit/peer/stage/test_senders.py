"""A peer takes from each replica what the plan deals to it, and nothing else."""

from __future__ import annotations

import pytest

from atoll.peer.stage.senders import refusal_of_sender
from atoll.protocol.assignment import Assignment, OptimizerSettings
from atoll.protocol.graph import StageGraph
from atoll.protocol.groups import Group
from atoll.protocol.ids import Generation, MicrobatchIndex, PeerId, StageIndex, StepNumber
from atoll.protocol.messages import Kind, MessageKey

OWN, EARLIER = StageIndex(1), StageIndex(0)
ASSIGNMENT = Assignment(
    generation=Generation(1),
    graph=StageGraph(stage=OWN, num_stages=2, nodes=(), parameters=(), buffers=(), inputs=(), receives=(), sends=()),
    neighbours=(),
    run_seed=0,
    in_flight=1,
    recompute=False,
    precision="fp32",
    optimizer=OptimizerSettings(),
    groups=(
        Group(stage=EARLIER, replicas=(PeerId("a"), PeerId("b")), deal=(0, 1, 0, 1)),
        Group(stage=OWN, replicas=(PeerId("c"), PeerId("d")), deal=(0, 0, 1, 1)),
    ),
    replica=0,
)
"""Of c, which has microbatches 0 and 1."""


@pytest.mark.parametrize(
    ("sender", "kind", "source", "microbatch", "reason"),
    [
        ("a", Kind.ACTIVATION, EARLIER, 0, None),
        ("b", Kind.ACTIVATION, EARLIER, 1, None),
        ("b", Kind.ACTIVATION, EARLIER, 5, None),
        ("b", Kind.ACTIVATION, EARLIER, 0, "microbatch 0 is not dealt to b, but to a"),
        ("a", Kind.ACTIVATION, EARLIER, 2, "microbatch 2 is not dealt to this peer, but to d"),
        ("d", Kind.ACTIVATION, EARLIER, 0, "d does not hold stage 0"),
        ("x", Kind.GRADIENT, EARLIER, 0, "x does not hold stage 0"),
        ("a", Kind.GRADIENT, StageIndex(7), 0, "a does not hold stage 7"),
        ("a", Kind.TIED_GRADIENT, EARLIER, 0, None),
        ("b", Kind.TIED_GRADIENT, EARLIER, 0, "b is not the first replica of stage 0"),
        ("d", Kind.PART, OWN, 3, None),
        ("d", Kind.TOTAL, OWN, 3, None),
        ("a", Kind.PART, OWN, 3, "a does not hold stage 1"),
    ],
)
def test_who_may_send_what(sender: str, kind: Kind, source: StageIndex, microbatch: int, reason: str | None) -> None:
    key = MessageKey(
        generation=Generation(1),
        step=StepNumber(1),
        microbatch=MicrobatchIndex(microbatch),
        kind=kind,
        source=source,
        target=OWN,
    )
    assert refusal_of_sender(ASSIGNMENT, PeerId(sender), key) == reason
