"""What it is to average among replicas: a round, who is in it, and what all of its members get.

The coordinator's plan names a group and its order. In a *round* each member brings tensors of the same shapes, and each
gets ``(w0 x0 + w1 x1 + ...) / divisor``, added in the group's order, whatever order they arrive in: the same bits on every
member, and the same bits when the round is run again. Codecs are in that: a member's own values go through the codec like
the others', and the sums that members own go through it once, for all.

Nothing that is brought is changed, so a round that failed can be run again with other members; what becomes of the lost
member's contribution is for the caller to know.

Values travel as fp32, cut into parts, of which each member owns a share by its bandwidth (:mod:`atoll.peer.averaging.shares`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from atoll.protocol.errors import RoundFailed
from atoll.protocol.ids import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One of a round. ``address`` is what its :attr:`Averager.address` says; ``bandwidth`` of the slower direction of its link
    is in bytes a second, None where nobody has measured it."""

    peer: PeerId
    address: str = ""
    weight: float = 1.0
    bandwidth: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What all members know of a round, the same on each but for ``own``, its place among them. No two rounds of a run have the
    same ``key``. One from whom something is due for ``deadline_seconds``, in which nothing came, fails it. Codecs that draw
    numbers draw them from ``seed`` and ``step``."""

    key: str
    members: tuple[Member, ...]
    own: int
    codec: str = "raw"
    divisor: float = 1.0
    deadline_seconds: float = 60.0
    seed: int = 0
    step: int = 0

    def failure(self, reason: str, suspects: Sequence[int] = ()) -> RoundFailed:
        """That this round failed, and whose fault that seems to be, by their places."""
        names = tuple(self.members[suspect].peer for suspect in suspects)
        whose = f" ({', '.join(names)})" if names else ""
        return RoundFailed(f"averaging {self.key} failed{whose}: {reason}", names)


class Averager(Protocol):
    """Of one process; rounds may overlap."""

    @property
    def address(self) -> str:
        """What the other members must know to reach this one; empty where they know it already."""
        ...

    async def average(self, round: Round, tensors: Sequence[Tensor]) -> list[Tensor]:
        """New tensors, each with the dtype of the one that was brought, on the CPU. Raises RoundFailed."""
        ...

    async def close(self) -> None:
        """Ends what it has started. Rounds in progress fail, here and at the other members."""
        ...


def weighted_sum(parts: Sequence[Tensor], weights: Sequence[float], divisor: float = 1.0) -> Tensor:
    """``(w0 x0 + w1 x1 + ...) / divisor`` in fp32, each operation rounded by itself, so that a value's bits do not depend
    on where in a tensor it stands."""
    total = parts[0].float() * weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total += part.float() * weight
    return total if divisor == 1.0 else total.div_(divisor)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All values behind one another, in fp32 on the CPU: a copy."""
    if not tensors:
        return torch.empty(0)
    return torch.cat([tensor.detach().reshape(-1).to("cpu", torch.float32) for tensor in tensors])


def unflat(values: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of :func:`flat`, in the dtypes of ``like``; fp32 ones are views of ``values``."""
    pieces = torch.split(values, [tensor.numel() for tensor in like])
    return [piece.reshape(tensor.shape).to(tensor.dtype) for piece, tensor in zip(pieces, like, strict=True)]
