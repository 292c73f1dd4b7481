"""Which messages a stage exchanges with which others, and what each must hold: pure.

All values that cross from one stage to another after a forward travel in one ACTIVATION message, tensors named
``NODE:OUTPUT``; the gradients of its differentiable ones come back in one GRADIENT message. The holders of a shared parameter
send one another the gradients of their own uses in one TIED_GRADIENT message, tensors named ``NAME@NODE:POSITION``. What
arrives is checked here before it comes near an operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch

from atoll.peer.stage.shared_gradients import use_name
from atoll.protocol.errors import WireError
from atoll.protocol.graph import Bindings, Boundary, SharedParameter, StageGraph, TensorSpec, ValueReference
from atoll.protocol.ids import StageIndex
from atoll.protocol.messages import Kind, MessageKey

NamedTensors: TypeAlias = tuple[tuple[str, torch.Tensor], ...]
Values: TypeAlias = dict[ValueReference, torch.Tensor]


def value_name(value: ValueReference) -> str:
    """How a value is called in a message."""
    return f"{value.node}:{value.output}"


class Boundaries:
    """The messages of one stage, from its graph."""

    def __init__(self, graph: StageGraph, *, reduced_precision: bool = False) -> None:
        self.stage = graph.stage
        self._also_dtype = torch.bfloat16 if reduced_precision else None
        self._receives = _grouped((boundary.source, boundary) for boundary in graph.receives)
        self._sends = _grouped((boundary.target, boundary) for boundary in graph.sends)
        self._tied: dict[tuple[StageIndex, StageIndex], frozenset[str]] = _tied_names(graph.stage, graph.shared)
        self._parameters = {parameter.name: parameter for parameter in graph.parameters}
        self._inputs = dict(graph.inputs)

    @property
    def activation_sources(self) -> frozenset[StageIndex]:
        return frozenset(self._receives)

    @property
    def activation_targets(self) -> frozenset[StageIndex]:
        return frozenset(self._sends)

    @property
    def gradient_sources(self) -> frozenset[StageIndex]:
        """Later stages that answer an activation with a gradient."""
        return frozenset(stage for stage, group in self._sends.items() if any(item.differentiable for item in group))

    @property
    def gradient_targets(self) -> frozenset[StageIndex]:
        return frozenset(stage for stage, group in self._receives.items() if any(item.differentiable for item in group))

    @property
    def tied_stages(self) -> frozenset[StageIndex]:
        """Other stages that hold a copy of a parameter of this one."""
        return frozenset(other for _, other in self._tied if other != self.stage)

    def sensitive(self, source: StageIndex) -> tuple[ValueReference, ...]:
        """The values in an ACTIVATION message from ``source`` that a gradient goes back for: never a mask with infinities."""
        return tuple(item.value for item in self._receives[source] if item.differentiable)

    def activation(self, target: StageIndex, sends: Mapping[ValueReference, torch.Tensor]) -> NamedTensors:
        """The tensors of the ACTIVATION message for ``target``, out of a forward's results."""
        return tuple((value_name(item.value), sends[item.value].detach()) for item in self._sends[target])

    def gradient(self, target: StageIndex, gradients: Mapping[ValueReference, torch.Tensor]) -> NamedTensors:
        """The tensors of the GRADIENT message for the earlier stage ``target``."""
        group = self._receives[target]
        return tuple((value_name(item.value), gradients[item.value].detach()) for item in group if item.differentiable)

    def tied(self, target: StageIndex, own: Mapping[str, torch.Tensor]) -> NamedTensors:
        """The tensors of the TIED_GRADIENT message for ``target``."""
        names = self._tied[self.stage, target]
        return tuple((name, tensor.detach()) for name, tensor in own.items() if name in names)

    def refusal(self, key: MessageKey, names: Iterable[str]) -> str | None:
        """Why a neighbour's message of this key, with tensors of these names, is not expected here; None when it is."""
        if key.target != self.stage:
            return f"it is for stage {key.target}, this is stage {self.stage}"
        expected = self._expected(key)
        if not expected:
            return f"stage {self.stage} expects no {key.kind.name.lower()} from stage {key.source}"
        held = frozenset(names)
        # A use that no microbatch reached has no tied gradient.
        if held != expected and not (key.kind is Kind.TIED_GRADIENT and held < expected):
            return f"it holds {', '.join(sorted(held)) or 'nothing'} where {', '.join(sorted(expected))} was expected"
        return None

    def read_activation(self, source: StageIndex, tensors: NamedTensors, bindings: Bindings) -> Values:
        """The values in an ACTIVATION message; raises WireError for a shape or dtype that the graph does not declare."""
        return self._read(self._receives[source], dict(tensors), bindings)

    def read_gradient(self, source: StageIndex, tensors: NamedTensors, bindings: Bindings) -> Values:
        """The gradients in a GRADIENT message from the later stage ``source``; raises WireError like ``read_activation``."""
        group = [item for item in self._sends[source] if item.differentiable]
        return self._read(group, dict(tensors), bindings)

    def read_tied(self, tensors: NamedTensors) -> dict[str, torch.Tensor]:
        """The gradients in a TIED_GRADIENT message; raises WireError for a shape other than the parameter's."""
        for name, tensor in tensors:
            parameter = self._parameters[name.rpartition("@")[0]]
            if tuple(tensor.shape) != parameter.shape or tensor.dtype != parameter.dtype:
                raise WireError(f"the tied gradient {name} is {_describe(tensor)}, not like its parameter")
        return dict(tensors)

    def read_batch(self, tensors: NamedTensors, bindings: Bindings) -> dict[str, torch.Tensor]:
        """The inputs in a BATCH message; raises WireError when one is missing, unknown or of another shape or dtype."""
        given = dict(tensors)
        if sorted(given) != sorted(self._inputs):
            raise WireError(f"a batch holds {sorted(given)} where stage {self.stage} uses {sorted(self._inputs)}")
        for name, spec in self._inputs.items():
            self._check(f"batch input {name}", given[name], spec, bindings)
        return given

    def _expected(self, key: MessageKey) -> frozenset[str]:
        match key.kind:
            case Kind.ACTIVATION:
                group = self._receives.get(key.source, ())
                return frozenset(value_name(item.value) for item in group)
            case Kind.GRADIENT if not key.evaluation:
                group = self._sends.get(key.source, ())
                return frozenset(value_name(item.value) for item in group if item.differentiable)
            case Kind.TIED_GRADIENT if not key.evaluation and key.source != self.stage:
                return self._tied.get((key.source, self.stage), frozenset())
        return frozenset()

    def _read(self, group: Iterable[Boundary], given: Mapping[str, torch.Tensor], bindings: Bindings) -> Values:
        values: Values = {}
        for item in group:
            name = value_name(item.value)
            if name not in given:
                raise WireError(f"value {name} is missing")
            self._check(f"value {name}", given[name], item.spec, bindings)
            values[item.value] = given[name]
        return values

    def _check(self, what: str, tensor: torch.Tensor, spec: TensorSpec, bindings: Bindings) -> None:
        try:
            sizes = spec.sizes(bindings)
        except (KeyError, ZeroDivisionError) as error:
            raise WireError(f"the sizes sent with the batch do not bind {what}: {error!r}") from error
        allowed = (spec.dtype, self._also_dtype) if spec.dtype == torch.float32 else (spec.dtype,)
        if tuple(tensor.shape) != sizes or tensor.dtype not in allowed:
            raise WireError(f"{what} is {_describe(tensor)} where {spec.dtype} {list(sizes)} was expected")


def _grouped(pairs: Iterable[tuple[StageIndex, Boundary]]) -> dict[StageIndex, tuple[Boundary, ...]]:
    groups: dict[StageIndex, tuple[Boundary, ...]] = {}
    for stage, boundary in pairs:
        groups[stage] = (*groups.get(stage, ()), boundary)
    return groups


def _tied_names(stage: StageIndex, shared: Iterable[SharedParameter]) -> dict[tuple[StageIndex, StageIndex], frozenset[str]]:
    """For each (sender, receiver) with ``stage`` as one of them: the names of the gradients that go that way."""
    names: dict[tuple[StageIndex, StageIndex], frozenset[str]] = {}
    for parameter in shared:
        if stage not in parameter.stages:
            continue
        for other in parameter.stages:
            if other == stage:
                continue
            for sender, receiver in ((stage, other), (other, stage)):
                mine = frozenset(use_name(parameter.name, use) for use in parameter.uses if use.stage == sender)
                names[sender, receiver] = names.get((sender, receiver), frozenset()) | mine
    return names


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
