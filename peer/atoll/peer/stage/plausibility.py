"""Whether what a neighbour sends is of a size that such values can have, going by what they were in the steps so far. Pure.

Every stage looks at what it sends: a value that is not finite is reported where it is made. So one that arrives like that was
not looked at, and its sender is to blame. What is finite is compared by its root mean square, a logarithm for each value that
crosses and each step that was committed; of a step the largest counts. A step that is void teaches nothing.

The bounds are wide, for they must let through all that honest training does. From one step to the next an activation grows by
less than ten, in bad ones by some hundred; gradients more, for they shrink with the loss: a model that has learned its data by
heart meets one wrong label with a gradient a hundred thousand times the usual. So a value is refused that is beyond the middle
of the last steps by ``Bound.usual`` bits, and beyond the largest of all by ``Bound.ever``. Smaller ones never are: zeros are
what a layer gives that starts with zeros, and what is masked. Whoever stays within the bounds is not found out.

Gradients of weights are sums that nobody looks at before they are sent: one that is not finite may come of honest training, and
voids the step by its norm. So of these only the size counts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from atoll.protocol.errors import Implausible
from atoll.protocol.graph import ValueReference
from atoll.protocol.ids import PeerId
from atoll.protocol.messages import Kind

WARMING_STEPS = 8
"""Before that many steps nothing but what is not finite is refused."""
REMEMBERED_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """In bits: how far beyond the middle of the last steps, and beyond the largest there ever was."""

    usual: float
    ever: float


_GRADIENTS = Bound(usual=20.0, ever=10.0)
BOUNDS = {
    Kind.ACTIVATION: Bound(usual=12.0, ever=6.0),
    Kind.GRADIENT: _GRADIENTS,
    Kind.TIED_GRADIENT: _GRADIENTS,
    Kind.PART: _GRADIENTS,
    Kind.TOTAL: _GRADIENTS,
}


@dataclass(slots=True)
class _History:
    """Of one value: the sizes in the last steps, the largest of all, and that of the open step, as logarithms."""

    sizes: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))
    largest: float = -math.inf
    open: float = -math.inf


class Plausibility:
    """Of one peer's stage after another: values have the same names under any cut."""

    def __init__(self) -> None:
        self._histories: dict[tuple[Kind, ValueReference | str], _History] = {}

    def check(
        self, kind: Kind, sender: PeerId, values: Mapping[ValueReference, Tensor], only: Iterable[ValueReference]
    ) -> None:
        """Looks at ``only`` these of the values that ``sender`` sent. Raises Implausible."""
        for value in only:
            size = _root_mean_square(values[value])
            what = f"the {kind.name.lower()} {value.node}:{value.output}"
            if not math.isfinite(size):
                raise Implausible(
                    sender, f"{what} that it sent holds values that are not finite, which its stage lets nobody see"
                )
            if size > 0.0:
                self._compare(kind, sender, value, math.log2(size), what)

    def check_weights(self, kind: Kind, sender: PeerId, name: str, gradient: Tensor) -> None:
        """Looks at what is to be a part of the gradient of weights. Raises Implausible."""
        size = _root_mean_square(gradient)
        if 0.0 < size < math.inf:
            what = f"the {kind.name.lower().replace('_', ' ')} {name}".rstrip()
            self._compare(kind, sender, name, math.log2(size), what)

    def committed(self) -> None:
        """The open step has happened."""
        for history in self._histories.values():
            if history.open > -math.inf:
                history.sizes.append(history.open)
                history.largest = max(history.largest, history.open)
        self.dropped()

    def dropped(self) -> None:
        """The open step has not happened."""
        for history in self._histories.values():
            history.open = -math.inf

    def _compare(self, kind: Kind, sender: PeerId, value: ValueReference | str, size: float, what: str) -> None:
        history = self._histories.setdefault((kind, value), _History())
        if len(history.sizes) >= WARMING_STEPS:
            bound, usual = BOUNDS[kind], median(history.sizes)
            if size > usual + bound.usual and size > history.largest + bound.ever:
                raise Implausible(
                    sender,
                    f"{what} that it sent is {2.0 ** min(size - usual, 1000.0):.3g} times as large as in the last "
                    f"{len(history.sizes)} steps",
                )
        history.open = max(history.open, size)


def _root_mean_square(tensor: Tensor) -> float:
    """0 of no elements; not finite if one of them is not."""
    if not tensor.numel():
        return 0.0
    norm = float(torch.linalg.vector_norm(tensor.detach(), dtype=_summing(tensor.dtype)))
    if math.isfinite(norm):
        return norm / math.sqrt(tensor.numel())
    if not bool(tensor.isfinite().all()):
        return math.inf
    largest = float(tensor.abs().amax())  # its square is too large for the sum
    return (
        largest
        * float(torch.linalg.vector_norm(tensor.detach() / largest, dtype=_summing(tensor.dtype)))
        / math.sqrt(tensor.numel())
    )


def _summing(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
