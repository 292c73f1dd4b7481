"""What the kinds of work of a stage take, as measured beforehand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSeconds:
    """For one microbatch. ``backward`` lasts until the gradients of what was received are there, ``accumulate`` makes those of
    the weights after that. ``update`` is once a step: finishing the gradients, and the optimizer."""

    forward: float = 0.0
    backward: float = 0.0
    accumulate: float = 0.0
    update: float = 0.0
