"""Decides whether a graph that came over the wire is executed.

Theory of operation. Checks go from cheap to dear, and what is absurd is found by counting, before anything is made from it:
numbers of things and their names; sizes; then for each node that its operator is allowed and that it refers only to what
exists before it (so there are no cycles); then the boundaries and shared parameters; and last one run on meta tensors in
training mode and one in evaluation mode, which re-infers every shape and dtype. The small programs that make first values pass
the same checks. The first thing found wrong is raised as GraphRefused with the reason and the node, and nothing has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from atoll.protocol import calling, operators
from atoll.protocol.errors import GraphRefused
from atoll.protocol.graph import (
    Argument,
    BufferReference,
    BufferSpec,
    InputReference,
    Node,
    OpGraph,
    ParameterReference,
    ParameterSpec,
    Reference,
    SharedParameter,
    StageGraph,
    TensorSpec,
    ValueReference,
    references_in,
)
from atoll.protocol.ids import NodeIndex
from atoll.protocol.inference import Inference
from atoll.protocol.limits import DEFAULT_LIMITS, Limits, check_nodes, count_bytes


def validate_graph(graph: OpGraph, limits: Limits = DEFAULT_LIMITS) -> None:
    """Raises GraphRefused unless ``graph`` is a whole graph that a peer may execute."""
    checked = _Checked(
        nodes=graph.nodes,
        parameters=graph.parameters,
        buffers=graph.buffers,
        inputs=graph.inputs,
        example=graph.example,
        loss=graph.loss,
        metrics=graph.metrics,
        limits=limits,
    )
    checked.check()


def validate_stage(graph: StageGraph, limits: Limits = DEFAULT_LIMITS) -> None:
    """Raises GraphRefused unless ``graph`` is a stage that a peer may execute."""
    if not 0 <= graph.stage < graph.num_stages:
        raise GraphRefused(f"stage {graph.stage} is none of {graph.num_stages}")
    checked = _Checked(
        nodes=graph.nodes,
        parameters=graph.parameters,
        buffers=graph.buffers,
        inputs=graph.inputs,
        example=graph.example,
        loss=graph.loss,
        metrics=graph.metrics,
        limits=limits,
        recomputed=graph.recomputed,
        received={boundary.value: boundary.spec for boundary in graph.receives},
        leaves=frozenset(boundary.value for boundary in graph.receives if boundary.differentiable),
        sent={boundary.value: boundary.spec for boundary in graph.sends},
    )
    _check_boundaries(graph)
    checked.check()
    _check_shared(graph)


@dataclass(slots=True, kw_only=True)
class _Checked:
    """The parts that whole graphs, stages and initialisation programs have in common."""

    nodes: Sequence[Node]
    limits: Limits
    parameters: Sequence[ParameterSpec] = ()
    buffers: Sequence[BufferSpec] = ()
    inputs: Sequence[tuple[str, TensorSpec]] = ()
    example: Sequence[tuple[str, int]] = ()
    loss: ValueReference | None = None
    metrics: Sequence[tuple[str, ValueReference]] = ()
    recomputed: frozenset[NodeIndex] = frozenset()
    received: Mapping[ValueReference, TensorSpec] = field(default_factory=dict)
    leaves: frozenset[ValueReference] = frozenset()
    sent: Mapping[ValueReference, TensorSpec] = field(default_factory=dict)
    bindings: dict[str, int] = field(default_factory=dict)
    given: dict[Reference, TensorSpec] = field(default_factory=dict)

    def check(self) -> None:
        self._check_names()
        self._collect_given()
        self._check_nodes()
        for evaluation in (False, True):
            self._infer(evaluation)
        for spec in self._state():
            check_initialisation(spec, self.limits)

    def _state(self) -> list[ParameterSpec | BufferSpec]:
        return [*self.parameters, *self.buffers]

    def _check_names(self) -> None:
        if len(self.nodes) > self.limits.max_nodes:
            raise GraphRefused(f"the graph has {len(self.nodes)} nodes, more than the limit of {self.limits.max_nodes}")
        states: list[str] = []
        for spec in self._state():
            states += (spec.name, *spec.ties)
        _require_unique(states, "parameter or buffer", self.limits)
        _require_unique([name for name, _ in self.inputs], "batch input", self.limits)
        _require_unique([name for name, _ in self.metrics], "metric", self.limits)
        _require_unique([symbol for symbol, _ in self.example], "symbol", self.limits)

    def _collect_given(self) -> None:
        """The specs of everything that nodes may refer to beside one another; counts their bytes."""
        self.bindings.update(self.example)
        state: dict[Reference, TensorSpec] = {
            ParameterReference(spec.name): TensorSpec(spec.shape, spec.dtype) for spec in self.parameters
        }
        state.update((BufferReference(spec.name), TensorSpec(spec.shape, spec.dtype)) for spec in self.buffers)
        total = sum(count_bytes(spec, {}, self.limits, _named(reference)) for reference, spec in state.items())
        if total > self.limits.max_state_bytes:
            raise GraphRefused(
                f"parameters and buffers take {total} bytes, more than the limit of {self.limits.max_state_bytes}"
            )
        self.given.update(state)
        self.given.update((InputReference(name), spec) for name, spec in self.inputs)
        self.given.update(self.received.items())
        for reference, spec in self.given.items():
            count_bytes(spec, self.bindings, self.limits, _named(reference))
        for trained in self.parameters:
            if trained.trainable and not (trained.dtype.is_floating_point or trained.dtype.is_complex):
                raise GraphRefused(f"parameter {trained.name} of dtype {trained.dtype} cannot be trained")

    def _check_nodes(self) -> None:
        previous = -1
        for node in self.nodes:
            if node.index <= previous:
                raise GraphRefused(f"its index does not ascend: it comes after node {previous}", node.index)
            previous = node.index
        unknown = self.recomputed - {node.index for node in self.nodes}
        if unknown:
            raise GraphRefused("it is marked as recomputed but is no node of the stage", min(unknown))
        both: tuple[set[Reference], set[Reference]] = set(self.given), set(self.given)
        for node in self.nodes:
            self._check_node(node, both)
        for value in (*self.sent, *(value for _, value in self.metrics), *(() if self.loss is None else (self.loss,))):
            if any(value not in known for known in both):
                raise GraphRefused(f"value {value.node}:{value.output} is asked for, but nothing computes it", value.node)

    def _check_node(self, node: Node, known: tuple[set[Reference], set[Reference]]) -> None:
        operators_reason = _forbidden(node)
        if operators_reason:
            raise GraphRefused(operators_reason, node.index)
        if len(node.outputs) > self.limits.max_outputs:
            raise GraphRefused(f"it returns {len(node.outputs)} values, more than {self.limits.max_outputs}", node.index)
        check_nodes((node,), self.bindings, self.limits)
        keywords = tuple(argument for _, argument in node.keywords)
        for evaluation, before in enumerate(known):
            if evaluation and node.training_only:
                continue
            arguments = calling.arguments_in(node, bool(evaluation)) + keywords
            _check_items(arguments, node.index, self.limits)
            for reference in references_in(arguments):
                self._check_reference(reference, before, node)
            before.update(
                ValueReference(node.index, position) for position, spec in enumerate(node.outputs) if spec is not None
            )

    def _check_reference(self, reference: Reference, before: set[Reference], node: Node) -> None:
        if reference not in before:
            if isinstance(reference, ValueReference) and reference.node >= node.index:
                raise GraphRefused(f"it needs node {reference.node}, which comes after it: a cycle", node.index)
            raise GraphRefused(f"it needs {_named(reference)}, which the graph does not have", node.index)
        if node.index in self.recomputed and (isinstance(reference, ParameterReference) or reference in self._private()):
            raise GraphRefused(f"it is recomputed, but depends on {_named(reference)}", node.index)

    def _private(self) -> frozenset[Reference]:
        """What one stage alone has: nodes that several stages compute may not depend on it."""
        return self.leaves.union(BufferReference(spec.name) for spec in self.buffers if spec.mutated)

    def _infer(self, evaluation: bool) -> None:
        inference = Inference(self.given, self._untouchable(), self.bindings, self.limits)
        for node in self.nodes:
            if not (evaluation and node.training_only):
                inference.run(node, calling.arguments_in(node, evaluation))
        wanted = [*self.metrics, *(() if self.loss is None else (("the loss", self.loss),))]
        for name, value in wanted:
            found = inference.result(value)
            if found.numel() != 1 or found.is_complex():
                raise GraphRefused(f"{name} has shape {tuple(found.shape)} instead of being one number", value.node)
        if self.loss is not None and not inference.result(self.loss).is_floating_point():
            raise GraphRefused("the loss is no floating-point number", self.loss.node)
        for value, spec in self.sent.items():
            found = inference.result(value)
            if tuple(found.shape) != spec.sizes(self.bindings) or found.dtype != spec.dtype:
                raise GraphRefused(f"it sends {tuple(found.shape)}, {found.dtype}, but the boundary says otherwise", value.node)

    def _untouchable(self) -> dict[Reference, str]:
        reasons: dict[Reference, str] = {
            ParameterReference(spec.name): f"the parameter {spec.name}" for spec in self.parameters
        }
        reasons.update((BufferReference(spec.name), f"the constant {spec.name}") for spec in self.buffers if not spec.mutated)
        reasons.update((value, f"the received value {value.node}:{value.output}") for value in self.leaves)
        return reasons


def check_initialisation(spec: ParameterSpec | BufferSpec, limits: Limits = DEFAULT_LIMITS) -> None:
    """Raises GraphRefused unless the program that makes ``spec``'s first value, if there is one, is fit to run."""
    program = spec.initialisation
    if program is None:
        return
    if len(program.seed) > limits.max_name:
        raise GraphRefused(f"the initialisation of {spec.name} names a seed of more than {limits.max_name} characters")
    try:
        _Checked(nodes=program.nodes, limits=limits, sent={program.result: TensorSpec(spec.shape, _result_dtype(spec))}).check()
    except GraphRefused as error:
        raise GraphRefused(f"the initialisation of {spec.name}: {error}") from error


def _result_dtype(spec: ParameterSpec | BufferSpec) -> torch.dtype:
    """The dtype that the program's result has; it is converted to the tensor's afterwards."""
    program = spec.initialisation
    assert program is not None
    for node in program.nodes:
        if node.index == program.result.node and program.result.output < len(node.outputs):
            found = node.outputs[program.result.output]
            return spec.dtype if found is None else found.dtype
    return spec.dtype


def _named(reference: Reference) -> str:
    """How reasons name what a node refers to."""
    match reference:
        case ValueReference(node, output):
            return f"value {node}:{output}"
        case ParameterReference(name):
            return f"parameter {name}"
        case BufferReference(name):
            return f"buffer {name}"
        case InputReference(name):
            return f"batch input {name}"


def _forbidden(node: Node) -> str:
    try:
        operators.resolve(node.operator)
    except GraphRefused as error:
        return error.reason
    return ""


def _require_unique(names: Iterable[str], what: str, limits: Limits) -> None:
    seen: set[str] = set()
    for name in names:
        if not name or len(name) > limits.max_name:
            raise GraphRefused(f"the name of a {what} is empty or longer than {limits.max_name} characters")
        if name in seen:
            raise GraphRefused(f"two of the graph have the same name: {what} {name!r}")
        seen.add(name)


def _check_items(arguments: tuple[Argument, ...], node: int, limits: Limits) -> None:
    """Bounds the arguments; values may stand alone or in a list, not deeper."""
    count = 0
    pending: list[tuple[Argument, int]] = [(argument, 0) for argument in arguments]
    while pending:
        item, depth = pending.pop()
        count += 1
        if count > limits.max_items:
            raise GraphRefused(f"its arguments hold more than {limits.max_items} values", node)
        if isinstance(item, tuple):
            if depth > 1 and any(references_in(item)):
                raise GraphRefused("it has values inside nested lists", node)
            pending.extend((inner, depth + 1) for inner in item)


def _check_boundaries(graph: StageGraph) -> None:
    for boundary in graph.receives:
        if not 0 <= boundary.source < boundary.target == graph.stage:
            raise GraphRefused(f"it is received from stage {boundary.source} by {boundary.target}", boundary.value.node)
    for boundary in graph.sends:
        if not graph.stage == boundary.source < boundary.target < graph.num_stages:
            raise GraphRefused(f"it is sent from stage {boundary.source} to {boundary.target}", boundary.value.node)
    for boundaries in (graph.receives, graph.sends):
        values = [boundary.value for boundary in boundaries]
        if len(set(values)) < len(values):
            raise GraphRefused("a value crosses the same boundary twice", values[0].node)
        for boundary in boundaries:
            differentiable = boundary.spec.dtype.is_floating_point or boundary.spec.dtype.is_complex
            if boundary.differentiable and not differentiable:
                raise GraphRefused(f"its dtype {boundary.spec.dtype} has no gradient", boundary.value.node)
    made = {node.index for node in graph.nodes}
    for boundary in graph.receives:
        if boundary.value.node in made:
            raise GraphRefused("it is received and computed on the same stage", boundary.value.node)


def _check_shared(graph: StageGraph) -> None:
    """Every use of a shared parameter on this stage is listed, and what is not shared is used once."""
    listed = {
        (use.node, use.position): shared.name for shared in graph.shared for use in shared.uses if use.stage == graph.stage
    }
    found: dict[str, int] = {}
    trainable = {spec.name for spec in graph.parameters if spec.trainable}
    for node in graph.nodes:
        for position, reference in enumerate(node.references()):
            if not isinstance(reference, ParameterReference) or reference.name not in trainable:
                continue
            place = (node.index, position)
            if place in listed:
                if listed.pop(place) != reference.name:
                    raise GraphRefused(f"its use of {reference.name} is listed for another parameter", node.index)
            else:
                found[reference.name] = found.get(reference.name, 0) + 1
                if found[reference.name] > 1 or reference.name in {shared.name for shared in graph.shared}:
                    raise GraphRefused(f"it is a further use of {reference.name}, which is not listed", node.index)
    if listed:
        place, name = next(iter(listed.items()))
        raise GraphRefused(f"a use of {name} is listed that is none", place[0])
    _check_uses(graph.shared, graph.num_stages, trainable)


def _check_uses(shared: Sequence[SharedParameter], num_stages: int, trainable: set[str]) -> None:
    names = [item.name for item in shared]
    if len(set(names)) < len(names) or any(name not in trainable for name in names):
        raise GraphRefused("a shared parameter is listed twice, or is none of the stage's trainable parameters")
    for item in shared:
        if list(item.uses) != sorted(item.uses) or any(not 0 <= use.stage < num_stages for use in item.uses):
            raise GraphRefused(f"the uses of {item.name} are out of order")
