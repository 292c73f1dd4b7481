"""Arguments of nodes, and the expressions in shapes, as protobuf and back; raises WireError on nonsense."""

from __future__ import annotations

from typing import cast

import torch

from atoll.protocol.errors import WireError
from atoll.protocol.graph import (
    Argument,
    BufferReference,
    Dimension,
    ExpressionOperator,
    InputReference,
    Operation,
    OwnDevice,
    ParameterReference,
    Symbol,
    ValueReference,
)
from atoll.protocol.ids import NodeIndex
from atoll.protocol.tensors import dtype_from_name, dtype_name
from atoll.protocol.v1 import graph_pb2 as wire

MAX_DEPTH = 32
"""Of lists in lists and of operations in operations: far above what traces have, far below Python's recursion limit."""

_LAYOUTS = {"strided": torch.strided}
_MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
_TWO_OPERANDS = (ExpressionOperator.FLOOR_DIVIDE, ExpressionOperator.MODULO)


def value_to_proto(value: ValueReference) -> wire.ValueReference:
    """The message that :func:`value_from_proto` reads back."""
    return wire.ValueReference(node=value.node, output=value.output)


def value_from_proto(message: wire.ValueReference) -> ValueReference:
    """The reference that ``message`` describes."""
    return ValueReference(NodeIndex(message.node), message.output)


def expression_to_proto(dimension: Dimension) -> wire.Dimension:
    """The message that :func:`expression_from_proto` reads back."""
    if isinstance(dimension, Symbol):
        return wire.Dimension(symbol=dimension.name)
    if isinstance(dimension, Operation):
        operands = map(expression_to_proto, dimension.operands)
        return wire.Dimension(operation=wire.Operation(operator=dimension.operator.value, operands=operands))
    return wire.Dimension(size=dimension)


def expression_from_proto(message: wire.Dimension, depth: int = 0) -> Dimension:
    """The size that ``message`` describes; raises WireError."""
    content = message.WhichOneof("content")
    if content == "size":
        return message.size
    if content == "symbol" and message.symbol:
        return Symbol(message.symbol)
    if content != "operation" or depth >= MAX_DEPTH:
        raise WireError("a size in the graph is empty or nested too deeply")
    try:
        operator = ExpressionOperator(message.operation.operator)
    except ValueError:
        raise WireError(f"a size in the graph uses the unknown operator {message.operation.operator!r}") from None
    operands = tuple(expression_from_proto(operand, depth + 1) for operand in message.operation.operands)
    if len(operands) < 2 or (operator in _TWO_OPERANDS and len(operands) != 2):
        raise WireError(f"a size in the graph gives {len(operands)} operands to {operator.value!r}")
    return Operation(operator, operands)


def argument_to_proto(argument: Argument) -> wire.Argument:
    """The message that :func:`argument_from_proto` reads back."""
    match argument:
        case None:
            return wire.Argument(none=wire.Nothing())
        case bool():
            return wire.Argument(boolean=argument)
        case int():
            return wire.Argument(integer=argument)
        case float():
            return wire.Argument(number=argument)
        case complex():
            return wire.Argument(complex=wire.ComplexNumber(real=argument.real, imaginary=argument.imag))
        case str():
            return wire.Argument(text=argument)
        case tuple():
            return wire.Argument(list=wire.ArgumentList(items=map(argument_to_proto, argument)))
        case Symbol() | Operation():
            return wire.Argument(expression=expression_to_proto(argument))
        case ValueReference():
            return wire.Argument(value=value_to_proto(argument))
        case _:
            return _named_to_proto(argument)


def _named_to_proto(argument: Argument) -> wire.Argument:
    match argument:
        case ParameterReference():
            return wire.Argument(parameter=argument.name)
        case BufferReference():
            return wire.Argument(buffer=argument.name)
        case InputReference():
            return wire.Argument(input=argument.name)
        case OwnDevice():
            return wire.Argument(own_device=wire.Nothing())
        case torch.dtype():
            return wire.Argument(dtype=dtype_name(argument))
        case torch.layout():
            return wire.Argument(layout=str(argument).removeprefix("torch."))
        case torch.memory_format():
            return wire.Argument(memory_format=str(argument).removeprefix("torch."))
        case _:
            raise TypeError(f"no argument of a node: {argument!r}")


def argument_from_proto(message: wire.Argument, depth: int = 0) -> Argument:
    """The argument that ``message`` describes; raises WireError."""
    content = message.WhichOneof("content")
    match content:
        case None:
            raise WireError("an argument of a node is empty")
        case "none":
            return None
        case "own_device":
            return OwnDevice()
        case "list":
            if depth >= MAX_DEPTH:
                raise WireError("an argument of a node is nested too deeply")
            return tuple(argument_from_proto(item, depth + 1) for item in message.list.items)
        case "expression":
            dimension = expression_from_proto(message.expression)
            if isinstance(dimension, int):
                raise WireError("an argument of a node is a plain number written as an expression")
            return dimension
        case "value":
            return value_from_proto(message.value)
        case "complex":
            return complex(message.complex.real, message.complex.imaginary)
        case "boolean" | "integer" | "number" | "text":
            return cast(Argument, getattr(message, content))
        case _:
            return _named_from_proto(message, content)


def _named_from_proto(message: wire.Argument, content: str) -> Argument:
    match content:
        case "parameter":
            return ParameterReference(message.parameter)
        case "buffer":
            return BufferReference(message.buffer)
        case "input":
            return InputReference(message.input)
        case "dtype":
            return dtype_from_name(message.dtype)
        case "layout" if message.layout in _LAYOUTS:
            return _LAYOUTS[message.layout]
        case "memory_format" if message.memory_format in _MEMORY_FORMATS:
            return _MEMORY_FORMATS[message.memory_format]
        case _:
            raise WireError(f"an argument of a node is an unknown {content}: {getattr(message, content)!r}")
