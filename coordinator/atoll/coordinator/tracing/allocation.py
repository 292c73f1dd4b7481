"""Follows the memory of fake tensors: what is alive at once while a graph runs without its data.

Every piece of memory is counted once, from the operator that makes it until nothing holds it any more, in the phase in which it
was made. What kernels use inside is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary


class Phase(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


class AllocationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, knows how many bytes of each phase are alive. ``on_change`` is called after every operator."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = Phase.FORWARD
        self.alive = dict.fromkeys(Phase, 0)
        self.on_change = on_change
        self._numbers: MutableMapping[torch.UntypedStorage, int] = WeakIdKeyDictionary()
        self._next = 0

    def exempt(self, tensor: Tensor) -> int:
        """Does not count the memory of ``tensor``; its number."""
        return self._number(tensor.untyped_storage(), 0)

    def number(self, tensor: Tensor) -> int:
        """The number of the memory of ``tensor``: the same for its views, and never given again."""
        storage = tensor.untyped_storage()
        return self._number(storage, storage.nbytes())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for item in pytree.tree_leaves(result):
            if isinstance(item, Tensor):
                self.number(item)
        self.on_change()
        return result

    def _number(self, storage: torch.UntypedStorage, num_bytes: int) -> int:
        known = self._numbers.get(storage)
        if known is not None:
            return known
        number = self._next
        self._next += 1
        self._numbers[storage] = number
        self.alive[self.phase] += num_bytes
        weakref.finalize(storage, self._freed, self.phase, num_bytes).atexit = False
        return number

    def _freed(self, phase: Phase, num_bytes: int) -> None:
        self.alive[phase] -= num_bytes
