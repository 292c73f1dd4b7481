"""Which elements of an activation crossed a link, kept until the gradient for it comes back.

What was not sent has no part in what the receiver computed, so its gradient is of no use to the sender: the way back needs the
same elements, and no word about where they are. Both ends of a link keep one of these for all their sparse codecs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from atoll.compression.context import CodecContext
from atoll.protocol.ids import MicrobatchIndex, StepNumber

_Turn: TypeAlias = tuple[StepNumber, MicrobatchIndex]


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """The flat places of the elements that crossed, ascending, of a tensor of this shape (as it lies in memory)."""

    places: Tensor
    shape: tuple[int, ...]


class Masks:
    """Of one link. A mask is found for its own edge, step and microbatch alone. It is held while its gradient is due, so there
    are as many as microbatches in flight: one that was taken makes way for the next, a new step for all of the one before."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[_Turn, Mask]] = {}
        self._taken: dict[str, tuple[_Turn, Mask]] = {}

    def keep(self, context: CodecContext, mask: Mask) -> None:
        """What crossed in ``context``; nothing comes back from an evaluation."""
        if context.evaluation:
            return
        waiting = self._waiting.setdefault(context.edge, {})
        for turn in [turn for turn in waiting if turn[0] != context.step]:
            del waiting[turn]
        waiting[context.step, context.microbatch] = mask

    def take(self, context: CodecContext, shape: tuple[int, ...]) -> Mask | None:
        """The mask of the activation whose gradient ``context`` is; None where there is none, or it is of another shape. The
        one that was taken last is found again."""
        if context.evaluation:
            return None
        turn = (context.step, context.microbatch)
        found = self._waiting.get(context.edge, {}).pop(turn, None)
        if found is not None:
            self._taken[context.edge] = turn, found
        earlier, mask = self._taken.get(context.edge, (None, None))
        return mask if earlier == turn and mask is not None and mask.shape == shape else None

    def clear(self) -> None:
        """A generation is over."""
        self._waiting.clear()
        self._taken.clear()

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._waiting.values())
