"""Gradients of replicas as products of two thin matrices, with what is lost made up for later: PowerSGD (Vogels et al., 2019).

All replicas of a stage average their gradients. A matrix M, with the error E of earlier steps on top, is averaged in two
rounds: ``P = (M + E) Q``, averaged and made orthogonal, and ``Q' = (M + E)^T P``, averaged. The mean gradient is then
``P Q'^T``, and Q' is where the next step begins, so that over the steps Q turns to the strongest directions. Each replica keeps
as its error what its own part of that product lacks, so errors stay bounded and a replica that leaves takes no more with it.

Errors are added to later gradients of the *same weights*, which change slowly; that is why it converges. Activations of other
samples do not, so this is no codec for the links between stages.

A step is a transaction: errors and bases change with :meth:`PowerSGD.commit` alone, and a void step leaves them as they were.
All replicas must be given the same averages, bit for bit; decompositions may still differ in the last bits between kinds of
processors.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """Of one parameter between steps: the right factor, and this replica's error, as a matrix."""

    right: Tensor
    error: Tensor


@dataclass(slots=True, eq=False)
class _Round:
    """Of one parameter within a step."""

    shape: torch.Size
    dtype: torch.dtype
    wanted: Tensor | None = None  # None: it is averaged as it is
    left: Tensor | None = None
    right: Tensor | None = None


class PowerSGD:
    """One replica's end. For each parameter of a step, in any order: average what :meth:`first` returns, give the mean to
    :meth:`second` and average what that returns, if anything; :meth:`mean` has the mean gradient. Then commit or void the step.

    Vectors, and matrices that two factors of this rank would not make shorter, are averaged as they are.
    """

    name = "powersgd"

    def __init__(self, *, rank: int, run_seed: int = 0) -> None:
        self._rank = rank
        self._run_seed = run_seed
        self._states: dict[str, _State] = {}
        self._rounds: dict[str, _Round] = {}
        self._pending: dict[str, _State] = {}

    def first(self, name: str, gradient: Tensor) -> Tensor:
        """What to average at first."""
        current = self._rounds[name] = _Round(gradient.shape, gradient.dtype)
        if not self._shortens(gradient.shape):
            return gradient.detach()
        matrix = gradient.detach().reshape(len(gradient), -1).float()
        state = self._states.get(name)
        current.wanted = matrix if state is None else matrix + state.error.to(matrix.device)
        right = self._first_right(name, matrix.shape[1]) if state is None else state.right
        return current.wanted @ right.to(matrix.device)

    def second(self, name: str, mean: Tensor) -> Tensor | None:
        """What to average next, given the mean of the first; None where that was all."""
        current = self._rounds[name]
        current.left = mean
        if current.wanted is None:
            return None
        current.left = torch.linalg.qr(mean)[0]
        current.right = current.wanted.t() @ current.left
        return current.right

    def mean(self, name: str, mean: Tensor | None) -> Tensor:
        """The mean gradient, given the mean of the second."""
        current = self._rounds.pop(name)
        assert current.left is not None, f"{name} has not been through its first round"
        if current.wanted is None:
            return current.left
        assert mean is not None
        assert current.right is not None
        self._pending[name] = _State(mean, current.wanted - current.left @ current.right.t())
        return (current.left @ mean.t()).to(current.dtype).reshape(current.shape)

    def commit(self) -> None:
        """The step has happened."""
        self._states |= self._pending
        self.void()

    def void(self) -> None:
        """The step has not happened."""
        self._pending = {}
        self._rounds = {}

    def reset(self) -> None:
        """Forgets all: these parameters' replicas are others now, or their weights came from elsewhere."""
        self.void()
        self._states = {}

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """What a replica sends of a gradient in both rounds, in fp32; in one of its own type where it is averaged as it is."""
        size = torch.Size(shape)
        if not self._shortens(size):
            return size.numel() * dtype.itemsize
        rows, columns = size[0], size.numel() // size[0]
        return torch.float32.itemsize * self._rank_of(size) * (rows + columns)

    def _rank_of(self, shape: torch.Size) -> int:
        return min(self._rank, shape[0], shape.numel() // shape[0])

    def _shortens(self, shape: torch.Size) -> bool:
        if len(shape) < 2 or not shape.numel():
            return False
        rows, columns = shape[0], shape.numel() // shape[0]
        return self._rank_of(shape) * (rows + columns) < rows * columns

    def _first_right(self, name: str, columns: int) -> Tensor:
        """The same on all replicas."""
        digest = hashlib.blake2b(f"{self._run_seed}/{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        return torch.randn(columns, self._rank, generator=generator)
