"""Turns torch's exported program into nodes of the op graph.

Sizes become expressions, ``getitem`` becomes an output number, devices become :class:`OwnDevice`, checks that the exporter
added are dropped, and regions under ``no_grad`` or ``autocast`` are inlined.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule
from torch.fx import Node as TracedNode
from torch.utils import _pytree as pytree

from atoll.coordinator.tracing.expressions import dimension_of
from atoll.coordinator.tracing.state_names import StateNames
from atoll.protocol.errors import TraceError
from atoll.protocol.graph import (
    Argument,
    BufferReference,
    InputReference,
    Node,
    OwnDevice,
    ParameterReference,
    Symbol,
    TensorSpec,
    ValueReference,
)
from atoll.protocol.ids import NodeIndex

Value: TypeAlias = "Argument | list[Argument]"
"""What a traced node stands for; a list for operators with several results."""

_DROPPED = ("aten::_assert_", "aten::sym_constrain_range", "aten::_functional_assert")


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A trace as nodes. ``constants`` are the values of tensors that the forward makes from Python numbers."""

    nodes: tuple[Node, ...]
    inputs: tuple[tuple[str, TensorSpec], ...]
    loss: ValueReference
    metrics: tuple[tuple[str, ValueReference], ...]
    constants: Mapping[str, Tensor]
    example: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Under what a part of the forward runs."""

    gradient: bool = True
    full_precision: bool = False


def convert(program: Any, names: StateNames, inner: str, example: Mapping[str, Tensor]) -> Converted:
    """The nodes of ``program``; ``inner`` is the path of the module whose state dict names the weights."""
    conversion = _Conversion(names, inner)
    conversion.read_placeholders(program, example)
    results = conversion.read_graph(program.graph_module, region=Region())
    loss, metrics = _outputs(results, program.call_spec.out_spec)
    return Converted(
        nodes=tuple(conversion.nodes),
        inputs=tuple(conversion.inputs),
        loss=loss,
        metrics=metrics,
        constants=conversion.constants,
        example=tuple(conversion.example.items()),
    )


class _Conversion:
    """What each traced node stands for, and the nodes so far."""

    def __init__(self, names: StateNames, inner: str) -> None:
        self.nodes: list[Node] = []
        self.inputs: list[tuple[str, TensorSpec]] = []
        self.constants: dict[str, Tensor] = {}
        self.example: dict[str, int] = {}
        self._names = names
        self._inner = inner
        self._symbols: dict[str, Symbol] = {}
        self._values: dict[TracedNode, Value] = {}

    def read_placeholders(self, program: Any, example: Mapping[str, Tensor]) -> None:
        """Names the parameters, buffers, constants and batch inputs, and the symbols in the inputs' shapes."""
        kinds = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        for traced in program.graph.nodes:
            if traced.op != "placeholder":
                continue
            spec = kinds[traced.name]
            if spec.kind is InputKind.USER_INPUT:
                self._values[traced] = InputReference(traced.target)
                self.inputs.append((traced.target, self._input_spec(traced.meta["val"], example[traced.target])))
            else:
                self._values[traced] = self._state(spec, program)

    def _state(self, spec: Any, program: Any) -> Value:
        held = program.state_dict if spec.target in program.state_dict else program.constants
        if spec.target not in held:
            raise TraceError(f"the model uses {spec.target}, which is neither a parameter, a buffer nor a constant tensor")
        tensor = held[spec.target]
        if spec.kind is InputKind.PARAMETER:
            return ParameterReference(self._name(spec.target, tensor))
        if spec.kind is InputKind.BUFFER:
            return BufferReference(self._name(spec.target, tensor))
        if spec.kind is not InputKind.CONSTANT_TENSOR:
            raise TraceError(f"the model uses {spec.target}, an object that is no tensor; keep plain tensors and numbers in it")
        name = f"constant:{len(self.constants)}"
        self.constants[name] = tensor
        return BufferReference(name)

    def _name(self, target: str, tensor: Tensor) -> str:
        name = self._names.name(tensor)
        if name is None:
            raise TraceError(
                f"the tensor {target} is not part of the model's state dict; make it a parameter or a buffer of it"
            )
        return name

    def _input_spec(self, traced: Tensor, example: Tensor) -> TensorSpec:
        for size, known in zip(traced.shape, example.shape, strict=True):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr.name not in self._symbols:
                symbol = Symbol(f"s{len(self._symbols)}")
                self._symbols[size.node.expr.name] = symbol
                self.example[symbol.name] = known
        return self._spec(traced)

    def _spec(self, traced: Tensor) -> TensorSpec:
        return TensorSpec(tuple(dimension_of(size, self._symbols) for size in traced.shape), traced.dtype)

    def read_graph(self, graph_module: GraphModule, region: Region) -> list[Value]:
        """Converts the nodes of ``graph_module`` in order; returns what its outputs stand for, flattened."""
        results: list[Value] = []
        for traced in graph_module.graph.nodes:
            if traced.op == "call_function":
                self._read_call(graph_module, traced, region=region)
            elif traced.op == "output":
                results = [self._value(item) for item in pytree.tree_leaves(traced.args[0])]
        return results

    def _read_call(self, owner: GraphModule, traced: TracedNode, region: Region) -> None:
        target: Any = traced.target
        found = traced.meta.get("val")
        if isinstance(found, int | torch.SymInt):
            self._values[traced] = dimension_of(found, self._symbols)
        elif isinstance(found, float | torch.SymFloat | torch.SymBool):
            raise TraceError(
                f"the model computes a fraction or a condition from a size (in {self._module(traced) or 'its forward'}: "
                f"{traced.target}); divide the tensor by the size, or use whole numbers"
            )
        elif target is operator.getitem:
            whole = self._value(traced.args[0])
            assert isinstance(whole, list)
            self._values[traced] = whole[traced.args[1]]  # type: ignore[index]
        elif isinstance(target, OpOverload):
            self._read_operator(target, traced, region=region)
        else:
            self._read_region(owner, traced, region=region)

    def _read_operator(self, operator_: OpOverload, traced: TracedNode, region: Region) -> None:
        name = operator_._schema.name
        if name.startswith(_DROPPED):
            return
        if self._is_constant_handling(name, traced):
            return
        if name == "aten::lift_fresh_copy":
            operator_ = torch.ops.aten.clone.default
        arguments, keywords = self._arguments(operator_, traced)
        index = NodeIndex(len(self.nodes))
        found = traced.meta["val"]
        outputs = tuple(self._output(item) for item in (found if isinstance(found, list | tuple) else [found]))
        node = Node(
            index=index,
            operator=str(operator_),
            arguments=arguments,
            keywords=keywords,
            outputs=outputs,
            module=self._module(traced),
            gradient=region.gradient,
            full_precision=region.full_precision,
        )
        self.nodes.append(node)
        references: list[Argument] = [ValueReference(index, number) for number in range(len(outputs))]
        self._values[traced] = references if isinstance(found, list | tuple) else references[0]

    def _is_constant_handling(self, name: str, traced: TracedNode) -> bool:
        """``detach_`` does nothing on a copy of what a forward made from Python numbers; it is kept on the constant itself."""
        if name != "aten::detach_":
            return False
        value = self._value(traced.args[0])
        if isinstance(value, BufferReference) and value.name in self.constants:
            return False
        source = self.nodes[value.node] if isinstance(value, ValueReference) else None
        if source is None or source.operator != "aten.clone.default":
            return False
        original = source.arguments[0]
        if not (isinstance(original, BufferReference) and original.name in self.constants):
            return False
        self._values[traced] = value
        return True

    def _output(self, found: object) -> TensorSpec | None:
        if isinstance(found, Tensor):
            return self._spec(found)
        if isinstance(found, list | tuple):
            raise TraceError("an operator of the model returns lists in lists, which the op graph cannot express")
        return None

    def _arguments(
        self, operator_: OpOverload, traced: TracedNode
    ) -> tuple[tuple[Argument, ...], tuple[tuple[str, Argument], ...]]:
        """Positional arguments wherever the schema allows, so that two traces of one call look alike."""
        schema = operator_._schema.arguments
        given = dict(zip((argument.name for argument in schema), traced.args, strict=False)) | dict(traced.kwargs)
        positional = [argument for argument in schema if not argument.kwarg_only]
        count = max((number + 1 for number, argument in enumerate(positional) if argument.name in given), default=0)
        arguments = []
        for argument in positional[:count]:
            value = given.pop(argument.name, argument.default_value)
            arguments.append(True if argument.name in _CUDNN else self._argument(value))
        keywords = [(name, self._argument(value)) for name, value in given.items() if name not in ("pin_memory", "generator")]
        return tuple(arguments), tuple(keywords)

    def _argument(self, value: object) -> Argument:
        if isinstance(value, TracedNode):
            known = self._value(value)
            return tuple(known) if isinstance(known, list) else known
        if isinstance(value, torch.device):
            return OwnDevice()
        if isinstance(value, list | tuple):
            return tuple(self._argument(item) for item in value)
        if isinstance(value, torch.SymInt):
            return dimension_of(value, self._symbols)
        if value is None or isinstance(
            value, bool | int | float | complex | str | torch.dtype | torch.layout | torch.memory_format
        ):
            return value
        raise TraceError(f"an operator of the model takes {value!r}, which the op graph cannot express")

    def _value(self, traced: object) -> Value:
        if not isinstance(traced, TracedNode):
            return self._argument(traced)
        return self._values[traced]

    def _read_region(self, owner: GraphModule, traced: TracedNode, region: Region) -> None:
        """Inlines what ran under ``torch.no_grad``, ``torch.enable_grad`` or ``torch.autocast``."""
        kind = getattr(traced.target, "__name__", str(traced.target))
        if kind == "wrap_with_set_grad_enabled":
            enabled, body, *operands = traced.args
            region = dataclasses.replace(region, gradient=bool(enabled))
        elif kind == "wrap_with_autocast":
            _, _, enabled, _, body, *operands = traced.args
            if enabled:
                raise TraceError(
                    "the model's forward turns autocast on itself; leave the precision to the job (training.precision)"
                )
            region = dataclasses.replace(region, full_precision=True)
        else:
            raise TraceError(f"the model uses {kind}, which the op graph cannot express; write it in plain tensor operations")
        assert isinstance(body, TracedNode)
        submodule = owner.get_submodule(str(body.target))
        assert isinstance(submodule, GraphModule)
        placeholders = [node for node in submodule.graph.nodes if node.op == "placeholder"]
        for placeholder, operand in zip(placeholders, operands, strict=True):
            self._values[placeholder] = self._value(operand)
        results = self.read_graph(submodule, region=region)
        self._values[traced] = results  # type: ignore[assignment]

    def _module(self, traced: TracedNode) -> str:
        """The path of the module that the node came from, as seen from the module whose state dict names the weights."""
        stack = list((traced.meta.get("nn_module_stack") or {}).values())
        path = str(stack[-1][0]) if stack else ""
        if path.startswith("_empty_nn_module_stack"):
            return ""
        if self._inner and (path == self._inner or path.startswith(f"{self._inner}.")):
            path = path[len(self._inner) :].removeprefix(".")
        return path


_CUDNN = ("cudnn_enable", "cudnn_enabled")
"""Traced on a machine without a GPU these are False; peers with one want True, and on a CPU they mean nothing."""


def _outputs(results: list[Value], structure: Any) -> tuple[ValueReference, tuple[tuple[str, ValueReference], ...]]:
    """The loss and the metrics among what the forward returned."""
    returned = pytree.tree_unflatten(results, structure)
    metrics: Mapping[str, Value] = {}
    if isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[1], dict):
        returned, metrics = returned
    if not isinstance(returned, ValueReference) or not all(isinstance(value, ValueReference) for value in metrics.values()):
        raise TraceError(
            "the model's forward must return the loss (a tensor it computed), or the loss and a dict of metric tensors"
        )
    found = tuple((str(name), value) for name, value in metrics.items() if isinstance(value, ValueReference))
    return returned, found
