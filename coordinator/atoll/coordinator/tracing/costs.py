"""Counts the floating-point operations of a forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_SAME_WORK = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
}
"""Operators whose formula torch knows under another name."""


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Matrix products and convolutions by torch's own formulas; any other operator one operation an element of its results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._matrix = 0.0
        self._elements = 0.0

    def take(self) -> tuple[float, float]:
        """(all operations, those of matrix products) since the last call."""
        found = self._matrix + self._elements, self._matrix
        self._matrix = self._elements = 0.0
        return found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        packet = function._overloadpacket
        formula = flop_registry.get(_SAME_WORK.get(packet, packet))
        if formula is not None:
            self._matrix += formula(*args, **kwargs, out_val=result)
        elif not _is_view(function):
            self._elements += sum(item.numel() for item in pytree.tree_leaves(result) if isinstance(item, Tensor))
        return result


def _is_view(function: torch._ops.OpOverload) -> bool:
    returns = function._schema.returns
    return bool(returns) and all(item.alias_info is not None and not item.alias_info.is_write for item in returns)
