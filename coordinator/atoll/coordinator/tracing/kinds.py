"""The kinds of segments in a traced model: what has to be measured once where many segments cost the same.

Two segments are of one kind when they execute the same operators on the same shapes, whatever their parameters are called and
wherever they stand in the graph. A language model of any depth has a handful. A kind's *fingerprint* is a hash of all that its
time depends on, and is the same in every run, so that measurements can be kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from atoll.coordinator.tracing.fingerprint import describe_segment
from atoll.coordinator.tracing.rehearsal import Rehearsal
from atoll.coordinator.tracing.slicing import slice_graph
from atoll.protocol.assignment import OptimizerSettings
from atoll.protocol.graph import SharedParameter, StageGraph
from atoll.protocol.ids import NodeIndex
from atoll.protocol.measurement import MEASUREMENT_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSettings:
    """How a segment is run, besides its graph: what the fingerprint depends on too."""

    precision: str
    optimizer: OptimizerSettings
    clips: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentKind:
    """``graph`` is one segment of the kind, as a stage that can be run alone; ``inputs`` are the batch inputs that it uses."""

    fingerprint: str
    graph: StageGraph

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.graph.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentKinds:
    """``of_segment[k]`` is the place in ``kinds`` of segment ``k``'s kind."""

    kinds: tuple[SegmentKind, ...]
    of_segment: tuple[int, ...]


def segment_kinds(
    rehearsal: Rehearsal, positions: Sequence[NodeIndex], settings: KindSettings, bindings: Mapping[str, int]
) -> SegmentKinds:
    """The kinds of the segments between ``positions`` (from 0 to the number of nodes), in the order of their first segments.

    ``bindings`` are the sizes of a real microbatch.
    """
    places: dict[str, int] = {}
    kinds: list[SegmentKind] = []
    of_segment: list[int] = []
    for stage in slice_graph(rehearsal.graph, positions[1:-1], rehearsal.differentiable):
        graph = _alone(stage)
        fingerprint = _fingerprint(graph, settings, bindings)
        if fingerprint not in places:
            places[fingerprint] = len(kinds)
            kinds.append(SegmentKind(fingerprint=fingerprint, graph=graph))
        of_segment.append(places[fingerprint])
    return SegmentKinds(kinds=tuple(kinds), of_segment=tuple(of_segment))


def _fingerprint(graph: StageGraph, settings: KindSettings, bindings: Mapping[str, int]) -> str:
    optimizer = settings.optimizer
    run = (
        MEASUREMENT_VERSION,
        settings.precision,
        settings.clips,
        optimizer.name,
        # Each of these adds a pass over the weights; how large it is does not matter.
        optimizer.weight_decay != 0.0,
        optimizer.momentum != 0.0,
        optimizer.nesterov,
    )
    return blake2b(repr((run, describe_segment(graph, bindings))).encode(), digest_size=16).hexdigest()


def _alone(graph: StageGraph) -> StageGraph:
    """``graph`` without what ties it to other stages: a parameter that it shares with them is one like any other."""
    shared = (
        SharedParameter(name=item.name, uses=tuple(use for use in item.uses if use.stage == graph.stage))
        for item in graph.shared
    )
    programless = tuple(replace(spec, initialisation=None, ties=()) for spec in graph.parameters)
    return replace(graph, shared=tuple(item for item in shared if len(item.uses) > 1), parameters=programless)
