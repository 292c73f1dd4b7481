"""From a node's arguments to the values of a call, and from the result of a call to the node's outputs.

Both who validates a graph (on meta tensors) and who executes it (on real ones) goes through here, so that they agree about
what a node means. Nothing here decides whether a node may be called; that is ``operators`` and ``validation``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload

from atoll.protocol.graph import (
    Argument,
    Bindings,
    BufferReference,
    InputReference,
    Node,
    Operation,
    OwnDevice,
    ParameterReference,
    Reference,
    Symbol,
    ValueReference,
    evaluate,
)

Lookup: TypeAlias = Callable[[Reference], Any]

# The training flag of operators that write their running statistics although their schema does not say so.
_TRAINING_FLAG = {
    "aten::batch_norm": "training",
    "aten::native_batch_norm": "training",
    "aten::_native_batch_norm_legit": "training",
    "aten::instance_norm": "use_input_stats",
}
_RUNNING_STATISTICS = ("running_mean", "running_var")

# Random operators that draw nothing for these values of an argument.
_DRAWS_NOTHING: dict[str, tuple[tuple[str, Any], ...]] = {
    "aten::scaled_dot_product_attention": (("dropout_p", 0.0),),
    "aten::dropout": (("train", False), ("p", 0.0)),
    "aten::dropout_": (("train", False), ("p", 0.0)),
    "aten::alpha_dropout": (("train", False), ("p", 0.0)),
    "aten::feature_dropout": (("train", False), ("p", 0.0)),
    "aten::feature_alpha_dropout": (("train", False), ("p", 0.0)),
    "aten::rrelu": (("training", False),),
}


def value_of(argument: Argument, lookup: Lookup, bindings: Bindings, device: torch.device) -> Any:
    """What is passed for ``argument``: references looked up, expressions evaluated, tuples as lists."""
    if isinstance(argument, (ValueReference, ParameterReference, BufferReference, InputReference)):
        return lookup(argument)
    if isinstance(argument, tuple):
        return [value_of(item, lookup, bindings, device) for item in argument]
    if isinstance(argument, (Symbol, Operation)):
        return evaluate(argument, bindings)
    if isinstance(argument, OwnDevice):
        return device
    return argument


def call(
    operator: OpOverload, arguments: tuple[Argument, ...], node: Node, lookup: Lookup, bindings: Bindings, device: torch.device
) -> tuple[Any, ...]:
    """Calls ``operator`` as ``node`` says, with ``arguments`` (its own, or those for evaluation); returns the flat results."""
    positional = [value_of(argument, lookup, bindings, device) for argument in arguments]
    keywords = {name: value_of(argument, lookup, bindings, device) for name, argument in node.keywords}
    return flatten(operator(*positional, **keywords))


def flatten(result: Any) -> tuple[Any, ...]:
    """The results of a call in order; lists and tuples inside are flattened."""
    if isinstance(result, (list, tuple)):
        return tuple(item for part in result for item in flatten(part))
    return (result,)


def arguments_in(node: Node, evaluation: bool) -> tuple[Argument, ...]:
    """The positional arguments of ``node`` in the given mode."""
    if evaluation and node.evaluation is not None:
        return node.evaluation
    return node.arguments


def named_arguments(operator: OpOverload, arguments: tuple[Argument, ...], node: Node) -> dict[str, Argument]:
    """The arguments of a call by the names of the schema; defaults filled in, surplus ones dropped."""
    schema = operator._schema.arguments
    named: dict[str, Argument] = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    named.update((parameter.name, argument) for parameter, argument in zip(schema, arguments, strict=False))
    named.update(node.keywords)
    return named


def written(operator: OpOverload, named: dict[str, Argument]) -> Iterator[Argument]:
    """The arguments that a call changes in place: declared ones and running statistics."""
    for argument in operator._schema.arguments:
        if argument.is_write and argument.name in named:
            yield named[argument.name]
    flag = _TRAINING_FLAG.get(operator._schema.name)
    if flag is not None and named.get(flag) is not False:
        yield from (named[name] for name in _RUNNING_STATISTICS if named.get(name) is not None)


def draws_random_numbers(operator: OpOverload, named: dict[str, Argument]) -> bool:
    """Whether a call may advance the device's random generator."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    return all(named.get(name) != value for name, value in _DRAWS_NOTHING.get(operator._schema.name, ()))
