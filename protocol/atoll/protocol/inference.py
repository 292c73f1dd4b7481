"""Runs a graph's nodes on meta tensors, to compare what they return with what the graph declares.

Meta tensors have shapes and no data, so nothing is computed and nothing allocated; even so, an argument that would make torch
allocate real memory or a list of a billion pieces is refused before the call. The same run shows which values share memory,
hence whether a node would change in place what it must not: parameters, constants, and values that another stage sent and
expects a gradient for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from atoll.protocol import calling, operators
from atoll.protocol.errors import GraphRefused
from atoll.protocol.graph import (
    Argument,
    Bindings,
    Node,
    Operation,
    OwnDevice,
    Reference,
    Symbol,
    TensorSpec,
    ValueReference,
    references_in,
)
from atoll.protocol.limits import Limits, evaluate_size

_META = torch.device("meta")


class Inference:
    """One run over the nodes of a graph, in training or in evaluation mode.

    ``given`` are the parameters, buffers, inputs and received values; ``untouchable`` says of some of them why no node may
    change them.
    """

    def __init__(
        self,
        given: Mapping[Reference, TensorSpec],
        untouchable: Mapping[Reference, str],
        bindings: Bindings,
        limits: Limits,
    ) -> None:
        self._bindings = bindings
        self._limits = limits
        self._values: dict[Reference, Any] = {
            reference: torch.empty(spec.sizes(bindings), dtype=spec.dtype, device=_META) for reference, spec in given.items()
        }
        self._untouchable = {_memory(self._values[reference]): reason for reference, reason in untouchable.items()}

    @torch.no_grad()
    def run(self, node: Node, arguments: tuple[Argument, ...]) -> None:
        """Calls ``node`` with ``arguments`` and checks its results; raises GraphRefused with the reason."""
        operator = operators.resolve(node.operator)
        named = calling.named_arguments(operator, arguments, node)
        _check_schema(operator, named, node.index)
        self._check_sizes((*arguments, *(argument for _, argument in node.keywords)), node.index)
        self._check_pieces(operator, named, node)
        self._check_writes(operator, named, node.index)
        try:
            results = calling.call(operator, arguments, node, self._lookup, self._bindings, _META)
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise GraphRefused(f"{node.operator} does not accept its arguments: {first}", node.index) from error
        self._compare(node, results)
        self._values.update((ValueReference(node.index, position), value) for position, value in enumerate(results))

    def result(self, value: ValueReference) -> torch.Tensor:
        """The meta tensor of a value that was computed."""
        found: torch.Tensor = self._values[value]
        return found

    def _lookup(self, reference: Reference) -> Any:
        return self._values[reference]

    def _check_sizes(self, argument: Argument, node: int) -> None:
        if isinstance(argument, tuple):
            for item in argument:
                self._check_sizes(item, node)
        elif isinstance(argument, (Symbol, Operation)):
            evaluate_size(argument, self._bindings, self._limits, "an argument", node)

    def _check_pieces(self, operator: OpOverload, named: Mapping[str, Argument], node: Node) -> None:
        """Refuses a call that returns more tensors than it declares, before it makes them."""
        if operator._schema.name not in operators.LIST_OPERATORS:
            return
        values = {name: calling.value_of(argument, self._lookup, self._bindings, _META) for name, argument in named.items()}
        try:
            pieces = _num_pieces(operator._schema.name, values)
        except (TypeError, IndexError, ZeroDivisionError, AttributeError) as error:
            raise GraphRefused(f"{node.operator} does not accept its arguments: {error}", node.index) from error
        if pieces > len(node.outputs):
            raise GraphRefused(f"{node.operator} returns {pieces} tensors, {len(node.outputs)} are declared", node.index)

    def _check_writes(self, operator: OpOverload, named: dict[str, Argument], node: int) -> None:
        for target in calling.written(operator, named):
            for reference in references_in((target,)):
                reason = self._untouchable.get(_memory(self._values[reference]))
                if reason is not None:
                    raise GraphRefused(f"{operator} changes {reason} in place", node)

    def _compare(self, node: Node, results: tuple[Any, ...]) -> None:
        if len(results) != len(node.outputs):
            raise GraphRefused(f"{node.operator} returns {len(results)} values, {len(node.outputs)} are declared", node.index)
        for position, (value, spec) in enumerate(zip(results, node.outputs, strict=True)):
            if not isinstance(value, torch.Tensor):
                if spec is not None:
                    raise GraphRefused(f"output {position} of {node.operator} is no tensor, one is declared", node.index)
                continue
            if spec is None:
                raise GraphRefused(f"output {position} of {node.operator} is a tensor, none is declared", node.index)
            declared = spec.sizes(self._bindings)
            if tuple(value.shape) != declared:
                found = tuple(value.shape)
                raise GraphRefused(f"{node.operator} returns shape {found}, the graph declares {declared}", node.index)
            if value.dtype != spec.dtype:
                raise GraphRefused(f"{node.operator} returns {value.dtype}, the graph declares {spec.dtype}", node.index)
            if value.device != _META or value.layout != torch.strided:
                raise GraphRefused(f"{node.operator} makes a tensor that is not on the peer's device or not dense", node.index)


def _memory(value: Any) -> int:
    """What two tensors have in common if and only if one's change is seen in the other."""
    if not isinstance(value, torch.Tensor):
        return 0
    address: int = value.untyped_storage()._cdata
    return address


def _check_schema(operator: OpOverload, named: Mapping[str, Argument], node: int) -> None:
    """Refuses what types alone allow: other devices, pinned or sparse tensors, generators."""
    arguments = operator._schema.arguments
    creates = not any("Tensor" in str(argument.type) for argument in arguments)
    for argument in arguments:
        value = named.get(argument.name)
        if "Device" in str(argument.type):
            if creates and not isinstance(value, OwnDevice):
                raise GraphRefused(f"{operator} does not say that it makes its result on the peer's own device", node)
            if value is not None and not isinstance(value, OwnDevice):
                raise GraphRefused(f"{operator} names the device {value!r}; a graph knows the peer's own alone", node)
        elif value is not None and "Generator" in str(argument.type):
            raise GraphRefused(f"{operator} is given a random generator", node)
        elif argument.name in ("pin_memory", "sparse", "sparse_grad") and value not in (None, False):
            raise GraphRefused(f"{operator} is called with {argument.name}", node)
        elif isinstance(value, torch.layout) and value != torch.strided:
            raise GraphRefused(f"{operator} asks for the layout {value}", node)


def _num_pieces(name: str, values: Mapping[str, Any]) -> int:
    """How many tensors a call of a list operator returns."""
    if name == "aten::unbind":
        return int(values["self"].shape[values["dim"]])
    for key in ("tensors", "split_sizes", "split_size"):
        if isinstance(values.get(key), list):
            return len(values[key])
    if isinstance(values.get("indices"), list):
        return len(values["indices"]) + 1
    if "split_size" in values:
        length = int(values["self"].shape[values["dim"]])
        return 1 if length == 0 else -(-length // int(values["split_size"]))
    if "chunks" in values:
        return min(int(values["chunks"]), max(1, int(values["self"].shape[values["dim"]])))
    return int(values.get("sections", 1))
