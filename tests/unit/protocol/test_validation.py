"""A graph that is not what it says is refused, with the reason and the node, and nothing happens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from atoll.coordinator.tracing.slicing import slice_graph
from atoll.protocol.errors import GraphRefused
from atoll.protocol.graph import (
    Argument,
    Boundary,
    BufferReference,
    Dimension,
    ExpressionOperator,
    Initialisation,
    InputReference,
    Node,
    Operation,
    OpGraph,
    OwnDevice,
    ParameterReference,
    SharedParameter,
    StageGraph,
    Symbol,
    TensorSpec,
    Use,
    ValueReference,
)
from atoll.protocol.ids import NodeIndex, StageIndex
from atoll.protocol.limits import Limits
from atoll.protocol.operators import resolve
from atoll.protocol.validation import validate_graph, validate_stage
from support.graphs import gpt_graph, resnet_graph
from support.hand_graphs import BATCH, GraphBuilder, filled
from support.hand_models import convolutional, transformer

X, WEIGHT, CONSTANT, COUNTER = (
    InputReference("x"),
    ParameterReference("weight"),
    BufferReference("constant"),
    BufferReference("counter"),
)


def value(node: int, output: int = 0) -> ValueReference:
    return ValueReference(NodeIndex(node), output)


def small() -> OpGraph:
    """Four nodes: linear, relu, split and the loss."""
    build = GraphBuilder()
    x = build.input("x", BATCH, 4)
    hidden = build.call("aten.linear.default", x, build.parameter("weight", 6, 4))
    build.buffer("constant", 3)
    build.buffer("counter", 3, mutated=True)
    active = build.call("aten.relu.default", hidden)
    halves = build.call("aten.split.Tensor", active, 3, 1)
    loss = build.call("aten.mean.default", halves[1])
    return build.graph(loss)


def with_node(position: int, **changes: object) -> OpGraph:
    """The small graph with some fields of one node changed."""
    graph = small()
    nodes = list(graph.nodes)
    nodes[position] = replace(nodes[position], **changes)  # type: ignore[arg-type]
    return replace(graph, nodes=tuple(nodes))


def with_call(operator: str, *arguments: Argument, outputs: tuple[TensorSpec | None, ...], **keywords: Argument) -> OpGraph:
    """The small graph with one more node, just before the loss is computed."""
    graph = small()
    extra = Node(index=NodeIndex(10), operator=operator, arguments=arguments, keywords=tuple(keywords.items()), outputs=outputs)
    return replace(graph, nodes=(*graph.nodes, extra))


def spec(*shape: Dimension, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape, dtype)


def assert_refused(graph: OpGraph | StageGraph, reason: str, node: int | None = None, limits: Limits | None = None) -> None:
    check: Callable[..., None] = validate_graph if isinstance(graph, OpGraph) else validate_stage
    started = time.monotonic()
    with pytest.raises(GraphRefused, match=reason) as refused:
        check(graph, *(() if limits is None else (limits,)))
    assert refused.value.node == node
    assert time.monotonic() - started < 5


def test_graphs_of_models_and_their_stages_pass() -> None:
    graphs = [
        small(),
        transformer(tied=True, dropout=0.1).graph,
        convolutional().graph,
        gpt_graph(dropout=0.1),
        resnet_graph(),
    ]
    for graph in graphs:
        validate_graph(graph)
        for stage in slice_graph(graph, ()):
            validate_stage(stage)
    for model in (transformer(tied=True), convolutional()):
        for stage in slice_graph(model.graph, model.cuts):
            validate_stage(stage)


@pytest.mark.parametrize(
    ("operator", "reason"),
    [
        ("aten.from_file.default", "is not allowed"),
        ("aten.item.default", "is not allowed"),
        ("aten.nonzero.default", "is not allowed"),
        ("aten.set_.source_Tensor", "is not allowed"),
        ("aten.as_strided.default", "is not allowed"),
        ("aten.linear.nonsense", "does not exist"),
        ("aten.nothing_of_the_kind.default", "is not allowed"),
        ("aten.__class__.__name__", "is not allowed"),
        ("aten.add.__class__", "does not exist"),
        ("aten.relu", "is not the name of an ATen overload"),
        ("prims.add.default", "is not the name of an ATen overload"),
        ("os.system.default", "is not the name of an ATen overload"),
        ("aten.add.out", "writes to an out argument"),
        ("aten.add.str", "results are not all tensors"),
        ("aten.where.default", "results are not all tensors"),
    ],
)
def test_forbidden_operators(operator: str, reason: str) -> None:
    assert_refused(with_node(1, operator=operator), reason, 1)


def test_every_allowed_operator_has_overloads() -> None:
    assert resolve("aten.linear.default") is torch.ops.aten.linear.default
    assert resolve("aten.add_.Tensor") is torch.ops.aten.add_.Tensor
    assert resolve("aten.__and__.Tensor") is torch.ops.aten.__and__.Tensor


def test_cycles_and_forward_references() -> None:
    assert_refused(with_node(1, arguments=(value(3),)), "needs node 3, which comes after it: a cycle", 1)
    assert_refused(with_node(1, arguments=(value(1),)), "a cycle", 1)
    assert_refused(with_node(3, arguments=((value(2, 0), value(2, 7)),)), "the graph does not have", 3)
    assert_refused(with_node(1, evaluation=(value(2),)), "a cycle", 1)
    assert_refused(with_node(1, training_only=True), "the graph does not have", 2)
    assert_refused(with_node(1, arguments=(ParameterReference("unknown"),)), "the graph does not have", 1)
    assert_refused(with_node(2, index=NodeIndex(1)), "its index does not ascend", 1)
    assert_refused(replace(small(), loss=value(9)), "nothing computes it", 9)
    assert_refused(replace(small(), metrics=(("accuracy", value(2, 5)),)), "nothing computes it", 2)


def test_wrong_shapes_and_dtypes() -> None:
    wrong = r"relu.default returns shape \(4, 6\), the graph declares \(4, 7\)"
    assert_refused(with_node(1, outputs=(spec(BATCH, 7),)), wrong, 1)
    assert_refused(with_node(1, outputs=(spec(BATCH, 6, dtype=torch.float16),)), "returns torch.float32", 1)
    assert_refused(with_node(1, outputs=(spec(BATCH, 6),) * 2), "returns 1 values, 2 are declared", 1)
    assert_refused(with_node(2, outputs=(None, spec(BATCH, 3))), "output 0 of .* is a tensor, none is declared", 2)
    assert_refused(with_node(1, outputs=()), "it needs value 1:0, which the graph does not have", 2)
    assert_refused(with_node(0, arguments=(CONSTANT, WEIGHT)), "linear.default does not accept its arguments", 0)
    assert_refused(with_node(0, arguments=(X,)), "does not accept its arguments", 0)
    assert_refused(with_node(1, keywords=(("nonsense", 1),)), "does not accept its arguments", 1)
    assert_refused(with_node(1, keywords=(("self", 1),)), "does not accept its arguments", 1)
    assert_refused(with_node(3, operator="aten.relu.default", outputs=(spec(BATCH, 3),)), "instead of being one number", 3)
    assert_refused(
        with_node(3, operator="aten.argmax.default", outputs=(spec(dtype=torch.int64),)), "no floating-point number", 3
    )


def test_absurd_sizes_are_refused_by_counting() -> None:
    huge = 2**50
    assert_refused(with_node(1, outputs=(spec(BATCH, huge),)), "bytes, more than the limit", 1)
    graph = small()
    weight = replace(graph.parameters[0], shape=(huge, huge), initialisation=None)
    assert_refused(replace(graph, parameters=(weight,)), "bytes, more than the limit")
    assert_refused(replace(graph, parameters=(replace(weight, shape=(-1, 4)),)), "negative size")
    assert_refused(replace(graph, inputs=(("x", spec(huge, 4)),)), "bytes, more than the limit")
    assert_refused(replace(graph, example=(("b", huge),)), "bytes, more than the limit")
    assert_refused(replace(graph, example=()), "the size 'b', which nothing binds")
    assert_refused(
        graph, "parameters and buffers take 120 bytes, more than the limit of 100", None, Limits(max_state_bytes=100)
    )
    assert_refused(graph, "has 4 nodes, more than the limit of 3", None, Limits(max_nodes=3))
    assert_refused(with_node(1, outputs=(spec(*[1] * 70),)), "has 70 dimensions", 1)


def test_what_would_really_allocate_is_refused_before_the_call() -> None:
    huge = (10**7, 10**7)
    for device in (None, "cpu", "cuda:0"):
        creation = with_call("aten.zeros.default", huge, outputs=(spec(1),), device=device)
        assert_refused(creation, "peer's own", 10)
    assert_refused(
        with_call("aten.to.device", X, "cpu", torch.float32, outputs=(spec(BATCH, 4),)), "names the device 'cpu'", 10
    )
    pinned = with_call("aten.zeros.default", (3,), outputs=(spec(3),), device=OwnDevice(), pin_memory=True)
    assert_refused(pinned, "is called with pin_memory", 10)
    sparse = with_call("aten.to.dtype_layout", X, outputs=(spec(BATCH, 4),), layout=torch.sparse_coo)
    assert_refused(sparse, "asks for the layout", 10)


def test_lists_longer_than_declared_are_refused_before_they_are_made() -> None:
    long = with_call("aten.arange.default", 2**32, outputs=(spec(2**32, dtype=torch.int64),), device=OwnDevice())
    pieces = Node(index=NodeIndex(11), operator="aten.unbind.int", arguments=(value(10), 0), outputs=(spec(dtype=torch.int64),))
    assert_refused(replace(long, nodes=(*long.nodes, pieces)), "returns 4294967296 tensors, 1 are declared", 11)
    split = replace(pieces, operator="aten.split.Tensor", arguments=(value(10), 1))
    assert_refused(replace(long, nodes=(*long.nodes, split)), "returns 4294967296 tensors, 1 are declared", 11)
    assert_refused(with_node(2, arguments=(value(1), 0, 1)), "does not accept its arguments", 2)
    assert_refused(with_node(2, arguments=(value(1), 3, 9)), "does not accept its arguments", 2)
    assert_refused(with_node(2, outputs=(spec(1),) * 5000), "returns 5000 values, more than 4096", 2)


def test_arguments_are_bounded() -> None:
    assert_refused(with_node(1, arguments=(value(0), (1,) * 200_000)), "hold more than 100000 values", 1)
    assert_refused(with_node(1, arguments=((((value(0),),),),)), "inside nested lists", 1)
    deep: Dimension = Symbol("b")
    for _ in range(300):
        deep = Operation(ExpressionOperator.ADD, (deep, 1))
    assert_refused(with_node(1, arguments=(value(0), deep)), "more than 200 terms", 1)
    zero = Operation(ExpressionOperator.MODULO, (Symbol("b"), 0))
    assert_refused(with_node(1, arguments=(value(0), zero)), "cannot be computed", 1)
    lonely = Operation(ExpressionOperator.ADD, (Symbol("b"),))
    assert_refused(with_node(1, outputs=(spec(lonely, 6),)), "too few operands", 1)
    assert_refused(with_node(1, arguments=(value(0), Symbol("unbound"))), "'unbound', which nothing binds", 1)


def test_names() -> None:
    graph = small()
    twice = (*graph.buffers, replace(graph.buffers[0], name="weight"))
    assert_refused(replace(graph, buffers=twice), "parameter or buffer 'weight'")
    tied = replace(graph.parameters[0], ties=("constant",))
    assert_refused(replace(graph, parameters=(tied,)), "parameter or buffer 'constant'")
    assert_refused(replace(graph, inputs=graph.inputs * 2), "batch input 'x'")
    assert_refused(replace(graph, parameters=(replace(graph.parameters[0], name=""),)), "empty or longer")
    assert_refused(replace(graph, parameters=(replace(graph.parameters[0], name="x" * 5000),)), "empty or longer")
    whole_numbers = replace(graph.parameters[0], dtype=torch.int64)
    assert_refused(replace(graph, parameters=(whole_numbers,)), "cannot be trained")


@pytest.mark.parametrize(
    ("target", "shape", "reason"),
    [(WEIGHT, (6, 4), "the parameter weight"), (CONSTANT, (3,), "the constant constant")],
)
def test_what_must_not_change_in_place(target: Argument, shape: tuple[int, ...], reason: str) -> None:
    assert_refused(with_call("aten.add_.Scalar", target, 1, outputs=(spec(*shape),)), f"changes {reason} in place", 10)
    flat = with_call("aten.view.default", target, (-1,), outputs=(spec(24 if len(shape) > 1 else 3),))
    through_a_view = Node(
        index=NodeIndex(11), operator="aten.zero_.default", arguments=(value(10),), outputs=flat.nodes[-1].outputs
    )
    assert_refused(replace(flat, nodes=(*flat.nodes, through_a_view)), f"changes {reason} in place", 11)


def test_running_statistics_count_as_changed_though_the_schema_is_silent() -> None:
    build = GraphBuilder()
    x = build.input("x", BATCH, 3, 2)
    statistics = build.buffer("mean", 3), build.buffer("variance", 3)
    normed = build.call("aten.batch_norm.default", x, None, None, *statistics, True, 0.1, 1e-5, False)
    graph = build.graph(build.call("aten.sum.default", normed))
    assert_refused(graph, "changes the constant mean in place", 0)
    validate_graph(replace(graph, buffers=tuple(replace(buffer, mutated=True) for buffer in graph.buffers)))


def test_inputs_and_mutated_buffers_may_change_in_place() -> None:
    validate_graph(with_call("aten.add_.Scalar", COUNTER, 1, outputs=(spec(3),)))
    validate_graph(with_call("aten.add_.Scalar", X, 1, outputs=(spec(BATCH, 4),)))


def test_initialisation_programs_pass_the_same_checks() -> None:
    graph = small()

    def with_program(program: Initialisation) -> OpGraph:
        return replace(graph, parameters=(replace(graph.parameters[0], initialisation=program),))

    good = filled((6, 4), 1.0, torch.float32)
    validate_graph(with_program(good))
    assert_refused(with_program(filled((6, 5), 1.0, torch.float32)), "initialisation of weight: node 0: it sends")
    node = good.nodes[0]
    file = replace(node, operator="aten.from_file.default")
    assert_refused(
        with_program(Initialisation(nodes=(file,), result=value(0))), "initialisation of weight: node 0: .*not allowed"
    )
    reads = replace(node, operator="aten.relu.default", arguments=(ParameterReference("weight"),), keywords=())
    assert_refused(with_program(Initialisation(nodes=(reads,), result=value(0))), "initialisation of weight: node 0: it needs")
    here = replace(node, keywords=(("dtype", torch.float32),))
    assert_refused(with_program(Initialisation(nodes=(here,), result=value(0))), "on the peer's own device")
    assert_refused(with_program(Initialisation(nodes=(node,), result=value(3))), "nothing computes it")


def test_boundaries_of_a_stage() -> None:
    model = transformer()
    first, last = slice_graph(model.graph, (model.cuts[2],))
    crossing = first.sends[0]

    def sends(**changes: object) -> StageGraph:
        return replace(first, sends=(replace(crossing, **changes), *first.sends[1:]))  # type: ignore[arg-type]

    def receives(boundary: Boundary) -> StageGraph:
        return replace(last, receives=(boundary, *last.receives[1:]))

    assert_refused(sends(target=StageIndex(0)), "it is sent from stage 0 to 0", crossing.value.node)
    assert_refused(sends(target=StageIndex(2)), "it is sent from stage 0 to 2", crossing.value.node)
    assert_refused(sends(spec=spec(3)), "the boundary says otherwise", crossing.value.node)
    assert_refused(sends(value=value(4000)), "nothing computes it", 4000)
    assert_refused(replace(first, sends=first.sends[:1] * 2), "crosses the same boundary twice", crossing.value.node)
    assert_refused(receives(replace(crossing, source=StageIndex(1))), "it is received from stage 1", crossing.value.node)
    whole = spec(BATCH, 8, 16, dtype=torch.int64)
    assert_refused(receives(replace(crossing, spec=whole)), "has no gradient", crossing.value.node)
    both = receives(replace(crossing, value=value(last.nodes[0].index)))
    assert_refused(both, "received and computed on the same stage", last.nodes[0].index)
    assert_refused(replace(last, stage=StageIndex(5)), "stage 5 is none of 2")
    assert_refused(replace(first, recomputed=frozenset({NodeIndex(99)})), "is no node of the stage", 99)
    assert_refused(replace(first, recomputed=frozenset({NodeIndex(2)})), "it is recomputed, but depends on", 2)


def test_a_received_leaf_must_not_change_in_place() -> None:
    build = GraphBuilder()
    hidden = build.call("aten.linear.default", build.input("x", BATCH, 4), build.parameter("weight", 6, 4))
    active = build.call("aten.relu_.default", hidden)
    loss = build.call("aten.mean.default", active)
    (whole,) = slice_graph(build.graph(loss), ())
    arrives = Boundary(value=hidden, spec=spec(BATCH, 6), source=StageIndex(0), target=StageIndex(1), differentiable=True)
    stage = replace(whole, stage=StageIndex(1), num_stages=2, nodes=whole.nodes[1:], parameters=(), inputs=())
    assert_refused(replace(stage, receives=(arrives,)), "changes the received value 0:0 in place", 1)
    validate_stage(replace(stage, receives=(replace(arrives, differentiable=False),)))


def test_uses_of_shared_parameters() -> None:
    (graph,) = slice_graph(transformer(tied=True).graph, ())
    (shared,) = graph.shared
    other = Use(NodeIndex(1), 0, StageIndex(0))

    def listed(*found: SharedParameter) -> StageGraph:
        return replace(graph, shared=found)

    head = shared.uses[1].node
    assert_refused(listed(), "further use of embedding", head)
    assert_refused(listed(replace(shared, uses=shared.uses[:1])), "further use of embedding", head)
    assert_refused(listed(replace(shared, uses=(other, *shared.uses))), "is listed that is none", 1)
    assert_refused(listed(replace(shared, name="positions")), "listed for another parameter", shared.uses[0].node)
    assert_refused(listed(shared, shared), "listed twice")
    assert_refused(listed(replace(shared, uses=shared.uses[::-1])), "out of order")
