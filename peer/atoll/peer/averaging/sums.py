"""The sums that one member of a round makes for all: parts come in any order and are added in the group's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from atoll.peer.averaging.averager import weighted_sum
from atoll.protocol.errors import RoundFailed, WireError


class Sums:
    """Of one round, on one event loop. ``encode`` makes of a sum the message that all are sent and what it decodes to; it
    runs in a worker thread, as the adding does."""

    def __init__(
        self,
        *,
        num_parts: int,
        weights: Sequence[float],
        divisor: float,
        encode: Callable[[int, Tensor], tuple[Any, Tensor]],
    ) -> None:
        self.num_parts = num_parts
        self._weights = list(weights)
        self._divisor = divisor
        self._encode = encode
        self._parts: list[dict[int, Tensor]] = [{} for _ in range(num_parts)]
        self._counts = [0] * len(self._weights)
        self._results: list[asyncio.Future[tuple[Any, Tensor]]] = [
            asyncio.get_running_loop().create_future() for _ in range(num_parts)
        ]
        self._making: set[asyncio.Task[None]] = set()

    def add(self, member: int, index: int, values: Tensor) -> None:
        """A member's part. The sum is made when the last one is here."""
        waiting = self._parts[index]
        if member in waiting or self._results[index].done():
            raise WireError(f"it sent part {index} twice")
        waiting[member] = values
        self._counts[member] += 1
        if len(waiting) == len(self._weights):
            task = asyncio.get_running_loop().create_task(self._make(index))
            self._making.add(task)
            task.add_done_callback(self._making.discard)

    async def result(self, index: int) -> tuple[Any, Tensor]:
        """A sum as it is sent, and as all decode it; raises RoundFailed when the round has failed."""
        return await asyncio.shield(self._results[index])

    def missing_from(self) -> tuple[int, ...]:
        """The members whose parts are not all here."""
        return tuple(member for member, count in enumerate(self._counts) if count < self.num_parts)

    def finalize(self) -> None:
        """Nothing more will come: whoever waits for a sum is told so. Sums that were made can still be had."""
        for result in self._results:
            if not result.done():
                result.set_exception(RoundFailed("the round has failed"))
                result.exception()  # it is known: nobody need complain that it was never looked at
        for parts in self._parts:
            parts.clear()

    async def _make(self, index: int) -> None:
        parts = self._parts[index]
        ordered = [parts[member] for member in range(len(self._weights))]
        parts.clear()

        def make() -> tuple[Any, Tensor]:
            return self._encode(index, weighted_sum(ordered, self._weights, self._divisor))

        result = self._results[index]
        try:
            made = await asyncio.get_running_loop().run_in_executor(None, make)
        except Exception as error:  # whoever waits for this sum hears it
            if not result.done():
                result.set_exception(error)
            return
        if not result.done():
            result.set_result(made)
