"""How a model's tensors are initialised: small programs for the peers to replay, or values for the coordinator to send."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from atoll.coordinator.tracing.recorder import EMPTY, Call, Handle, Recorder, recording_calls
from atoll.coordinator.tracing.state_names import NamedTensor, StateNames
from atoll.protocol import operators
from atoll.protocol.errors import GraphRefused
from atoll.protocol.graph import Argument, Initialisation, Node, OwnDevice, TensorSpec, ValueReference
from atoll.protocol.ids import NodeIndex
from atoll.protocol.randomness import name_seed, seeded

MAX_PROGRAM_NODES = 512
"""A longer program is not sent: its tensor's value is."""
MAX_INLINE_ELEMENTS = 64
"""Constants of more different elements are sent by value."""
_IGNORED_KEYWORDS = ("generator", "pin_memory")


Programs: TypeAlias = Mapping[str, Initialisation | None]
"""The program of each parameter and buffer by name; None where the first value must be sent."""


class Recording:
    """The programs behind the tensors of one model."""

    def __init__(self) -> None:
        self._recorder = Recorder()
        self._originals: dict[int, Tensor] = {}
        self._moved: dict[int, Tensor] = {}
        self._seeds: dict[str, str] = {}

    @contextlib.contextmanager
    def on_meta(self) -> Iterator[None]:
        """Records what is made inside."""
        with recording_calls(self._recorder):
            yield

    def move_to_meta(self, module: nn.Module) -> None:
        """Replaces tensors that the constructor insisted on making for real; their content stays known."""
        for child in module.modules():
            for held in (child._parameters, child._buffers):
                for name, tensor in held.items():
                    if tensor is not None and tensor.device.type != "meta":
                        held[name] = self._on_meta(tensor)  # type: ignore[assignment]

    def _on_meta(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._moved:
            data = torch.empty_like(tensor, device="meta", requires_grad=False)
            moved = nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
            self._moved[id(tensor)] = moved
            self._originals[id(moved)] = tensor
        return self._moved[id(tensor)]

    def programs(self, names: StateNames) -> Programs:
        """The programs of all parameters and buffers."""
        found: dict[str, Initialisation | None] = {}
        drawn: dict[str, tuple[int, ...]] = {}
        owners: dict[int, str] = {}
        for named in (*names.parameters, *names.buffers):
            handle, calls = self._behind(named)
            drawn[named.name] = tuple(call.index for call in calls if call.random)
            for index in drawn[named.name]:
                owners.setdefault(index, named.name)
            seed = self._seeds[named.name] = _seed_name(named.name, drawn, owners)
            found[named.name] = _Program(self._recorder, calls, handle, seed).build()
        return found

    def value(self, named: NamedTensor, run_seed: int) -> Tensor:
        """The first value of one tensor, on the CPU: for those that peers cannot make themselves."""
        handle, calls = self._behind(named)
        seed = name_seed(run_seed, self._seeds.get(named.name) or named.name)
        with torch.no_grad(), seeded(torch.device("cpu"), seed):
            return self._recorder.replay(calls, handle).contiguous()

    def _behind(self, named: NamedTensor) -> tuple[Handle, list[Call]]:
        handle = self._recorder.handle(self._originals.get(id(named.tensor), named.tensor).detach())
        return handle, self._recorder.calls_behind(handle)


def _seed_name(name: str, drawn: dict[str, tuple[int, ...]], owners: dict[int, str]) -> str:
    """Whose random numbers a tensor has: a copy of another (a teacher of its student) draws the same ones again."""
    first = {owners[index] for index in drawn[name]}
    if len(first) == 1:
        (owner,) = first
        if owner != name and drawn[owner] == drawn[name]:
            return owner
    return ""


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """Everything made inside lives on the meta device, and how it was made is known afterwards."""
    record = Recording()
    with record.on_meta():
        yield record


def constant_program(tensor: Tensor) -> Initialisation | None:
    """A program that makes exactly ``tensor``; None when it has too many different elements, or no content."""
    if tensor.device.type == "meta":
        return None
    nodes = list(_constant_nodes(tensor, 0))
    if not nodes:
        return None
    return Initialisation(nodes=tuple(nodes), result=ValueReference(nodes[-1].index))


def _constant_nodes(tensor: Tensor, first: int) -> Iterator[Node]:
    shape, flat = tuple(tensor.shape), tensor.flatten()
    keywords: tuple[tuple[str, Argument], ...] = (("dtype", tensor.dtype), ("device", OwnDevice()))

    def full(index: int, size: tuple[int, ...], value: Any) -> Node:
        spec = TensorSpec(size, tensor.dtype)
        return Node(
            index=NodeIndex(index), operator="aten.full.default", arguments=(size, value), keywords=keywords, outputs=(spec,)
        )

    if flat.numel() == 0 or bool((flat == flat[0]).all()):
        yield full(first, shape, flat[0].item() if flat.numel() else 0)
    elif flat.numel() <= MAX_INLINE_ELEMENTS:
        values = flat.tolist()
        yield from (full(first + number, (), value) for number, value in enumerate(values))
        references = tuple(ValueReference(NodeIndex(first + number)) for number in range(len(values)))
        joined = NodeIndex(first + len(values))
        spec = TensorSpec((len(values),), tensor.dtype)
        yield Node(index=joined, operator="aten.stack.default", arguments=(references,), outputs=(spec,))
        spec = TensorSpec(shape, tensor.dtype)
        reshaped = (ValueReference(joined), shape)
        yield Node(index=NodeIndex(joined + 1), operator="aten.reshape.default", arguments=reshaped, outputs=(spec,))


class _Program:
    """Turns recorded calls into an :class:`Initialisation`."""

    def __init__(self, recorder: Recorder, calls: list[Call], wanted: Handle, seed: str) -> None:
        self._recorder = recorder
        self._calls = calls
        self._wanted = wanted
        self._seed = seed
        self._nodes: list[Node] = []
        self._made: dict[tuple[int, int], ValueReference] = {}

    def build(self) -> Initialisation | None:
        """The program; None when a peer could not replay it."""
        for call in self._calls:
            added = self._add_constant(call) if call.operator is None else self._add_call(call)
            if not added or len(self._nodes) > MAX_PROGRAM_NODES:
                return None
        return Initialisation(nodes=tuple(self._nodes), result=self._reference(self._wanted), seed=self._seed)

    def _add_constant(self, call: Call) -> bool:
        template = call.templates[0]
        assert template is not None
        if call.unknown:
            return False
        content = torch.zeros((), dtype=template.dtype).expand(template.shape) if call.constant is None else call.constant
        nodes = list(_constant_nodes(content, len(self._nodes)))
        self._nodes.extend(nodes)
        if nodes:
            self._made[call.index, 0] = ValueReference(nodes[-1].index)
        return bool(nodes)

    def _add_call(self, call: Call) -> bool:
        name = str(call.operator)
        try:
            operators.resolve(name)
            arguments, keywords = self._arguments(call)
        except (GraphRefused, TypeError):
            return False
        index = NodeIndex(len(self._nodes))
        outputs = tuple(None if made is None else TensorSpec(tuple(made.shape), made.dtype) for made in call.templates)
        self._nodes.append(Node(index=index, operator=name, arguments=arguments, keywords=keywords, outputs=outputs))
        for number in range(len(outputs)):
            self._made[call.index, number] = ValueReference(index, number)
        if call.operator in EMPTY and not self._set_later(call):
            zeroed = NodeIndex(index + 1)
            self._nodes.append(
                Node(index=zeroed, operator="aten.zero_.default", arguments=(ValueReference(index),), outputs=outputs)
            )
        return True

    def _set_later(self, call: Call) -> bool:
        handle = call.outputs[0]
        assert handle is not None
        storage = self._recorder.storage_of(handle)
        return any(other.overwrites == storage for other in self._calls)

    def _arguments(self, call: Call) -> tuple[tuple[Argument, ...], tuple[tuple[str, Argument], ...]]:
        arguments = tuple(self._argument(value) for value in call.arguments)
        kept = ((name, value) for name, value in call.keywords.items() if name not in _IGNORED_KEYWORDS)
        return arguments, tuple((name, self._argument(value)) for name, value in kept)

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, Handle):
            return self._reference(value)
        if isinstance(value, torch.device):
            return OwnDevice()
        if isinstance(value, list | tuple):
            return tuple(self._argument(item) for item in value)
        if value is None or isinstance(
            value, bool | int | float | complex | str | torch.dtype | torch.layout | torch.memory_format
        ):
            return value
        raise TypeError(f"cannot be written into a program: {value!r}")

    def _reference(self, handle: Handle) -> ValueReference:
        return self._made[self._recorder.output_of(handle)]
