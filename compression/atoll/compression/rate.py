"""How coarse a uniform quantiser must be for its symbols to take a given number of bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_FINEST = 2.0**-8  # of the root mean square: what is constant, say, takes no bits however fine the steps
_SLACK = 1.25  # how much coarser than normal numbers need, which need the coarsest of all; the rest is the coder's overhead
_LARGEST_CHANGE = 2.0


class StepControl:
    """Finds the step, as a fraction of the tensor's root mean square, from what the message before took: the one that takes so
    many bits, or a finer one where that would lose more than ``most_error``, a relative squared error."""

    def __init__(self, bits: float, *, dithered: bool, most_error: float = math.inf) -> None:
        self._bits = bits
        self._most_error = most_error
        self._coarsest = _SLACK * _bisected(lambda step: _entropy_of_normal(step, dithered), bits)
        self.step: float | None = None

    def begin(self, variances: Tensor) -> float:
        """A step for components of these variances, whose mean is 1."""
        self.step = self._within(_step_of_normal(variances, self._bits))
        return self.step

    def learn(self, bits: float, error: float) -> None:
        """Moves the step by what a tensor took with it, and lost. A bit more or less is a factor of two, or less than that
        where many components are below the step."""
        assert self.step is not None
        self.step = self._within(self.step * min(_LARGEST_CHANGE, max(1.0 / _LARGEST_CHANGE, self._change(bits, error))))

    def misses(self, bits: float, error: float, tolerance: float) -> bool:
        """Whether so many bits and such an error are off what was asked for by more than this fraction, and another step could
        do better."""
        assert self.step is not None
        if error > (1 + tolerance) * self._most_error:
            return self.step > _FINEST
        if bits > (1 + tolerance) * self._bits:
            return error < (1 - tolerance) * self._most_error and self.step < self._coarsest
        return bits < (1 - tolerance) * self._bits and self.step > _FINEST

    def _change(self, bits: float, error: float) -> float:
        """Factor of the step: what the bits ask for, or a finer one where the error does."""
        by_bits: float = 2.0 ** (bits - self._bits)
        return by_bits if error == 0.0 else min(by_bits, math.sqrt(self._most_error / error))

    def _within(self, step: float) -> float:
        return min(self._coarsest, max(_FINEST, step))


def _step_of_normal(variances: Tensor, bits: float) -> float:
    """About the step with which normal components of these variances take ``bits`` each in the mean."""
    variances = variances.double() * 2 * math.pi * math.e
    return _bisected(lambda step: float((1.0 + variances / step**2).log2().mean()) / 2, bits)


def _entropy_of_normal(step: float, dithered: bool) -> float:
    """Of the symbols of normal numbers of variance 1, in bits."""
    points = torch.linspace(-8.0, 8.0, 4001, dtype=torch.float64)
    weights = torch.exp(-points.square() / 2)
    symbols = torch.arange(-math.ceil(8.0 / step) - 1.0, math.ceil(8.0 / step) + 2.0, dtype=torch.float64)
    distances = (points / step - symbols.unsqueeze(1)).abs()
    shares = (1.0 - distances).clamp(min=0.0) if dithered else (distances < 0.5).double()
    probabilities = (shares @ weights) / weights.sum()
    return float(torch.special.entr(probabilities).sum()) / math.log(2)


def _bisected(bits_of: Callable[[float], float], bits: float) -> float:
    """The step with which ``bits_of`` it, which falls with the step, is ``bits``."""
    low, high = -4.0, 10.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if bits_of(2.0**middle) > bits else (low, middle)
    return float(2.0**high)
