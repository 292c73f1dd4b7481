"""How large a graph may be before a peer refuses it, and the counting that this takes.

Counting never allocates: sizes are multiplied as Python integers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from atoll.protocol.errors import GraphRefused
from atoll.protocol.graph import Bindings, Dimension, Node, Operation, TensorSpec, evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The defaults only keep nonsense out; a peer lowers the byte limits to what it may use."""

    max_nodes: int = 200_000
    """ResNet-101 has about 500, a language model of 100 layers 2000."""
    max_outputs: int = 4096
    """Results of one node, for example pieces of a split."""
    max_items: int = 100_000
    """Values inside the arguments of one node, for example in a constant that is written out."""
    max_dimensions: int = 16
    max_expression: int = 200
    """Symbols, numbers and operators in one size."""
    max_name: int = 1024
    """Characters in the name of a parameter, a buffer or an input."""
    max_tensor_bytes: int = 2**40
    """One tensor: 1 TiB."""
    max_state_bytes: int = 2**42
    """All parameters and buffers of a graph: 4 TiB."""


DEFAULT_LIMITS = Limits()


def count_bytes(spec: TensorSpec, bindings: Bindings, limits: Limits, what: str, node: int | None = None) -> int:
    """The bytes of a tensor; raises GraphRefused for sizes that are negative, not known, or beyond the limits."""
    if len(spec.shape) > limits.max_dimensions:
        raise GraphRefused(f"{what} has {len(spec.shape)} dimensions, more than {limits.max_dimensions}", node)
    count = spec.dtype.itemsize
    for dimension in spec.shape:
        size = evaluate_size(dimension, bindings, limits, what, node)
        if size < 0:
            raise GraphRefused(f"{what} has a negative size {size}", node)
        count *= size
    if count > limits.max_tensor_bytes:
        raise GraphRefused(f"{what} takes {count} bytes, more than the limit of {limits.max_tensor_bytes}", node)
    return count


def evaluate_size(dimension: Dimension, bindings: Bindings, limits: Limits, what: str, node: int | None = None) -> int:
    """The value of a size; raises GraphRefused when it has none or is written absurdly long."""
    pending: list[Dimension] = [dimension]
    count = 0
    while pending:
        count += 1
        if count > limits.max_expression:
            raise GraphRefused(f"{what} has a size of more than {limits.max_expression} terms", node)
        item = pending.pop()
        if isinstance(item, Operation):
            if len(item.operands) < 2:
                raise GraphRefused(f"{what} has a size with too few operands", node)
            pending.extend(item.operands)
    try:
        return evaluate(dimension, bindings)
    except KeyError as error:
        raise GraphRefused(f"{what} has the size {error.args[0]!r}, which nothing binds", node) from error
    except (ZeroDivisionError, IndexError) as error:
        raise GraphRefused(f"{what} has a size that cannot be computed: {error}", node) from error


def check_nodes(nodes: Iterable[Node], bindings: Bindings, limits: Limits) -> None:
    """Raises GraphRefused when a result of one of the nodes is beyond the limits for these sizes."""
    for node in nodes:
        for position, spec in enumerate(node.outputs):
            if spec is not None:
                count_bytes(spec, bindings, limits, f"output {position} of {node.operator}", node.index)
