"""Cuts an op graph into the graphs of its stages.

Nodes keep their global indices. Values that cross go along the chain of the stages that use them; recomputable values are
computed again where they are needed; a shared parameter is held by every stage that uses it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from atoll.coordinator.tracing.dataflow import Dataflow, all_references
from atoll.coordinator.tracing.rehearsal import differentiable_values
from atoll.protocol.graph import (
    Boundary,
    BufferReference,
    InputReference,
    Node,
    OpGraph,
    ParameterReference,
    SharedParameter,
    StageGraph,
    Use,
    ValueReference,
)
from atoll.protocol.ids import NodeIndex, StageIndex


def slice_graph(
    graph: OpGraph, cuts: Sequence[int], differentiable: frozenset[ValueReference] | None = None
) -> tuple[StageGraph, ...]:
    """The stages of ``graph`` cut before each node in ``cuts`` (ascending).

    ``differentiable`` may hold what :func:`differentiable_values` found, to save the time. Raises ValueError for cuts that are
    out of order or that the graph does not allow.
    """
    bounds = [0, *cuts, len(graph.nodes)]
    if any(first >= second for first, second in itertools.pairwise(bounds)):
        raise ValueError(f"cuts {tuple(cuts)} do not ascend within 1..{len(graph.nodes) - 1}")
    flow = Dataflow(graph)
    for first, last, reason in flow.forbidden_ranges():
        for cut in cuts:
            if first < cut <= last:
                raise ValueError(f"no cut at node {cut}: {reason}")
    slicing = _Slicing(flow, bounds, differentiable_values(graph) if differentiable is None else differentiable)
    return tuple(slicing.stage(StageIndex(stage)) for stage in range(len(bounds) - 1))


class _Slicing:
    def __init__(self, flow: Dataflow, bounds: Sequence[int], differentiable: frozenset[ValueReference]) -> None:
        self._flow = flow
        self._graph = flow.graph
        self._bounds = bounds
        self._num_stages = len(bounds) - 1
        self._differentiable = differentiable
        self._homes = [StageIndex(stage) for stage in range(self._num_stages) for _ in range(bounds[stage], bounds[stage + 1])]
        self._recomputed: list[set[NodeIndex]] = [set() for _ in range(self._num_stages)]
        self._users: dict[ValueReference, set[StageIndex]] = defaultdict(set)
        for node in self._graph.nodes:
            self._require(node, self._homes[node.index])
        loss_stage = self._homes[self._graph.loss.node]
        for _, value in self._graph.metrics:
            if self._homes[value.node] < loss_stage and not self._flow.recomputable(value):
                self._users[value].add(loss_stage)
        self._boundaries = sorted(self._chains(), key=lambda boundary: (boundary.value, boundary.source))
        self._shared = self._find_shared()

    def _require(self, first: Node, stage: StageIndex) -> None:
        """Makes everything that ``first`` reads available on ``stage``."""
        pending = [first]
        while pending:
            node = pending.pop()
            for reference in all_references(node):
                if not isinstance(reference, ValueReference) or self._homes[reference.node] == stage:
                    continue
                if not self._flow.recomputable(reference):
                    self._users[reference].add(stage)
                    continue
                for needed in self._flow.recomputation(reference, node.index):
                    if self._homes[needed.index] != stage and needed.index not in self._recomputed[stage]:
                        self._recomputed[stage].add(needed.index)
                        pending.append(needed)

    def _chains(self) -> Iterable[Boundary]:
        for value, users in self._users.items():
            chain = [self._homes[value.node], *sorted(users)]
            for source, target in itertools.pairwise(chain):
                yield Boundary(
                    value=value,
                    spec=self._graph.spec(value),
                    source=source,
                    target=target,
                    differentiable=value in self._differentiable,
                )

    def _find_shared(self) -> tuple[SharedParameter, ...]:
        trainable = {parameter.name for parameter in self._graph.parameters if parameter.trainable}
        uses: dict[str, list[Use]] = defaultdict(list)
        for node in self._graph.nodes:
            for position, reference in enumerate(node.references()):
                if isinstance(reference, ParameterReference) and reference.name in trainable:
                    uses[reference.name].append(Use(node.index, position, self._homes[node.index]))
        return tuple(
            SharedParameter(name=parameter.name, uses=tuple(uses[parameter.name]))
            for parameter in self._graph.parameters
            if len(uses[parameter.name]) > 1
        )

    def stage(self, stage: StageIndex) -> StageGraph:
        """The graph of one stage."""
        graph = self._graph
        indices = sorted({*range(self._bounds[stage], self._bounds[stage + 1]), *self._recomputed[stage]})
        nodes = tuple(graph.nodes[index] for index in indices)
        held = {reference for node in nodes for reference in all_references(node)} | (self._orphans() if stage == 0 else set())
        parameters = tuple(spec for spec in graph.parameters if ParameterReference(spec.name) in held)
        names = {spec.name for spec in parameters}
        return StageGraph(
            stage=stage,
            num_stages=self._num_stages,
            nodes=nodes,
            recomputed=frozenset(self._recomputed[stage]),
            parameters=parameters,
            buffers=tuple(spec for spec in graph.buffers if BufferReference(spec.name) in held),
            inputs=tuple((name, spec) for name, spec in graph.inputs if InputReference(name) in held),
            receives=tuple(boundary for boundary in self._boundaries if boundary.target == stage),
            sends=tuple(boundary for boundary in self._boundaries if boundary.source == stage),
            shared=tuple(shared for shared in self._shared if shared.name in names),
            loss=graph.loss if self._homes[graph.loss.node] == stage else None,
            metrics=tuple((name, value) for name, value in graph.metrics if self._metric_stage(value) == stage),
            example=graph.example,
        )

    def _metric_stage(self, value: ValueReference) -> StageIndex:
        """Metrics are reported with the loss where that is possible."""
        loss_stage = self._homes[self._graph.loss.node]
        return loss_stage if loss_stage in self._users.get(value, ()) else self._homes[value.node]

    def _orphans(self) -> set[ParameterReference | BufferReference]:
        """State that no node uses: the first stage keeps it, so that it is in the weights at the end."""
        used = {reference for node in self._graph.nodes for reference in all_references(node)}
        state = {ParameterReference(spec.name) for spec in self._graph.parameters} | {
            BufferReference(spec.name) for spec in self._graph.buffers if spec.persistent
        }
        return state - used
