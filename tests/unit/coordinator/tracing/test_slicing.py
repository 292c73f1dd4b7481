"""Slices of a graph are complete and minimal, and compute what the whole does, wherever the cuts fall."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from atoll.coordinator.tracing.cuts import legal_cuts
from atoll.coordinator.tracing.rehearsal import differentiable_values
from atoll.coordinator.tracing.slicing import slice_graph
from atoll.peer.stage.stage import StageSettings
from atoll.protocol.assignment import OptimizerSettings
from atoll.protocol.graph import OpGraph, ParameterReference, StageGraph, ValueReference
from atoll.protocol.validation import validate_stage
from support.graphs import gpt_graph, resnet_graph, token_batch, traced
from support.pipelines import HandPipeline, Sample

WIDTH = 16


class Crossing(nn.Module):
    """An encoder and a decoder: a skip over several layers, a mask made from the input, a table used at both ends."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.decoder = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        keep = torch.ones_like(tokens, dtype=torch.bool)
        keep.logical_and_(tokens != 3)
        mask = keep.unsqueeze(-1)
        encoded = self.table(tokens)
        for layer in self.encoder:
            encoded = torch.relu_(layer(encoded)) * mask
        decoded = self.dropout(self.norm(encoded))
        size = decoded.detach().abs().mean()
        for layer in self.decoder:
            decoded = torch.tanh(layer(torch.cat([decoded, encoded], dim=-1))) * mask
        logits = functional.linear(decoded, self.table.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), {"size": size}


@cache
def crossing_graph() -> OpGraph:
    return traced(Crossing, token_batch(2, 8))


GRAPHS: Mapping[str, Callable[[], OpGraph]] = {
    "gpt": lambda: gpt_graph(dropout=0.1),
    "resnet": resnet_graph,
    "encoder-decoder": crossing_graph,
}


@cache
def positions(name: str) -> tuple[int, ...]:
    return tuple(cut.position for cut in legal_cuts(GRAPHS[name]()))


@cache
def differentiable(name: str) -> frozenset[ValueReference]:
    return differentiable_values(GRAPHS[name]())


def assert_complete(graph: OpGraph, stages: tuple[StageGraph, ...]) -> None:
    """Every node has one home, everything read is at hand, and what one sends another receives."""
    homes = [node.index for stage in stages for node in stage.nodes if node.index not in stage.recomputed]
    assert homes == [node.index for node in graph.nodes]
    assert [stage.loss for stage in stages if stage.loss is not None] == [graph.loss]
    assert sorted(metric for stage in stages for metric in stage.metrics) == sorted(graph.metrics)
    assert {spec for stage in stages for spec in stage.parameters} == set(graph.parameters)
    assert {spec.name for stage in stages for spec in stage.buffers} == {spec.name for spec in graph.buffers}
    sent = [boundary for stage in stages for boundary in stage.sends]
    received = [boundary for stage in stages for boundary in stage.receives]
    assert sorted(sent, key=repr) == sorted(received, key=repr)
    for stage in stages:
        assert all(boundary.source == stage.stage < boundary.target for boundary in stage.sends)
        assert {boundary.value for boundary in stage.sends} <= {
            ValueReference(node.index, number) for node in stage.nodes for number in range(len(node.outputs))
        } | {boundary.value for boundary in stage.receives}
        validate_stage(stage)


@pytest.mark.parametrize("name", GRAPHS)
@settings(max_examples=15)
@given(data=st.data())
def test_any_legal_cuts_give_complete_stages(name: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.sampled_from(positions(name)), max_size=4)))
    assert_complete(GRAPHS[name](), slice_graph(GRAPHS[name](), cuts, differentiable(name)))


def sample(name: str, seed: int) -> Sample:
    """A microbatch for one of the graphs."""
    generator = torch.Generator().manual_seed(seed)
    if name == "resnet":
        pictures = torch.randn(2, 3, 16, 16, generator=generator)
        return Sample(inputs={"images": pictures, "labels": torch.randint(10, (2,), generator=generator)}, weight=2.0)
    drawn = torch.randint(64, (2, 2, 8 + seed), generator=generator)
    return Sample(inputs={"tokens": drawn[0], "targets": drawn[1]}, weight=float(drawn[0].numel()))


SETTINGS = StageSettings(run_seed=3, device=torch.device("cpu"), optimizer=OptimizerSettings(name="sgd", momentum=0.9))


def train(name: str, cuts: tuple[int, ...]) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    pipeline = HandPipeline(slice_graph(GRAPHS[name](), cuts, differentiable(name)), SETTINGS, in_flight=2)
    told = [pipeline.step(step, [sample(name, 2 * step), sample(name, 2 * step + 1)]) for step in (1, 2)]
    return told, pipeline.state()


@cache
def uncut(name: str) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    return train(name, ())


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("share", [(0.5,), (0.2, 0.7), (0.1, 0.4, 0.45, 0.9)], ids=str)
def test_cut_graphs_train_to_the_same_bits(name: str, share: tuple[float, ...]) -> None:
    torch.set_num_threads(1)
    legal = positions(name)
    told, state = train(name, tuple(legal[int(part * len(legal))] for part in share))
    expected, wanted = uncut(name)
    assert told == expected
    assert set(state) == set(wanted)
    assert all(torch.equal(state[key], wanted[key]) for key in wanted)


def test_cheap_values_are_computed_again_and_not_sent() -> None:
    graph = crossing_graph()
    masks = {node.index for node in graph.nodes if node.operator in ("aten.ones_like.default", "aten.logical_and_.default")}
    assert len(masks) == 2
    legal = positions("encoder-decoder")
    stages = slice_graph(graph, (legal[len(legal) // 2],))
    assert masks <= stages[1].recomputed
    assert all(boundary.spec.dtype == torch.float32 for boundary in stages[0].sends)
    assert "tokens" in {name for name, _ in stages[1].inputs}


def test_a_skip_goes_along_the_chain_of_those_who_use_it() -> None:
    graph = crossing_graph()
    cats = [node for node in graph.nodes if node.operator == "aten.cat.default"]
    encoded = list(cats[0].references())[1]
    stages = slice_graph(graph, tuple(node.index for node in cats))
    hops = [(boundary.source, boundary.target) for stage in stages for boundary in stage.sends if boundary.value == encoded]
    assert hops == [(0, 1), (1, 2), (2, 3)]


def test_a_value_passes_over_stages_that_do_not_use_it() -> None:
    graph = crossing_graph()
    norm = next(node for node in graph.nodes if node.operator == "aten.layer_norm.default")
    first = next(node for node in graph.nodes if node.operator == "aten.cat.default")
    encoded = list(first.references())[1]
    between = [position for position in positions("encoder-decoder") if norm.index < position <= first.index]
    stages = slice_graph(graph, (between[0], between[-1]))
    assert [(one.source, one.target) for one in stages[0].sends if one.value == encoded] == [(0, 2)]


def test_a_shared_parameter_names_all_its_uses_on_every_holder() -> None:
    graph = gpt_graph()
    stages = slice_graph(graph, (8, 30))
    (shared,) = stages[0].shared
    assert shared.name == "token_embedding.weight"
    assert stages[1].shared == ()
    assert stages[2].shared == (shared,)
    assert shared.stages == (0, 2)
    for use in shared.uses:
        assert list(graph.nodes[use.node].references())[use.position] == ParameterReference(shared.name)


def test_cuts_that_would_change_numbers_are_refused() -> None:
    graph = resnet_graph()
    in_place = next(node for node in graph.nodes if node.operator == "aten.relu_.default")
    with pytest.raises(ValueError, match="must not be modified on the far side"):
        slice_graph(graph, (in_place.index,))
    for cuts in ((0,), (9, 9), (20, 13), (len(graph.nodes),)):
        with pytest.raises(ValueError, match="do not ascend"):
            slice_graph(graph, cuts)


class Recurrent(nn.Module):
    """Uses one batch norm twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        hidden = self.norm(self.linear(self.norm(features)))
        return functional.cross_entropy(hidden, labels)


def test_a_mutated_buffer_stays_on_one_stage() -> None:
    graph = traced(Recurrent, {"features": torch.zeros(4, 8), "labels": torch.zeros(4, dtype=torch.long)})
    norms = [node.index for node in graph.nodes if node.operator == "aten.batch_norm.default"]
    assert not any(norms[0] < cut.position <= norms[1] for cut in legal_cuts(graph))
    with pytest.raises(ValueError, match="must stay on one stage"):
        slice_graph(graph, (norms[1],))


class DropsBranches(nn.Module):
    """Draws in training only, and uses another value instead in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        branch = self.branch(features)
        if self.training:
            branch = branch * (torch.rand(features.shape[0], 1, device=features.device) < 0.5)
        return functional.cross_entropy(self.head(features + branch), labels)


def test_what_training_alone_computes_does_not_cross() -> None:
    graph = traced(DropsBranches, {"features": torch.zeros(4, 8), "labels": torch.zeros(4, dtype=torch.long)})
    alone = [node.index for node in graph.nodes if node.training_only]
    add = next(node.index for node in graph.nodes if node.operator == "aten.add.Tensor")
    assert alone
    assert not any(alone[0] < cut.position <= add for cut in legal_cuts(graph))


def test_state_that_no_node_uses_is_kept_by_the_first_stage() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)
            self.head = nn.Linear(4, 4)
            self.unused = nn.Parameter(torch.ones(3))
            self.register_buffer("note", torch.ones(2))

        def forward(self, features: Tensor, labels: Tensor) -> Tensor:
            return functional.cross_entropy(self.head(self.linear(features)), labels)

    graph = traced(Spare, {"features": torch.zeros(4, 8), "labels": torch.zeros(4, dtype=torch.long)})
    first, second = slice_graph(graph, (1,))
    assert "unused" in {spec.name for spec in first.parameters}
    assert "note" in {spec.name for spec in first.buffers}
    assert "unused" not in {spec.name for spec in second.parameters}


class Projected(nn.Module):
    """Projects its input by a large fixed matrix before it is used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("projection", torch.randn(64, 32))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        fixed = features.mul(2.0) @ self.get_buffer("projection")
        hidden = self.layers[1](torch.relu(self.layers[0](fixed)))
        return functional.cross_entropy(hidden + fixed, labels)


def test_costly_values_are_sent_even_if_they_depend_on_no_parameter() -> None:
    graph = traced(Projected, {"features": torch.zeros(4, 64), "labels": torch.zeros(4, dtype=torch.long)})
    relu = next(node.index for node in graph.nodes if node.operator == "aten.relu.default")
    first, second = slice_graph(graph, (relu,))
    assert not second.recomputed
    assert [boundary.differentiable for boundary in first.sends] == [False, True]
