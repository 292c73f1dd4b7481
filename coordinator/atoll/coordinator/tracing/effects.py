"""What operators do besides computing: what they write to, and which results share memory with their arguments.

Read from the operators' schemas, and from a short list of what schemas do not say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

import torch
from torch._ops import OpOverload

from atoll.protocol.errors import TraceError
from atoll.protocol.graph import (
    Argument,
    BufferReference,
    Node,
    Reference,
    TensorSpec,
    ValueReference,
    references_in,
)

_UNDECLARED_WRITES = {
    "aten.batch_norm.default": (3, 4, 5),
    "aten.instance_norm.default": (3, 4, 5),
    "aten.native_batch_norm.default": (3, 4, 5),
    "aten.cudnn_batch_norm.default": (3, 4, 5),
    "aten.miopen_batch_norm.default": (3, 4, 5),
}
"""Running mean, running variance, and the flag that makes the operator update them."""

_UNDECLARED_ALIASES = frozenset(
    {
        "aten::dropout",
        "aten::alpha_dropout",
        "aten::feature_dropout",
        "aten::feature_alpha_dropout",
        "aten::type_as",
        "aten::atleast_1d",
        "aten::atleast_2d",
        "aten::atleast_3d",
        "aten::broadcast_tensors",
        "aten::meshgrid",
        "aten::einsum",
    }
)
"""May return their argument or a view of it, though their schema promises a new tensor."""


_PARTIAL_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "select", "slice", "narrow", "split", "split_with_sizes", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit",
        "unbind", "expand", "expand_as", "broadcast_to", "broadcast_tensors", "diagonal", "unfold", "as_strided",
    )
)  # fmt: skip
"""Views that leave out elements of the memory, or show some of them several times."""


_HEAVY = frozenset(
    f"aten::{name}"
    for name in (
        "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "einsum",
        "scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu",
    )
)  # fmt: skip
_PRODUCTS = frozenset(f"aten::{name}" for name in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "linalg_matmul"))
_SMALL_PRODUCT = 8
"""An inner size up to which a product of matrices is no more work than reading its result (rotary tables have 1)."""


@lru_cache(maxsize=4096)
def overload(name: str) -> OpOverload:
    """The operator called ``name`` (``aten.linear.default``); raises TraceError when this torch has none."""
    namespace, _, rest = name.partition(".")
    packet, _, variant = rest.rpartition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), packet), variant)
    except AttributeError as error:
        raise TraceError(f"the operator {name} is unknown to torch {torch.__version__}") from error
    assert isinstance(found, OpOverload)
    return found


def is_random(node: Node) -> bool:
    """Whether ``node`` draws random numbers."""
    return torch.Tag.nondeterministic_seeded in overload(node.operator).tags


def is_heavy(node: Node, spec: Callable[[ValueReference], TensorSpec]) -> bool:
    """Whether ``node`` is a matrix product or a convolution that is worth sending the result of."""
    name = overload(node.operator)._schema.name
    if name in _HEAVY:
        return True
    if name not in _PRODUCTS:
        return False
    position = 1 if name in ("aten::addmm", "aten::baddbmm") else 0
    left = node.arguments[position]
    inner = spec(left).shape[-1:] if isinstance(left, ValueReference) else ()
    return not inner or not isinstance(inner[0], int) or inner[0] > _SMALL_PRODUCT


def _by_argument(node: Node) -> Iterator[tuple[object, Argument]]:
    """Schema arguments of ``node`` with the values given to them."""
    schema = overload(node.operator)._schema.arguments
    yield from zip(schema, node.arguments, strict=False)
    named = {argument.name: argument for argument in schema}
    for name, value in node.keywords:
        yield named[name], value


def written_references(node: Node) -> Iterator[Reference]:
    """The tensors that ``node`` modifies in place (in training mode)."""
    for argument, value in _by_argument(node):
        alias = argument.alias_info  # type: ignore[attr-defined]
        if alias is not None and alias.is_write:
            yield from references_in(value)
    if node.operator in _UNDECLARED_WRITES:
        *statistics, flag = _UNDECLARED_WRITES[node.operator]
        if node.arguments[flag]:
            for position in statistics:
                yield from references_in(node.arguments[position])


def aliased_references(node: Node) -> Iterator[Reference]:
    """The arguments that a result of ``node`` may share memory with."""
    schema = overload(node.operator)._schema
    if schema.name in _UNDECLARED_ALIASES:
        yield from node.references()
        return
    if all(result.alias_info is None for result in schema.returns):
        return
    for argument, value in _by_argument(node):
        if argument.alias_info is not None:  # type: ignore[attr-defined]
            yield from references_in(value)


def partial_views(nodes: Iterable[Node]) -> frozenset[ValueReference]:
    """The values that may be views with gaps or repetitions: such a layout is lost when a tensor is sent."""
    partial: set[Reference] = set()
    for node in nodes:
        aliased = tuple(aliased_references(node))
        makes = aliased and overload(node.operator)._schema.name in _PARTIAL_VIEWS
        if makes or any(reference in partial for reference in aliased):
            partial.update(ValueReference(node.index, number) for number in range(len(node.outputs)))
    return frozenset(value for value in partial if isinstance(value, ValueReference))


class AliasClasses:
    """Tensors of a graph grouped by the memory that they may share."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._parents: dict[Reference, Reference] = {}
        self.members: dict[Reference, set[Reference]] = defaultdict(set)
        self.writers: dict[Reference, list[Node]] = defaultdict(list)
        nodes = tuple(nodes)
        for node in nodes:
            aliased = tuple(aliased_references(node))
            for output in range(len(node.outputs)):
                for reference in aliased:
                    self._join(reference, ValueReference(node.index, output))
        for node in nodes:
            for output in range(len(node.outputs)):
                self._enter(ValueReference(node.index, output))
            for reference in node.references():
                self._enter(reference)
            for root in dict.fromkeys(self.root(reference) for reference in written_references(node)):
                self.writers[root].append(node)

    def root(self, reference: Reference) -> Reference:
        """The representative of the class that ``reference`` belongs to."""
        while (parent := self._parents.get(reference, reference)) != reference:
            reference = parent
        return reference

    def buffers(self, root: Reference) -> Iterator[BufferReference]:
        """The buffers whose memory the class is, in no order."""
        return (member for member in self.members[root] if isinstance(member, BufferReference))

    def _enter(self, reference: Reference) -> None:
        self.members[self.root(reference)].add(reference)

    def _join(self, first: Reference, second: Reference) -> None:
        one, other = self.root(first), self.root(second)
        if one != other:
            self._parents[other] = one
