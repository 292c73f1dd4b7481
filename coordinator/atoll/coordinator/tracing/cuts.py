"""Where a graph may be cut, and what would cross there."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from atoll.coordinator.tracing.dataflow import Dataflow, all_references
from atoll.coordinator.tracing.effects import partial_views
from atoll.protocol.graph import Node, OpGraph, ParameterReference, ValueReference
from atoll.protocol.ids import NodeIndex

MAX_CANDIDATES = 256
"""Cuts that a planner is given to choose from; more would not make a plan better, only slower to find."""

NARROWER = 1.5
NEAR = 0.2
"""A cut gives way to two that are NARROWER times narrower and enclose it within this share of all work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A cut before node ``position``; ``num_bytes`` crosses it forward for one microbatch of the example's sizes."""

    position: NodeIndex
    num_bytes: int


def legal_cuts(graph: OpGraph, flow: Dataflow | None = None) -> tuple[Cut, ...]:
    """Every position at which ``graph`` may be cut, in order.

    Not where a tensor that crosses is modified on the far side, nor between two nodes that use one mutated buffer, nor where
    nothing crosses. Nor where a view with gaps crosses: it arrives without them, and kernels that choose their algorithm by the
    layout of their operands may then differ in the last bit from the uncut graph.
    """
    flow = Dataflow(graph) if flow is None else flow
    forbidden = [0] * (len(graph.nodes) + 1)
    for first, last, _ in flow.forbidden_ranges():
        forbidden[first + 1] += 1
        forbidden[last + 1] -= 1
    crossing, gaps = _crossing_bytes(graph, flow)
    cuts, depth = [], 0
    for position in range(1, len(graph.nodes)):
        depth += forbidden[position]
        if depth == 0 and crossing[position] > 0 and gaps[position] == 0:
            cuts.append(Cut(position=NodeIndex(position), num_bytes=crossing[position]))
    return tuple(cuts)


def narrow_cuts(graph: OpGraph, work: Iterable[float], flow: Dataflow | None = None) -> tuple[Cut, ...]:
    """The legal cuts worth considering, in order; ``work`` holds for each node what it costs.

    Of cuts with no work between them the narrowest is kept. A cut between two clearly narrower ones that are near is left out,
    and so is one with no parameter on either side.
    """
    before = [0.0, *itertools.accumulate(work)]
    users = [node.index for node in graph.nodes if any(isinstance(item, ParameterReference) for item in node.references())]
    kept: list[Cut] = []
    for cut in legal_cuts(graph, flow):
        if not users or not users[0] < cut.position <= users[-1]:
            continue
        if kept and before[cut.position] == before[kept[-1].position]:
            kept[-1] = min(kept[-1], cut, key=_width)
        else:
            kept.append(cut)
    chosen = [cut for number, cut in enumerate(kept) if not _is_enclosed(kept, number, before)]
    return tuple(_thinned(chosen, before))


def _width(cut: Cut) -> int:
    return cut.num_bytes


def _is_enclosed(cuts: list[Cut], number: int, before: list[float]) -> bool:
    """Whether narrower cuts on both sides are near enough to be as good for balance."""
    width = cuts[number].num_bytes

    def nearest(candidates: Iterable[Cut]) -> float | None:
        return next((before[other.position] for other in candidates if NARROWER * other.num_bytes <= width), None)

    left, right = nearest(reversed(cuts[:number])), nearest(cuts[number + 1 :])
    return left is not None and right is not None and right - left <= NEAR * before[-1]


def _thinned(cuts: list[Cut], before: list[float]) -> Iterator[Cut]:
    """At most MAX_CANDIDATES: the narrowest of each of as many parts of equal work."""
    if len(cuts) <= MAX_CANDIDATES:
        yield from cuts
        return
    parts: dict[int, Cut] = {}
    for cut in cuts:
        part = int(MAX_CANDIDATES * before[cut.position] / (before[-1] or 1.0))
        best = parts.get(part, cut)
        parts[part] = min(best, cut, key=_width)
    yield from (parts[part] for part in sorted(parts))


def crossing_values(graph: OpGraph, flow: Dataflow) -> Iterator[tuple[ValueReference, NodeIndex]]:
    """(value, last node that reads it) of every value that would be sent across a cut between the two."""
    last: dict[ValueReference, NodeIndex] = {}
    for node in graph.nodes:
        for reference in all_references(node):
            if isinstance(reference, ValueReference) and not flow.recomputable(reference):
                last[reference] = node.index
    yield from last.items()


def _crossing_bytes(graph: OpGraph, flow: Dataflow) -> tuple[list[int], list[int]]:
    """For a cut before each node: the bytes that cross it, and how many of the values have gaps."""
    bindings, partial = dict(graph.example), partial_views(graph.nodes)
    sizes, gaps = [0] * (len(graph.nodes) + 1), [0] * (len(graph.nodes) + 1)
    for value, last in crossing_values(graph, flow):
        for change, amount in ((sizes, graph.spec(value).num_bytes(bindings)), (gaps, int(value in partial))):
            change[value.node + 1] += amount
            change[last + 1] -= amount
    return list(itertools.accumulate(sizes)), list(itertools.accumulate(gaps))


def module_range(nodes: Iterable[Node]) -> tuple[str, str]:
    """The module paths of the first and the last of ``nodes`` that use a parameter, for people to read; else of any node."""
    named = [node for node in nodes if node.module]
    weighted = [node for node in named if any(isinstance(item, ParameterReference) for item in node.references())]
    chosen = weighted or named
    return (chosen[0].module, chosen[-1].module) if chosen else ("", "")
