"""Op graphs survive the wire, and nonsense is refused."""

from __future__ import annotations

import math

import pytest
import torch

from atoll.coordinator.tracing.slicing import slice_graph
from atoll.protocol.argument_codec import argument_from_proto, argument_to_proto, expression_from_proto
from atoll.protocol.assignment import (
    Assignment,
    LocalSteps,
    Neighbour,
    OptimizerSettings,
    assignment_from_bytes,
    assignment_to_bytes,
)
from atoll.protocol.averaging import Averaging, Transport
from atoll.protocol.errors import WireError
from atoll.protocol.graph import (
    Argument,
    BufferReference,
    ExpressionOperator,
    InputReference,
    Operation,
    OwnDevice,
    ParameterReference,
    Symbol,
    ValueReference,
)
from atoll.protocol.graph_codec import (
    op_graph_from_proto,
    op_graph_to_proto,
    stage_graph_from_proto,
    stage_graph_to_proto,
)
from atoll.protocol.groups import Group
from atoll.protocol.ids import Generation, NodeIndex, PeerId, StageIndex
from atoll.protocol.v1 import graph_pb2 as wire
from support.graphs import gpt_graph, resnet_graph

ARGUMENTS: tuple[Argument, ...] = (
    None,
    True,
    0,
    -(2**63),
    2**63 - 1,
    0.1,
    -math.inf,
    complex(1.5, -2.0),
    "sum",
    torch.bfloat16,
    torch.strided,
    torch.channels_last,
    OwnDevice(),
    ValueReference(NodeIndex(7), 2),
    ParameterReference("a.weight"),
    BufferReference("a.mean"),
    InputReference("tokens"),
    Symbol("s0"),
    Operation(ExpressionOperator.ADD, (Symbol("s0"), Operation(ExpressionOperator.MULTIPLY, (3, Symbol("s1"))), -1)),
    (),
    ((1, Symbol("s0")), None, (ValueReference(NodeIndex(0)),)),
)


@pytest.mark.parametrize("argument", ARGUMENTS, ids=repr)
def test_every_kind_of_argument_comes_back_as_it_was(argument: Argument) -> None:
    returned = argument_from_proto(argument_to_proto(argument))
    assert returned == argument
    assert type(returned) is type(argument)


def test_graphs_come_back_as_they_were() -> None:
    for graph in (gpt_graph(dropout=0.1), resnet_graph()):
        sent = op_graph_to_proto(graph).SerializeToString()
        assert op_graph_from_proto(wire.OpGraph.FromString(sent)) == graph
        for stage in slice_graph(graph, (22,)):
            sent = stage_graph_to_proto(stage).SerializeToString()
            assert stage_graph_from_proto(wire.StageGraph.FromString(sent)) == stage


@pytest.mark.parametrize(
    "message",
    [
        wire.Argument(),
        wire.Argument(dtype="float99"),
        wire.Argument(layout="sparse_coo"),
        wire.Argument(memory_format="upside_down"),
        wire.Argument(expression=wire.Dimension(size=3)),
        wire.Argument(expression=wire.Dimension()),
        wire.Argument(list=wire.ArgumentList(items=[wire.Argument()])),
    ],
    ids=str,
)
def test_an_argument_of_no_known_kind_is_refused(message: wire.Argument) -> None:
    with pytest.raises(WireError):
        argument_from_proto(message)


def test_an_expression_must_be_sensible() -> None:
    unknown = wire.Dimension(operation=wire.Operation(operator="power", operands=[wire.Dimension(size=1)] * 2))
    three = wire.Dimension(operation=wire.Operation(operator="modulo", operands=[wire.Dimension(size=1)] * 3))
    for message in (unknown, three):
        with pytest.raises(WireError):
            expression_from_proto(message)


def test_deep_nesting_is_refused_before_python_gives_up() -> None:
    argument = wire.Argument(integer=1)
    for _ in range(40):
        argument = wire.Argument(list=wire.ArgumentList(items=[argument]))
    with pytest.raises(WireError, match="too deeply"):
        argument_from_proto(argument)
    size = wire.Dimension(size=1)
    for _ in range(40):
        size = wire.Dimension(operation=wire.Operation(operator="add", operands=[wire.Dimension(size=1), size]))
    with pytest.raises(WireError, match="too deeply"):
        expression_from_proto(size)


def test_other_bytes_are_refused() -> None:
    with pytest.raises(WireError, match="no assignment"):
        assignment_from_bytes(b"\xff\xff\xff not protobuf")
    with pytest.raises(WireError, match="no graph"):
        assignment_from_bytes(b"")


def an_assignment(**changes: object) -> Assignment:
    """An assignment of the first of two stages."""
    settings: dict[str, object] = {
        "generation": Generation(3),
        "graph": slice_graph(gpt_graph(), (14,))[0],
        "neighbours": (Neighbour(stage=StageIndex(1), peer=PeerId("b"), address="127.0.0.1:5", dial=True),),
        "run_seed": 17,
        "in_flight": 2,
        "recompute": True,
        "precision": "bf16",
        "optimizer": OptimizerSettings(name="sgd", momentum=0.9, nesterov=True),
        "fetch": ("norm.weight",),
        "groups": (
            Group(stage=StageIndex(0), replicas=(PeerId("a"), PeerId("c")), deal=(0, 1, 0)),
            Group(stage=StageIndex(1), replicas=(PeerId("b"),)),
        ),
        "replica": 1,
        "averaging": Averaging(transport=Transport.HIVEMIND, compression="powersgd-4", bandwidths=(1.5e6, None)),
        "local": LocalSteps(count=10, optimizer=OptimizerSettings(beta2=0.95)),
    }
    return Assignment(**{**settings, **changes})  # type: ignore[arg-type]


def test_assignments_come_back_as_they_were() -> None:
    assignment = an_assignment()
    assert assignment_from_bytes(assignment_to_bytes(assignment)) == assignment


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"precision": "fp8"}, "precision 'fp8'"),
        ({"in_flight": 0}, "no microbatch in flight"),
        ({"optimizer": OptimizerSettings(name="lion")}, "optimizer 'lion'"),
    ],
)
def test_an_assignment_must_be_sensible(change: dict[str, object], said: str) -> None:
    with pytest.raises(WireError, match=said):
        assignment_from_bytes(assignment_to_bytes(an_assignment(**change)))
