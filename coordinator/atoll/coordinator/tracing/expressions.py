"""Sizes of a trace as expressions of the op graph: torch's symbolic integers (sympy underneath) to ``Dimension``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from atoll.protocol.errors import TraceError
from atoll.protocol.graph import Dimension, ExpressionOperator, Operation, Symbol

_MAX_POWER = 8
_BY_CLASS = {
    "Add": ExpressionOperator.ADD,
    "Mul": ExpressionOperator.MULTIPLY,
    "FloorDiv": ExpressionOperator.FLOOR_DIVIDE,
    "CleanDiv": ExpressionOperator.FLOOR_DIVIDE,
    "Mod": ExpressionOperator.MODULO,
    "PythonMod": ExpressionOperator.MODULO,
    "Max": ExpressionOperator.MAXIMUM,
    "Min": ExpressionOperator.MINIMUM,
}


def dimension_of(size: int | torch.SymInt, symbols: Mapping[str, Symbol]) -> Dimension:
    """``size`` as a dimension. ``symbols`` maps the trace's names of the batch inputs' sizes to ours.

    Raises TraceError for a size that depends on the data, or on an operation that the op graph does not know.
    """
    if not isinstance(size, torch.SymInt):
        return int(size)
    return _dimension(size.node.expr, symbols)


def _dimension(expression: Any, symbols: Mapping[str, Symbol]) -> Dimension:
    kind = type(expression).__name__
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        if expression.name not in symbols:
            raise TraceError(
                "a size in the model depends on the values of a tensor (for example through nonzero() or boolean indexing); "
                "use operations whose result has a shape that follows from the inputs' shapes, such as torch.where"
            )
        return symbols[expression.name]
    if kind == "Pow" and expression.args[1].is_Integer and 2 <= int(expression.args[1]) <= _MAX_POWER:
        base = _dimension(expression.args[0], symbols)
        return Operation(ExpressionOperator.MULTIPLY, (base,) * int(expression.args[1]))
    if kind == "Identity":
        return _dimension(expression.args[0], symbols)
    if kind not in _BY_CLASS:
        raise TraceError(f"a size in the model is computed as {expression}, which the op graph cannot express; simplify it")
    return Operation(_BY_CLASS[kind], tuple(_dimension(operand, symbols) for operand in expression.args))
