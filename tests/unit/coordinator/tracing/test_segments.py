"""What the planner is told: work, cuts and memory of the parts of a graph."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.coordinator.models.gpt import GPT
from atoll.coordinator.tracing.cuts import legal_cuts, module_range, narrow_cuts
from atoll.coordinator.tracing.dataflow import Dataflow
from atoll.coordinator.tracing.memory import MemoryModel
from atoll.coordinator.tracing.rehearsal import rehearse
from atoll.coordinator.tracing.segments import segments_of
from atoll.coordinator.tracing.slicing import slice_graph
from atoll.protocol.graph import OpGraph
from support.graphs import gpt_graph, resnet_graph, token_batch, traced


def wide_gpt() -> GPT:
    """Four layers of width 64."""
    return GPT(layers=4, width=64, heads=4, context=64, vocabulary=128)


@cache
def wide_graph() -> OpGraph:
    return traced(wide_gpt, token_batch(2, 32))


def test_flops_are_those_of_the_matrix_products() -> None:
    graph = wide_graph()
    rehearsal = rehearse(graph)
    tokens, width, length = 2 * 32, 64, 32
    expected = 4 * (2 * tokens * 12 * width**2 + 2 * 2 * 2 * length**2 * width) + 2 * tokens * width * 128
    assert sum(cost.matrix_flops for cost in rehearsal.costs) == pytest.approx(expected, rel=0.01)
    assert sum(cost.flops for cost in rehearsal.costs) >= sum(cost.matrix_flops for cost in rehearsal.costs)


def test_narrow_cuts_of_a_transformer_are_its_residual_stream() -> None:
    graph = wide_graph()
    cuts = narrow_cuts(graph, [cost.matrix_flops for cost in rehearse(graph).costs])
    assert len(cuts) == 9
    assert {cut.num_bytes for cut in cuts} == {2 * 32 * 64 * 4}
    for cut in cuts:
        (boundary,) = slice_graph(graph, (cut.position,))[0].sends
        assert boundary.differentiable


def test_every_narrow_cut_is_legal_and_sends_what_it_says() -> None:
    graph = resnet_graph()
    legal = legal_cuts(graph)
    cuts = narrow_cuts(graph, [cost.matrix_flops for cost in rehearse(graph).costs])
    assert set(cuts) <= set(legal)
    bindings = dict(graph.example)
    for cut in legal:
        sends = slice_graph(graph, (cut.position,))[0].sends
        assert sum(boundary.spec.num_bytes(bindings) for boundary in sends) == cut.num_bytes


def test_there_is_no_cut_where_a_view_with_gaps_would_cross() -> None:
    graph = gpt_graph()
    unbind = next(node for node in graph.nodes if node.operator == "aten.unbind.int")
    legal = {cut.position for cut in legal_cuts(graph)}
    assert unbind.index in legal
    assert unbind.index + 1 not in legal


def test_memory_of_a_stage() -> None:
    graph = wide_graph()
    rehearsal = rehearse(graph)
    adamw, sgd = segments_of(rehearsal, copies=3), segments_of(rehearsal, copies=1)
    end = adamw.num_segments
    parameters = sum(spec.num_bytes for spec in graph.parameters)
    table = graph.parameters[0].num_bytes
    whole = adamw.memory(0, end, False)
    assert whole.fixed_bytes - sgd.memory(0, end, False).fixed_bytes == 2 * parameters
    assert whole.fixed_bytes >= 4 * parameters + table
    frugal = adamw.memory(0, end, True)
    assert frugal.microbatch_bytes < whole.microbatch_bytes / 10
    assert frugal.fixed_bytes > whole.fixed_bytes
    first, second = adamw.memory(0, 4, False), adamw.memory(4, end, False)
    assert max(first.fixed_bytes, second.fixed_bytes) < whole.fixed_bytes
    assert first.microbatch_bytes + second.microbatch_bytes == pytest.approx(whole.microbatch_bytes, rel=0.1)


def test_work_and_bytes_line_up_with_positions() -> None:
    rehearsal = rehearse(resnet_graph())
    segments = segments_of(rehearsal, copies=2)
    for sums in (segments.forward_flops, segments.backward_flops, segments.parameter_bytes):
        assert len(sums) == len(segments.positions)
        assert list(sums) == sorted(sums)
    assert segments.positions[0] == 0
    assert segments.positions[-1] == len(resnet_graph().nodes)
    assert segments.forward_bytes[1:-1] == segments.backward_bytes[1:-1]
    assert 1.5 * segments.forward_flops[-1] < segments.backward_flops[-1] <= 2.0 * segments.forward_flops[-1]
    assert segments.parameter_bytes[-1] == sum(spec.num_bytes for spec in rehearsal.graph.parameters)


def test_values_without_a_gradient_do_not_come_back() -> None:
    graph = gpt_graph()
    segments = segments_of(rehearse(graph), copies=3)
    assert all(back <= there for there, back in zip(segments.forward_bytes, segments.backward_bytes, strict=True))
    assert max(segments.backward_bytes) > 0


def test_parameters_of_several_segments_are_told() -> None:
    graph = gpt_graph()
    (tied,) = segments_of(rehearse(graph), copies=3).shared
    assert tied.segments[0] == 0
    assert len(tied.segments) == 2
    assert tied.num_bytes == graph.parameters[0].num_bytes


def test_the_memory_of_all_ranges_is_that_of_each() -> None:
    graph = gpt_graph()
    rehearsal = rehearse(graph)
    segments = segments_of(rehearsal, copies=3)
    model = MemoryModel(rehearsal, Dataflow(graph), 3)
    for first, end in combinations(range(len(segments.positions)), 2):
        for recompute in (False, True):
            alone = model.need(segments.positions[first], segments.positions[end], recompute=recompute)
            assert segments.memory(first, end, recompute) == alone


def test_a_part_is_named_by_its_first_and_last_module() -> None:
    graph = gpt_graph()
    assert module_range(graph.nodes) == ("token_embedding", "head")
    assert module_range(graph.nodes[14:22]) == ("blocks.0.feed_forward_norm", "blocks.0.feed_forward.output")
    assert module_range(()) == ("", "")


class Chain(nn.Module):
    """Layers of one width: a cut anywhere is as narrow as any other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(400))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            features = torch.tanh(layer(features))
        return functional.cross_entropy(features, labels)


def test_a_planner_is_not_flooded() -> None:
    graph = traced(Chain, {"features": torch.zeros(2, 8), "labels": torch.zeros(2, dtype=torch.long)})
    positions = segments_of(rehearse(graph), copies=1).positions
    assert 200 <= len(positions) <= 260
