"""A device that is not the CPU, for tests on machines that have none: it computes on the CPU, and counts what crosses.

Tensors on it say that they are, and cannot be mixed with others, as on a real one; so code that computes on the CPU by mistake
either fails or is seen to have moved the tensor there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
_BETWEEN_DEVICES = ("aten::copy_", "aten::_to_copy")
_TAKES_INDICES = ("aten::index", "aten::index_put_", "aten::_index_put_impl_")


class DeviceTensor(Tensor):
    """A tensor on the device; ``numbers`` has its numbers."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device=DEVICE
        )
        made.numbers = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is a class method too, and says it is not
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} outside of the pretended device")


@dataclass(slots=True)
class Traffic:
    """Bytes that left the device and came to it, and single numbers that were read."""

    down: list[int] = field(default_factory=list)
    up: list[int] = field(default_factory=list)
    scalars: int = 0


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traffic = traffic

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        name = func.name().partition(".")[0]
        tensors = [value for value in tree_flatten((args, given))[0] if isinstance(value, Tensor)]
        here = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        self._check(name, tensors, here)
        wanted = given.get("device")
        on_device = bool(here) if wanted is None else torch.device(wanted).type == DEVICE.type
        if wanted is not None:
            given["device"] = "cpu"
        result = func(*tree_map(_inner, tuple(args)), **tree_map(_inner, given))
        self._count(name, args, here, on_device)
        if name == "aten::_local_scalar_dense":
            return result
        return self._wrap(result, args, kwargs or {}) if on_device else result

    def _check(self, name: str, tensors: list[Tensor], here: list[DeviceTensor]) -> None:
        strangers = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor) and tensor.dim()]
        if here and strangers and name not in _BETWEEN_DEVICES + _TAKES_INDICES:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found {DEVICE} and cpu")

    def _count(self, name: str, args: Sequence[Any], here: list[DeviceTensor], on_device: bool) -> None:
        if name == "aten::_local_scalar_dense" and here:
            self._traffic.scalars += 1
        if name == "aten::_to_copy":
            source = args[0]
            if isinstance(source, DeviceTensor) and not on_device:
                self._traffic.down.append(source.nbytes)
            elif not isinstance(source, DeviceTensor) and on_device:
                self._traffic.up.append(source.nbytes)
        if name == "aten::copy_" and isinstance(args[1], DeviceTensor) != isinstance(args[0], DeviceTensor):
            (self._traffic.down if isinstance(args[1], DeviceTensor) else self._traffic.up).append(args[1].nbytes)

    def _wrap(self, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        known = {id(value.numbers): value for value in tree_flatten((args, dict(kwargs)))[0] if isinstance(value, DeviceTensor)}
        if isinstance(args[0] if args else None, Tensor) and not isinstance(args[0], DeviceTensor):
            known[id(args[0])] = args[0]  # copy_ to the CPU

        def wrapped(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return known.get(id(value)) if id(value) in known else DeviceTensor(value)

        return tree_map(wrapped, result)


def _inner(value: Any) -> Any:
    return value.numbers if isinstance(value, DeviceTensor) else value


@contextmanager
def pretended_device() -> Iterator[tuple[Callable[[Tensor], Tensor], Traffic]]:
    """How to put a tensor on the device, and what has crossed since."""
    traffic = Traffic()
    with _Mode(traffic):
        yield lambda tensor: DeviceTensor(tensor.clone()), traffic
