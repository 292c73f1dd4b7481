"""Where the gradients of a stage's parameters lie: in memory that is kept from step to step."""

from __future__ import annotations

import weakref

import torch

from atoll.peer.stage.lasting import lasting_zeros_like


class GradientHome:
    """Called when a gradient is about to be added to a leaf: a step's first one is added to memory that is kept for it.

    That memory then holds negative zeros, which leave every number as it is, its sign included. Without it autograd would keep
    the first gradient itself, or a copy of one that lies in memory in another order, among what comes and goes.
    """

    def __init__(self, leaf: torch.Tensor) -> None:
        self._leaf = weakref.ref(leaf)
        self._home = lasting_zeros_like(leaf)

    def __call__(self, gradient: torch.Tensor) -> None:
        leaf = self._leaf()
        if leaf is not None and leaf.grad is None:
            leaf.grad = self._home.fill_(-0.0)
