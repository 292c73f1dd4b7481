"""Op graphs and what else is a blob of protobuf: changed field by field, for changed bytes are seldom a graph."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from atoll.coordinator.tracing.slicing import slice_graph
from atoll.peer.stage.boundaries import Boundaries
from atoll.protocol.assignment import Assignment, OptimizerSettings, assignment_from_bytes, assignment_to_bytes
from atoll.protocol.graph import OpGraph, OwnDevice
from atoll.protocol.graph_codec import op_graph_from_proto, op_graph_to_proto
from atoll.protocol.groups import Group
from atoll.protocol.ids import Generation, NodeIndex, PeerId
from atoll.protocol.limits import Limits
from atoll.protocol.measurement import MeasurementRequest, request_from_bytes, request_to_bytes
from atoll.protocol.v1 import graph_pb2
from atoll.protocol.validation import validate_graph, validate_stage
from support.fuzzing.target import Choices, Target
from support.hand_graphs import BATCH, GraphBuilder
from support.hand_models import convolutional, transformer

_LIMITS = Limits(max_state_bytes=2**30, max_tensor_bytes=2**30)
_NUMBERS = (0, 1, 2, 3, 7, 8, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1, -1, -2, -(2**31), -(2**63))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e30, 1e308, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    *("", "b", "weight", "float32", "int64", "bool", "complex64", "strided", "contiguous_format", "sum", "x" * 2000),
    *("aten.add.Tensor", "aten.view.default", "aten.expand.default", "aten.repeat.default", "aten.split.Tensor"),
    *("aten.empty.memory_format", "aten.full.default", "aten.arange.start_step", "aten.eye.m", "aten.pad.default"),
    *("aten.new_empty_strided.default", "aten.linspace.default", "aten.tril_indices.default", "aten.roll.default"),
    *("aten.chunk.default", "aten.unfold.default", "aten.randperm.default", "aten.quantile.default", "aten.lstm.input"),
    *("aten.index_put_.default", "aten.einsum.default", "aten.chain_matmul.default", "aten.one_hot.default"),
)
Proto = TypeVar("Proto", bound=Message)


def graph_targets() -> list[Target]:
    """Assignments, measurements and whole graphs: as bytes, and with fields changed and the result executed on meta tensors."""
    return [
        Target(name="assignment", decode=_assignment, seeds=_assignments, thousands=40),
        Target(name="measurement", decode=request_from_bytes_only, seeds=_requests, thousands=40),
        Target(
            name="graph",
            decode=_ChangedGraph(),
            seeds=lambda: [b"", bytes(range(64)), b"\x01" * 32],
            thousands=20,
        ),
        Target(
            name="stage",
            decode=_ChangedStage(),
            seeds=lambda: [b"", bytes(range(64)), b"\x01" * 32],
            thousands=15,
        ),
    ]


def changed(message: Proto, choices: Choices) -> Proto:
    """A copy with up to four fields, at any depth, that say something else."""
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(1 + choices.below(4)):
        _change(copy, choices)
    return copy


def _change(message: Message, choices: Choices) -> None:
    """Goes down to some field and changes it."""
    fields = list(message.DESCRIPTOR.fields)
    present = [field for field, _ in message.ListFields()]
    deep = [field for field in present if field.message_type is not None]
    if deep and choices.below(8):
        field = deep[choices.below(len(deep))]
        value = getattr(message, field.name)
        if not field.is_repeated:
            _change(value, choices)
        elif choices.below(6):
            _change(value[choices.below(len(value), 2)], choices)
        else:
            _rearrange(value, choices)
        return
    if not fields:
        return
    field = fields[choices.below(len(fields))]
    if field.is_repeated:
        _rearrange(getattr(message, field.name), choices, None if field.message_type else _scalar(field, choices))
    elif field.message_type is not None:
        getattr(message, field.name).SetInParent() if choices.below(2) else message.ClearField(field.name)
    else:
        setattr(message, field.name, _scalar(field, choices))


def _rearrange(values: object, choices: Choices, fresh: object = None) -> None:
    """Removes, repeats or exchanges entries of a repeated field."""
    assert hasattr(values, "append")
    assert hasattr(values, "pop")
    assert hasattr(values, "__len__")
    assert hasattr(values, "__getitem__")
    if fresh is not None and choices.below(2):
        values.append(fresh)
    elif len(values) and choices.below(2):
        values.pop(choices.below(len(values), 2))
    elif len(values):
        values.append(values[choices.below(len(values), 2)])


def _scalar(field: FieldDescriptor, choices: Choices) -> object:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return bool(choices.below(2))
        case FieldDescriptor.CPPTYPE_STRING:
            text = _TEXTS[choices.below(len(_TEXTS))]
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return _FLOATS[choices.below(len(_FLOATS))]
        case FieldDescriptor.CPPTYPE_ENUM:
            return choices.below(12)
    number = _NUMBERS[choices.below(len(_NUMBERS))]
    bits = 32 if field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 64
    if field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64):
        return (number + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
    return number % 2**bits


def _graphs() -> list[graph_pb2.OpGraph]:
    """Small ones first and most often: a model takes a hundred times as long to validate."""
    models = (transformer(tied=True, dropout=0.1, layers=1), convolutional())
    small = (_mixed_graph(), _shaping_graph())
    return [op_graph_to_proto(graph) for graph in (*small * 15, *(model.graph for model in models))]


def _mixed_graph() -> OpGraph:
    """Linear algebra, a list of results, chance, and a write in place."""
    build = GraphBuilder()
    rows = build.input("rows", BATCH, 4)
    weight, seen = build.parameter("weight", 6, 4), build.buffer("seen", 6, mutated=True)
    wide = build.call("aten.linear.default", rows, weight)
    first, second = build.call("aten.split.Tensor", wide, 3, 1)
    joined = build.call("aten.cat.default", (second, first), 1)
    dropped = build.call("aten.dropout.default", joined, 0.5, True, evaluation=(joined, 0.5, False))
    build.call("aten.add_.Tensor", seen, build.call("aten.mean.dim", dropped, (0,)), gradient=False)
    return build.graph(build.call("aten.mean.default", dropped))


def _shaping_graph() -> OpGraph:
    """What makes tensors, and what makes them larger."""
    build = GraphBuilder()
    rows = build.input("rows", BATCH, 4)
    own = {"device": OwnDevice()}
    places = build.call("aten.arange.default", 4, keywords=own)
    filled = build.call("aten.full.default", (4, 4), 0.5, keywords=own)
    wide = build.call("aten.expand.default", filled, (3, 4, 4))
    padded = build.call("aten.constant_pad_nd.default", rows, (1, 1), 0.0)
    viewed = build.call("aten.view.default", build.call("aten.repeat.default", padded, (2, 1)), (-1, 3))
    picked = build.call("aten.index_select.default", rows, 1, places)
    summed = build.call("aten.add.Tensor", build.call("aten.sum.default", wide), build.call("aten.sum.default", viewed))
    return build.graph(build.call("aten.add.Tensor", summed, build.call("aten.mean.default", picked)))


def _stages() -> list[graph_pb2.Assignment]:
    return [graph_pb2.Assignment.FromString(data) for data in _assignments()]


class _ChangedGraph:
    """A whole graph with some fields changed, decoded and validated."""

    def __init__(self) -> None:
        self._graphs: list[graph_pb2.OpGraph] = []

    def __call__(self, data: bytes) -> None:
        self._graphs = self._graphs or _graphs()
        choices = Choices(data)
        base = self._graphs[choices.below(len(self._graphs))]
        validate_graph(op_graph_from_proto(changed(base, choices)), _LIMITS)


class _ChangedStage:
    """An assignment with some fields changed, decoded, its stage validated and its boundaries read."""

    def __init__(self) -> None:
        self._stages: list[graph_pb2.Assignment] = []

    def __call__(self, data: bytes) -> None:
        self._stages = self._stages or _stages()
        choices = Choices(data)
        base = self._stages[choices.below(len(self._stages))]
        _assignment(changed(base, choices).SerializeToString())


def _assignment(data: bytes) -> None:
    assignment = assignment_from_bytes(data)
    validate_stage(assignment.graph, _LIMITS)
    Boundaries(assignment.graph)


def request_from_bytes_only(data: bytes) -> None:
    """As a peer reads what it is to measure."""
    validate_stage(request_from_bytes(data).graph, _LIMITS)


def _assignments() -> list[bytes]:
    graphs = (
        *slice_graph(_mixed_graph(), (NodeIndex(3),)) * 3,
        *slice_graph(transformer(tied=True, layers=1).graph, (NodeIndex(9),)),
    )
    groups = tuple(Group(stage=graph.stage, replicas=(PeerId(f"peer{graph.stage}"),)) for graph in graphs)
    return [
        assignment_to_bytes(
            Assignment(
                generation=Generation(1),
                graph=graph,
                neighbours=(),
                run_seed=3,
                in_flight=2,
                recompute=False,
                precision="fp32",
                optimizer=OptimizerSettings(),
                groups=groups,
            )
        )
        for graph in graphs
    ]


def _requests() -> list[bytes]:
    graph = slice_graph(_mixed_graph(), (NodeIndex(3),))[0]
    request = MeasurementRequest(
        kind="abc", graph=graph, precision="fp32", optimizer=OptimizerSettings(), clips=True, limit_seconds=1.0
    )
    return [request_to_bytes(request)]
