"""Averaging gradients as products of two thin matrices, with error feedback: PowerSGD's two rounds over any averager.

Sums do as well as means: what each replica brings is projected in the same way, and projections add up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from atoll.compression.lowrank import PowerSGD
from atoll.peer.averaging.averager import Averager, Round


class LowRankAverager:
    """Of one replica of a stage under one plan: all replicas begin anew together, for they must project onto the same
    directions. What it keeps of a step lasts with :meth:`commit` alone."""

    def __init__(self, averager: Averager, *, rank: int, seed: int = 0) -> None:
        self._averager = averager
        self._powers = PowerSGD(rank=rank, run_seed=seed)

    async def average(self, round: Round, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mean, or sum, of each gradient, the same bits on all members. Raises RoundFailed, and then it may be called
        again for the same step."""
        firsts = await self._means(round, "first", await asyncio.to_thread(self._first, gradients))
        seconds = await self._means(round, "second", await asyncio.to_thread(self._second, firsts))
        return await asyncio.to_thread(self._mean, gradients, seconds)

    def _first(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._powers.void()
        return {name: self._powers.first(name, gradient) for name, gradient in gradients.items()}

    def _second(self, means: Mapping[str, Tensor]) -> dict[str, Tensor]:
        factors = {name: self._powers.second(name, mean) for name, mean in means.items()}
        return {name: factor for name, factor in factors.items() if factor is not None}

    def _mean(self, gradients: Mapping[str, Tensor], means: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._powers.mean(name, means.get(name)) for name in gradients}

    def commit(self) -> None:
        """The step has happened."""
        self._powers.commit()

    async def _means(self, round: Round, phase: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        means = await self._averager.average(replace(round, key=f"{round.key}/{phase}"), list(tensors.values()))
        return dict(zip(tensors, means, strict=True))
