"""Averaging gradients as products of two thin matrices, with error feedback: PowerSGD's two rounds over any averager.

Sums do as well as means: what each replica brings is projected in the same way, and projections add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from atoll.compression.lowrank import PowerSGD
from atoll.peer.averaging.averager import Averager, Round


class LowRankAverager:
    """Of one replica and stage. What it keeps of a step lasts with :meth:`commit` alone; a replica that is new in the
    group, or whose weights came from elsewhere, calls :meth:`reset`, and so do all others: they must project onto the same
    directions."""

    def __init__(self, averager: Averager, *, rank: int, seed: int = 0) -> None:
        self._averager = averager
        self._powers = PowerSGD(rank=rank, run_seed=seed)

    async def average(self, round: Round, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mean, or sum, of each gradient, the same bits on all members. Raises RoundFailed, and then it may be called
        again for the same step."""
        powers = self._powers
        powers.void()
        first = {name: powers.first(name, gradient) for name, gradient in gradients.items()}
        firsts = await self._means(round, "first", first)
        second = {name: factor for name, mean in firsts.items() if (factor := powers.second(name, mean)) is not None}
        seconds = await self._means(round, "second", second)
        return {name: powers.mean(name, seconds.get(name)) for name in gradients}

    def commit(self) -> None:
        """The step has happened."""
        self._powers.commit()

    def void(self) -> None:
        """It has not."""
        self._powers.void()

    def reset(self) -> None:
        """Forgets errors and directions."""
        self._powers.reset()

    async def _means(self, round: Round, phase: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        means = await self._averager.average(replace(round, key=f"{round.key}/{phase}"), list(tensors.values()))
        return dict(zip(tensors, means, strict=True))
