"""Executes a stage's nodes, one ATen call after the other, with autograd recording.

Theory of operation. All values of one microbatch live in a list of *slots*: parameters, buffers, batch inputs and received
values first, then what the nodes compute. :class:`Program` turns each node once into a :class:`Call`, in which everything that
can be known beforehand is known: the operator, the constant arguments, which slot goes where, and which slots hold nothing that
is needed later and are emptied. Sizes that vary between microbatches are filled in once per set of sizes. What remains for a
microbatch is a short loop.

A trainable parameter with several uses has one slot a use, so that each use gets a gradient accumulator of its own.
This module knows nothing of steps, gradients or boundaries; ``stage`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload

from atoll.protocol import calling, operators
from atoll.protocol.errors import AtollError, ExecutionFailed, ResourceError
from atoll.protocol.graph import (
    Argument,
    Bindings,
    BufferReference,
    InputReference,
    Node,
    Operation,
    ParameterReference,
    Reference,
    StageGraph,
    Symbol,
    Use,
    ValueReference,
    references_in,
)
from atoll.protocol.ids import NodeIndex
from atoll.protocol.randomness import seeded

SeedOf: TypeAlias = Callable[[NodeIndex], int]
Slots: TypeAlias = list[Any]

# Sets of sizes whose calls are kept; a run with more different sizes compiles some of them again.
_MAX_BINDINGS = 64

_DROPPED = -1


@dataclass(frozen=True, slots=True)
class Call:
    """One ATen call, ready to run.

    ``values`` are the positional arguments followed by those of ``keywords``, with a gap (None) where ``fills`` puts a slot's
    value, as (position, slot). ``lists`` are arguments that are lists with values inside: (position, list with gaps, fills of
    the list). ``outputs`` are the slots of the results; ``emptied`` the slots that nobody needs afterwards.
    """

    node: Node
    operator: OpOverload
    values: tuple[Any, ...]
    keywords: tuple[str, ...]
    fills: tuple[tuple[int, int], ...]
    lists: tuple[tuple[int, tuple[Any, ...], tuple[tuple[int, int], ...]], ...]
    outputs: tuple[int, ...]
    emptied: tuple[int, ...]
    random: bool


@dataclass(frozen=True, slots=True)
class _Segment:
    """Consecutive calls that run under the same modes: recording gradients or not, under the run's autocast or without."""

    gradient: bool
    full_precision: bool
    calls: tuple[Call, ...]


class Layout:
    """Which slot holds what at the start of a microbatch; the same for training and evaluation."""

    def __init__(self, graph: StageGraph) -> None:
        known: list[Reference] = [ParameterReference(parameter.name) for parameter in graph.parameters]
        known += [BufferReference(buffer.name) for buffer in graph.buffers]
        known += [InputReference(name) for name, _ in graph.inputs]
        known += [boundary.value for boundary in graph.receives]
        self.slots: dict[Reference, int] = {reference: slot for slot, reference in enumerate(known)}
        uses = [use for shared in graph.shared for use in shared.uses if use.stage == graph.stage]
        self.uses: dict[tuple[NodeIndex, int], int] = {
            (use.node, use.position): len(known) + number for number, use in enumerate(uses)
        }
        self.size = len(known) + len(uses)

    def use(self, use: Use) -> int:
        """The slot of one use of a shared parameter."""
        return self.uses[use.node, use.position]


class Program:
    """A stage's nodes, compiled for training or for evaluation."""

    def __init__(self, graph: StageGraph, layout: Layout, device: torch.device, *, evaluation: bool) -> None:
        self._layout = layout
        self._device = device
        self._evaluation = evaluation
        self._nodes = tuple(node for node in graph.nodes if not (evaluation and node.training_only))
        self._no_gradient = graph.recomputed
        self._slots = dict(layout.slots)
        self._kept = {boundary.value for boundary in graph.sends} | {value for _, value in graph.metrics}
        if graph.loss is not None:
            self._kept.add(graph.loss)
        self._size = self._number_values()
        self._emptied = self._last_uses()
        self._fixed: dict[NodeIndex, Call] = {}
        self._segments: dict[tuple[tuple[str, int], ...], tuple[_Segment, ...]] = {}

    def _number_values(self) -> int:
        size = self._layout.size
        used = {reference for node in self._nodes for reference in references_in(self._all_arguments(node))} | self._kept
        for node in self._nodes:
            for position in range(len(node.outputs)):
                value = ValueReference(node.index, position)
                if value in used and value not in self._slots:
                    self._slots[value] = size
                    size += 1
        return size

    def _all_arguments(self, node: Node) -> tuple[Argument, ...]:
        return calling.arguments_in(node, self._evaluation) + tuple(argument for _, argument in node.keywords)

    def _last_uses(self) -> dict[NodeIndex, tuple[int, ...]]:
        """For each node, the slots that no later node needs."""
        kept = {self._slots[value] for value in self._kept if value in self._slots}
        last: dict[int, NodeIndex] = {}
        for node in self._nodes:
            for position, reference in enumerate(references_in(self._all_arguments(node))):
                last[self._slot(node, position, reference)] = node.index
        emptied: dict[NodeIndex, list[int]] = {}
        for slot, index in last.items():
            if slot not in kept:
                emptied.setdefault(index, []).append(slot)
        return {index: tuple(slots) for index, slots in emptied.items()}

    def _slot(self, node: Node, position: int, reference: Reference) -> int:
        """The slot that ``node``'s reference number ``position`` reads."""
        if not self._evaluation and isinstance(reference, ParameterReference):
            return self._layout.uses.get((node.index, position), self._slots[reference])
        return self._slots[reference]

    def slot(self, value: ValueReference) -> int:
        """The slot of a value that was received or is kept to the end."""
        return self._slots[value]

    def inputs_at_risk(self, candidates: Iterable[Reference]) -> frozenset[Reference]:
        """Those ``candidates`` from which an argument that a node changes in place might be a view.

        Deliberately generous: any result may be a view of any argument. What is named here is copied for each microbatch.
        """
        sources: dict[Reference, frozenset[Reference]] = {candidate: frozenset((candidate,)) for candidate in candidates}
        nothing: frozenset[Reference] = frozenset()
        risky: set[Reference] = set()
        for node in self._nodes:
            arguments = calling.arguments_in(node, self._evaluation)
            operator = operators.resolve(node.operator)
            for target in calling.written(operator, calling.named_arguments(operator, arguments, node)):
                risky.update(*(sources.get(reference, nothing) for reference in references_in((target,))))
            found = nothing.union(*(sources.get(item, nothing) for item in references_in(self._all_arguments(node))))
            if found:
                sources.update((ValueReference(node.index, position), found) for position in range(len(node.outputs)))
        return frozenset(risky)

    def run(self, slots: Slots, bindings: Bindings, seed_of: SeedOf) -> None:
        """Executes all nodes on ``slots`` (of the layout's size), which afterwards hold the values to keep.

        Raises ExecutionFailed, naming the node, when torch refuses a call, and ResourceError when memory runs out.
        """
        slots.extend([None] * (self._size - len(slots)))
        recording = torch.is_grad_enabled()
        for segment in self._bound(bindings):
            with ExitStack() as modes:
                if recording and not segment.gradient:
                    modes.enter_context(torch.no_grad())
                if segment.full_precision and torch.is_autocast_enabled(self._device.type):
                    modes.enter_context(torch.autocast(self._device.type, enabled=False))
                self._run_calls(segment.calls, slots, seed_of)

    def _run_calls(self, calls: tuple[Call, ...], slots: Slots, seed_of: SeedOf) -> None:
        for call in calls:
            values = list(call.values)
            for position, slot in call.fills:
                values[position] = slots[slot]
            for position, template, fills in call.lists:
                items = list(template)
                for place, slot in fills:
                    items[place] = slots[slot]
                values[position] = items
            try:
                if call.random:
                    with seeded(self._device, seed_of(call.node.index)):
                        result = _invoke(call, values)
                else:
                    result = _invoke(call, values)
            except (RuntimeError, IndexError, TypeError, ValueError, MemoryError) as error:
                raise failure(call.node, error) from error
            outputs = call.outputs
            if len(outputs) == 1 and isinstance(result, torch.Tensor):
                if outputs[0] != _DROPPED:
                    slots[outputs[0]] = result
            else:
                for slot, value in zip(outputs, calling.flatten(result), strict=True):
                    if slot != _DROPPED:
                        slots[slot] = value
            del values, result
            for slot in call.emptied:
                slots[slot] = None

    def _bound(self, bindings: Bindings) -> tuple[_Segment, ...]:
        """The calls for one set of sizes."""
        key = tuple(sorted(bindings.items()))
        found = self._segments.get(key)
        if found is None:
            if len(self._segments) >= _MAX_BINDINGS:
                self._segments.pop(next(iter(self._segments)))
            found = self._segments[key] = self._segment(bindings)
        return found

    def _segment(self, bindings: Bindings) -> tuple[_Segment, ...]:
        segments: list[tuple[tuple[bool, bool], list[Call]]] = []
        for node in self._nodes:
            modes = (node.gradient and node.index not in self._no_gradient, node.full_precision)
            if not segments or segments[-1][0] != modes:
                segments.append((modes, []))
            segments[-1][1].append(self._compile(node, bindings))
        return tuple(_Segment(*modes, tuple(calls)) for modes, calls in segments)

    def _compile(self, node: Node, bindings: Bindings) -> Call:
        if node.index in self._fixed:
            return self._fixed[node.index]
        operator = operators.resolve(node.operator)
        positional = calling.arguments_in(node, self._evaluation)
        arguments = self._all_arguments(node)
        filling = _Filling(bindings, self._device)
        count = 0
        for position, argument in enumerate(arguments):
            slots = [self._slot(node, count + number, item) for number, item in enumerate(references_in((argument,)))]
            count += len(slots)
            filling.add(position, argument, slots)
        named = calling.named_arguments(operator, positional, node)
        outputs = (ValueReference(node.index, position) for position in range(len(node.outputs)))
        call = Call(
            node=node,
            operator=operator,
            values=tuple(filling.values),
            keywords=tuple(name for name, _ in node.keywords),
            fills=tuple(filling.fills),
            lists=tuple(filling.lists),
            outputs=tuple(self._slots.get(value, _DROPPED) for value in outputs),
            emptied=self._emptied.get(node.index, ()),
            random=calling.draws_random_numbers(operator, named),
        )
        if not _has_sizes(arguments):
            self._fixed[node.index] = call
        return call


class _Filling:
    """Collects the arguments of one call: constants, gaps, and what fills them."""

    def __init__(self, bindings: Bindings, device: torch.device) -> None:
        self._bindings = bindings
        self._device = device
        self.values: list[Any] = []
        self.fills: list[tuple[int, int]] = []
        self.lists: list[tuple[int, tuple[Any, ...], tuple[tuple[int, int], ...]]] = []

    def add(self, position: int, argument: Argument, slots: list[int]) -> None:
        """Adds one argument; ``slots`` are those of the references inside it, in order."""
        constant = calling.value_of(argument, lambda _: None, self._bindings, self._device)
        self.values.append(constant)
        if not slots:
            return
        if not isinstance(argument, tuple):
            self.fills.append((position, slots[0]))
            return
        places = [place for place, item in enumerate(argument) if item is not None and any(references_in((item,)))]
        self.lists.append((position, tuple(constant), tuple(zip(places, slots, strict=True))))


def _has_sizes(argument: Argument) -> bool:
    if isinstance(argument, tuple):
        return any(_has_sizes(item) for item in argument)
    return isinstance(argument, (Symbol, Operation))


def _invoke(call: Call, values: list[Any]) -> Any:
    if not call.keywords:
        return call.operator(*values)
    first = len(values) - len(call.keywords)
    return call.operator(*values[:first], **dict(zip(call.keywords, values[first:], strict=True)))


def failure(node: Node, error: Exception) -> AtollError:
    """The error to raise when ``node`` failed with torch's ``error``."""
    place = f"{node.operator} in {node.module or 'the model'} (node {node.index})"
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if out_of_memory(error):
        return ResourceError(f"memory ran out in {place}: {first}")
    return ExecutionFailed(f"{place} failed: {first}", node.index)


def out_of_memory(error: BaseException) -> bool:
    """Whether torch's ``error`` says that there is not enough memory."""
    text = str(error)
    told = "can't allocate memory" in text or "not enough memory" in text or "out of memory" in text
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (isinstance(error, RuntimeError) and told)


def base_slots(layout: Layout, values: Mapping[Reference, torch.Tensor], uses: Mapping[int, torch.Tensor]) -> Slots:
    """Slots filled with what does not change between microbatches; the others hold None."""
    slots: Slots = [None] * layout.size
    for reference, value in values.items():
        slots[layout.slots[reference]] = value
    for slot, value in uses.items():
        slots[slot] = value
    return slots
