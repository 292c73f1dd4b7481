"""The op graph: a model and its loss as data.

Theory of operation. The coordinator traces a model once (``torch.export`` on the meta device) and turns the trace into an
:class:`OpGraph`: a list of nodes in topological order, each an ATen overload with typed arguments. A graph holds no code and no
weights. Sizes that vary between microbatches (batch, sequence length) are *symbols*, bound by the shapes of the batch inputs;
every other size in the graph is an integer or an :data:`Expression` over symbols, so no node computes sizes.

A cut at node ``p`` puts nodes ``< p`` on one stage and ``>= p`` on a later one. :class:`StageGraph` is what one stage gets: its
nodes under their *global* indices (a node's index seeds its random numbers, so a cut never changes a dropout mask), the
parameters and buffers they use, and the values that cross its boundaries. Cheap values that depend on no parameter are
computed again where they are needed, so the same node may appear on several stages.

A value used on several later stages travels along the chain of its users: the producer sends it to the first stage that uses
it, which sends it on to the next. The gradient comes back along the same chain, each stage adding its own part to what it
received, which is the order in which autograd adds them in one process: hence the same bits.

A parameter that several nodes use (tied embeddings) has one gradient accumulator per use; at the step's end all its
holders exchange the accumulated gradients of their uses and sum them in the order of ``SharedParameter.uses``.

This module owns the values and their invariants that need no torch operator; ``graph_codec`` turns them into protobuf and
back, ``validation`` decides whether a peer may execute them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import torch

from atoll.protocol.ids import NodeIndex, StageIndex


class ExpressionOperator(StrEnum):
    ADD = "add"
    MULTIPLY = "multiply"
    FLOOR_DIVIDE = "floor_divide"
    MODULO = "modulo"
    MAXIMUM = "maximum"
    MINIMUM = "minimum"


@dataclass(frozen=True, slots=True)
class Symbol:
    """A size that varies between microbatches, for example ``s0``."""

    name: str


@dataclass(frozen=True, slots=True)
class Operation:
    """An integer computed from sizes. ADD, MULTIPLY, MAXIMUM and MINIMUM take two or more operands, the others two."""

    operator: ExpressionOperator
    operands: tuple[Dimension, ...]


Expression: TypeAlias = Symbol | Operation
Dimension: TypeAlias = int | Symbol | Operation
Bindings: TypeAlias = Mapping[str, int]


def evaluate(dimension: Dimension, bindings: Bindings) -> int:
    """The integer value of ``dimension``; raises KeyError for an unbound symbol, ZeroDivisionError for a zero divisor."""
    if isinstance(dimension, int):
        return dimension
    if isinstance(dimension, Symbol):
        return bindings[dimension.name]
    values = [evaluate(operand, bindings) for operand in dimension.operands]
    match dimension.operator:
        case ExpressionOperator.ADD:
            return sum(values)
        case ExpressionOperator.MULTIPLY:
            product = 1
            for value in values:
                product *= value
            return product
        case ExpressionOperator.FLOOR_DIVIDE:
            return values[0] // values[1]
        case ExpressionOperator.MODULO:
            return values[0] % values[1]
        case ExpressionOperator.MAXIMUM:
            return max(values)
        case ExpressionOperator.MINIMUM:
            return min(values)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor; sizes may be symbolic."""

    shape: tuple[Dimension, ...]
    dtype: torch.dtype

    def sizes(self, bindings: Bindings) -> tuple[int, ...]:
        """The shape under ``bindings``."""
        return tuple(evaluate(dimension, bindings) for dimension in self.shape)

    def num_bytes(self, bindings: Bindings) -> int:
        """Bytes of the tensor's elements under ``bindings``."""
        count = 1
        for size in self.sizes(bindings):
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True, slots=True, order=True)
class ValueReference:
    """Output number ``output`` of node ``node``."""

    node: NodeIndex
    output: int = 0


@dataclass(frozen=True, slots=True)
class ParameterReference:
    name: str


@dataclass(frozen=True, slots=True)
class BufferReference:
    name: str


@dataclass(frozen=True, slots=True)
class InputReference:
    name: str


@dataclass(frozen=True, slots=True)
class OwnDevice:
    """Stands for the device of the peer that executes the node."""


Reference: TypeAlias = ValueReference | ParameterReference | BufferReference | InputReference
Literal: TypeAlias = bool | int | float | complex | str | torch.dtype | torch.layout | torch.memory_format | OwnDevice | None
Argument: TypeAlias = "Literal | Reference | Symbol | Operation | tuple[Argument, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One ATen call.

    ``outputs`` has one entry a result (operators that return a list are flattened; ``None`` for a result that is no tensor).
    ``evaluation`` replaces ``arguments`` when the graph runs in evaluation mode (dropout off, batch norm on running
    statistics); ``training_only`` nodes are skipped there. ``gradient`` is False for nodes traced under ``no_grad``;
    ``full_precision`` is True for nodes traced where the model turned autocast off.
    """

    index: NodeIndex
    operator: str
    arguments: tuple[Argument, ...]
    keywords: tuple[tuple[str, Argument], ...] = ()
    outputs: tuple[TensorSpec | None, ...]
    module: str = ""
    evaluation: tuple[Argument, ...] | None = None
    training_only: bool = False
    gradient: bool = True
    full_precision: bool = False

    def references(self) -> Iterator[Reference]:
        """Every reference among the arguments, in order, repeated where used twice."""
        yield from references_in(self.arguments)
        for _, value in self.keywords:
            yield from references_in(value)


def references_in(argument: Argument) -> Iterator[Reference]:
    """Every reference inside ``argument``, in order."""
    if isinstance(argument, (ValueReference, ParameterReference, BufferReference, InputReference)):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references_in(item)


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialisation:
    """A small program that makes one tensor; replayed on the CPU with a generator seeded from run seed and name.

    ``nodes`` are indexed from 0 in order and refer to one another alone; ``result`` is the tensor. ``seed`` is the name to seed
    with, empty for the tensor's own: a tensor that starts as the copy of another draws that one's numbers.
    """

    nodes: tuple[Node, ...]
    result: ValueReference
    seed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """A parameter under its canonical name; ``ties`` are its other names in the model's state dict.

    ``initialisation`` is None when the coordinator sends the first value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool = True
    ties: tuple[str, ...] = ()
    initialisation: Initialisation | None = None

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSpec:
    """A tensor of the model that is not trained. ``mutated`` ones (batch-norm statistics) belong to exactly one stage;
    the others are constants and may be held by several. ``persistent`` ones are part of the state dict."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    persistent: bool = True
    mutated: bool = False
    ties: tuple[str, ...] = ()
    initialisation: Initialisation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGraph:
    """A model with its loss. ``example`` binds every symbol to the size it had in the trace."""

    nodes: tuple[Node, ...]
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[BufferSpec, ...]
    inputs: tuple[tuple[str, TensorSpec], ...]
    loss: ValueReference
    metrics: tuple[tuple[str, ValueReference], ...] = ()
    example: tuple[tuple[str, int], ...] = ()

    def node(self, index: NodeIndex) -> Node:
        """The node with global index ``index`` (in a whole graph, its position)."""
        return self.nodes[index]

    def spec(self, value: ValueReference) -> TensorSpec:
        """The spec of a value; raises KeyError when that result is no tensor."""
        found = self.nodes[value.node].outputs[value.output]
        if found is None:
            raise KeyError(value)
        return found


def bind(inputs: tuple[tuple[str, TensorSpec], ...], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Symbol sizes from the shapes of the batch inputs.

    Raises ValueError with a sentence when an input is missing, has another rank, or contradicts a fixed size or another input.
    """
    bindings: dict[str, int] = {}
    for name, spec in inputs:
        if name not in shapes:
            raise ValueError(f"batch input {name!r} is missing")
        shape = shapes[name]
        if len(shape) != len(spec.shape):
            raise ValueError(f"batch input {name!r} has {len(shape)} dimensions, the graph wants {len(spec.shape)}")
        for position, (size, dimension) in enumerate(zip(shape, spec.shape, strict=True)):
            if isinstance(dimension, Symbol):
                known = bindings.setdefault(dimension.name, size)
            else:
                known = evaluate(dimension, bindings)
            if known != size:
                raise ValueError(f"batch input {name!r} has size {size} at dimension {position}, the graph wants {known}")
    return bindings


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A value that crosses from ``source`` to ``target``; ``differentiable`` ones send a gradient back."""

    value: ValueReference
    spec: TensorSpec
    source: StageIndex
    target: StageIndex
    differentiable: bool


@dataclass(frozen=True, slots=True, order=True)
class Use:
    """One place where a parameter is used: by stage ``stage``, as reference number ``position`` among node ``node``'s."""

    node: NodeIndex
    position: int
    stage: StageIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParameter:
    """A trainable parameter with several uses, in graph order. The first use's stage reports its gradient norm."""

    name: str
    uses: tuple[Use, ...]

    @property
    def stages(self) -> tuple[StageIndex, ...]:
        """The stages that hold a copy, in order, without repetition."""
        return tuple(dict.fromkeys(use.stage for use in self.uses))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGraph:
    """What one stage executes. ``nodes`` are in ascending global index; ``recomputed`` marks the copies of cheap nodes whose
    first home is an earlier stage (they draw no gradient and mutate nothing). ``receives`` and ``sends`` are in the order of
    their values. ``loss`` is None on a stage that does not compute it."""

    stage: StageIndex
    num_stages: int
    nodes: tuple[Node, ...]
    recomputed: frozenset[NodeIndex] = field(default_factory=frozenset)
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[BufferSpec, ...]
    inputs: tuple[tuple[str, TensorSpec], ...]
    receives: tuple[Boundary, ...]
    sends: tuple[Boundary, ...]
    shared: tuple[SharedParameter, ...] = ()
    loss: ValueReference | None = None
    metrics: tuple[tuple[str, ValueReference], ...] = ()
    example: tuple[tuple[str, int], ...] = ()
