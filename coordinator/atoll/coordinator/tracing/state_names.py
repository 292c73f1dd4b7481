"""Names of a model's tensors: each parameter and buffer once, under its first name, with its other names as ties."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A parameter or buffer under its canonical name; ``ties`` are its other names in the state dict."""

    name: str
    tensor: Tensor
    ties: tuple[str, ...]
    persistent: bool


class StateNames:
    """The parameters and buffers of ``module`` by identity."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = _by_identity(module.named_parameters(remove_duplicate=False), frozenset())
        self.buffers = _by_identity(module.named_buffers(remove_duplicate=False), frozenset(_non_persistent(module)))
        self._names = {id(named.tensor): named.name for named in (*self.parameters, *self.buffers)}

    def named(self, name: str) -> NamedTensor:
        """The parameter or buffer whose canonical name is ``name``; raises KeyError."""
        for found in (*self.parameters, *self.buffers):
            if found.name == name:
                return found
        raise KeyError(name)

    def name(self, tensor: Tensor) -> str | None:
        """The canonical name of a parameter or buffer of the model, None for any other tensor."""
        return self._names.get(id(tensor))


def _non_persistent(module: nn.Module) -> Iterator[str]:
    for path, child in module.named_modules(remove_duplicate=False):
        for name in child._non_persistent_buffers_set:
            yield f"{path}.{name}" if path else name


def _by_identity(pairs: Iterable[tuple[str, Tensor]], transient: frozenset[str]) -> tuple[NamedTensor, ...]:
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in pairs:
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    found = []
    for identity, (first, *others) in names.items():
        persistent = not {first, *others} <= transient
        ties = tuple(name for name in others if not (persistent and name in transient))
        found.append(NamedTensor(name=first, tensor=tensors[identity], ties=ties, persistent=persistent))
    return tuple(found)
