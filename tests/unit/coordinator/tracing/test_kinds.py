"""Which segments are of one kind."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from atoll.coordinator.models.gpt import GPT
from atoll.coordinator.tracing.kinds import KindSettings, SegmentKinds, segment_kinds
from atoll.coordinator.tracing.rehearsal import rehearse
from atoll.coordinator.tracing.segments import segments_of
from atoll.protocol.assignment import OptimizerSettings
from atoll.protocol.graph import BufferReference, BufferSpec, OpGraph, ParameterReference, ParameterSpec
from atoll.protocol.validation import validate_stage
from support.graphs import gpt_graph, resnet_graph, token_batch, traced

SETTINGS = KindSettings(precision="fp32", optimizer=OptimizerSettings(), clips=True)


def kinds_of(graph: OpGraph, settings: KindSettings = SETTINGS, sizes: dict[str, int] | None = None) -> SegmentKinds:
    rehearsal = rehearse(graph)
    positions = segments_of(rehearsal, copies=3).positions
    return segment_kinds(rehearsal, positions, settings, sizes or dict(graph.example))


def fingerprints(found: SegmentKinds) -> list[str]:
    return [kind.fingerprint for kind in found.kinds]


@cache
def wide_graph() -> OpGraph:
    return traced(lambda: GPT(layers=2, width=64, heads=4, context=128, vocabulary=64), token_batch())


def renamed(graph: OpGraph) -> OpGraph:
    """The same model under other names."""

    def other(argument: object) -> object:
        match argument:
            case ParameterReference(name):
                return ParameterReference(f"other.{name}")
            case BufferReference(name):
                return BufferReference(f"other.{name}")
            case tuple():
                return tuple(map(other, argument))
        return argument

    def spec(one: ParameterSpec | BufferSpec) -> ParameterSpec | BufferSpec:
        return replace(one, name=f"other.{one.name}", ties=())

    nodes = (
        replace(node, arguments=other(node.arguments), module=f"other.{node.module}", evaluation=None)  # type: ignore[arg-type]
        for node in graph.nodes
    )
    return replace(
        graph,
        nodes=tuple(nodes),
        parameters=tuple(map(spec, graph.parameters)),  # type: ignore[arg-type]
        buffers=tuple(map(spec, graph.buffers)),  # type: ignore[arg-type]
    )


def test_all_blocks_of_a_transformer_are_alike() -> None:
    shallow, deep = kinds_of(gpt_graph(4)), kinds_of(gpt_graph(12))
    assert len(deep.of_segment) > 12
    assert len(deep.kinds) <= 6
    assert fingerprints(shallow) == fingerprints(deep)


def test_names_do_not_matter() -> None:
    graph = gpt_graph(2, tied=False)
    assert fingerprints(kinds_of(graph)) == fingerprints(kinds_of(renamed(graph)))


def test_a_shared_parameter_is_one_like_any_other() -> None:
    tied, untied = kinds_of(gpt_graph(2, tied=True)), kinds_of(gpt_graph(2, tied=False))
    assert fingerprints(tied) == fingerprints(untied)
    assert all(kind.graph.shared == () for kind in tied.kinds)


def test_another_width_is_another_kind() -> None:
    assert not set(fingerprints(kinds_of(gpt_graph(2)))) & set(fingerprints(kinds_of(wide_graph())))


def test_the_sizes_of_the_microbatch_count() -> None:
    graph = gpt_graph(2)
    sizes = dict(graph.example)
    larger = {symbol: 2 * size for symbol, size in sizes.items()}
    assert fingerprints(kinds_of(graph, sizes=sizes)) == fingerprints(kinds_of(graph))
    assert not set(fingerprints(kinds_of(graph, sizes=larger))) & set(fingerprints(kinds_of(graph)))


def test_the_probability_of_dropout_does_not_count_but_its_presence_does() -> None:
    little, much, none = (fingerprints(kinds_of(gpt_graph(2, dropout=rate))) for rate in (0.1, 0.2, 0.0))
    assert little == much != none


@pytest.mark.parametrize(
    "other",
    [
        replace(SETTINGS, precision="bf16"),
        replace(SETTINGS, clips=False),
        replace(SETTINGS, optimizer=OptimizerSettings(name="sgd")),
        replace(SETTINGS, optimizer=OptimizerSettings(weight_decay=0.1)),
    ],
)
def test_how_it_is_run_counts(other: KindSettings) -> None:
    assert not set(fingerprints(kinds_of(gpt_graph(2)))) & set(fingerprints(kinds_of(gpt_graph(2), other)))


def test_the_blocks_of_a_convolutional_network_differ_where_their_shapes_do() -> None:
    found = kinds_of(resnet_graph(18))
    assert len(found.kinds) == len(set(fingerprints(found)))
    assert len(found.kinds) > 5


@pytest.mark.parametrize("graph", [gpt_graph(2), gpt_graph(2, tied=False), resnet_graph(18)], ids=["tied", "untied", "resnet"])
def test_every_kind_can_be_run_alone(graph: OpGraph) -> None:
    for kind in kinds_of(graph).kinds:
        validate_stage(kind.graph)
