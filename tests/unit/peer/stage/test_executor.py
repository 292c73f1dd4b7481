"""Compiled nodes: what is kept and what is dropped, sizes that vary, modes that nodes ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atoll.coordinator.tracing.slicing import slice_graph
from atoll.peer.stage.executor import Layout, Program, base_slots, out_of_memory
from atoll.protocol.graph import (
    BufferReference,
    ExpressionOperator,
    InputReference,
    Operation,
    ParameterReference,
    Reference,
    StageGraph,
    ValueReference,
)
from support.hand_graphs import BATCH, GraphBuilder
from support.hand_models import convolutional

CPU = torch.device("cpu")


def run(
    graph: StageGraph, given: dict[Reference, torch.Tensor], rows: int, *, evaluation: bool = False
) -> tuple[Program, list[Any]]:
    layout = Layout(graph)
    program = Program(graph, layout, CPU, evaluation=evaluation)
    slots = base_slots(layout, given, {})
    program.run(slots, {"b": rows}, lambda node: node)
    return program, slots


def chain() -> tuple[StageGraph, ValueReference]:
    """x times a weight, repeated b times, summed: with sizes in lists and a list of values."""
    build = GraphBuilder()
    x = build.input("x", BATCH, 4)
    scaled = build.call("aten.mul.Tensor", x, build.parameter("weight", 4))
    wide = build.call("aten.cat.default", (scaled, x, scaled), 1)
    flat = build.call("aten.view.default", wide, (Operation(ExpressionOperator.MULTIPLY, (BATCH, 12)),))
    loss = build.call("aten.sum.default", flat)
    return slice_graph(build.graph(loss), ())[0], loss


@pytest.mark.parametrize("rows", [2, 5])
def test_only_what_is_asked_for_is_kept(rows: int) -> None:
    graph, loss = chain()
    weight, x = torch.arange(4.0), torch.ones(rows, 4)
    program, slots = run(graph, {ParameterReference("weight"): weight, InputReference("x"): x}, rows)
    assert float(slots[program.slot(loss)]) == rows * (6.0 * 2 + 4)
    assert [slot for slot, value in enumerate(slots) if value is not None] == [program.slot(loss)]


def test_one_program_serves_many_sizes() -> None:
    graph, loss = chain()
    layout = Layout(graph)
    program = Program(graph, layout, CPU, evaluation=False)
    for rows in [*range(1, 80), 3]:
        given: dict[Reference, torch.Tensor] = {
            ParameterReference("weight"): torch.ones(4),
            InputReference("x"): torch.ones(rows, 4),
        }
        slots = base_slots(layout, given, {})
        program.run(slots, {"b": rows}, lambda node: node)
        assert float(slots[program.slot(loss)]) == rows * 12.0


def test_nodes_may_ask_for_no_gradient_and_for_full_precision() -> None:
    build = GraphBuilder()
    x = build.input("x", BATCH, 4)
    first, second, third = (build.parameter(name, 4, 4) for name in ("first", "second", "third"))
    constant = build.call("aten.linear.default", x, first, gradient=False)
    exact = build.call("aten.linear.default", x, second, full_precision=True)
    rounded = build.call("aten.linear.default", constant, third)
    loss = build.call("aten.sum.default", build.call("aten.add.Tensor", exact, rounded))
    graph = build.graph(loss, exact=exact, rounded=rounded, constant=constant)
    given: dict[Reference, torch.Tensor] = {
        ParameterReference(name): torch.randn(4, 4).requires_grad_() for name in ("first", "second", "third")
    }
    given[InputReference("x")] = torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        program, slots = run(slice_graph(graph, ())[0], given, 2)
    found = {name: slots[program.slot(value)] for name, value in graph.metrics}
    assert not found["constant"].requires_grad
    assert found["exact"].requires_grad
    assert {name: value.dtype for name, value in found.items()} == {
        "constant": torch.bfloat16,
        "exact": torch.float32,
        "rounded": torch.bfloat16,
    }


def test_inputs_from_which_something_is_changed_in_place_are_known() -> None:
    (graph,) = slice_graph(convolutional().graph, ())
    program = Program(graph, Layout(graph), CPU, evaluation=False)
    candidates = [InputReference("images"), InputReference("labels")]
    assert program.inputs_at_risk(candidates) == {InputReference("images")}


def test_running_statistics_are_written_in_training_alone() -> None:
    build = GraphBuilder()
    x = build.input("x", BATCH, 3)
    statistics = build.buffer("mean", 3, mutated=True), build.buffer("variance", 3, mutated=True, value=1.0)
    normed = build.call(
        "aten.batch_norm.default",
        *(x, None, None, *statistics, True, 0.1, 1e-5, False),
        evaluation=(x, None, None, *statistics, False, 0.1, 1e-5, False),
    )
    build.parameter("weight", 3)
    (graph,) = slice_graph(build.graph(build.call("aten.sum.default", normed)), ())
    for evaluation in (True, False):
        mean = torch.zeros(3)
        given: dict[Reference, torch.Tensor] = {
            BufferReference("mean"): mean,
            BufferReference("variance"): torch.ones(3),
            InputReference("x"): torch.arange(6.0).view(2, 3),
        }
        run(graph, given, 2, evaluation=evaluation)
        assert bool(mean.any()) is not evaluation


def test_memory_that_ran_out_is_recognised() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**46)
    assert out_of_memory(failed.value)
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."))
    assert not out_of_memory(RuntimeError("size mismatch"))
