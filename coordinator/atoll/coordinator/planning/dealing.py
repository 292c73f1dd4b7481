"""How a step's microbatches are dealt to the replicas of a stage, as cards are. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


def deal(weights: Sequence[float], num_microbatches: int) -> tuple[int, ...]:
    """For each of ``num_microbatches`` the index of the replica that it goes to, of as many as there are ``weights``.

    Replicas are served in proportion to their weights (their speeds), and as evenly over the step as can be: with each
    microbatch everybody is owed its weight more, and whoever is owed most gets it and pays what was handed out; of equals, the
    first. So nobody is ever ahead of its share by a whole microbatch. This is the interleaved ("smooth") weighted round robin
    of nginx. Raises ValueError for weights that are no positive numbers.
    """
    if not weights or not all(math.isfinite(weight) and weight > 0.0 for weight in weights):
        raise ValueError(f"replicas are dealt microbatches by weights above 0, got {list(weights)}")
    exact = [Fraction(weight) for weight in weights]  # so that equals are equal after any number of turns
    owed = [Fraction(0)] * len(exact)
    dealt = []
    for _ in range(num_microbatches):
        owed = [before + weight for before, weight in zip(owed, exact, strict=True)]
        chosen = max(range(len(owed)), key=owed.__getitem__)
        owed[chosen] -= sum(exact)
        dealt.append(chosen)
    return tuple(dealt)


def deal_to_all(weights: Sequence[float], num_microbatches: int) -> tuple[int, ...]:
    """The same where everybody must have one, however slow: who would have none gets the last one of whoever has most. Raises
    ValueError for fewer microbatches than weights, too."""
    if num_microbatches < len(weights):
        raise ValueError(f"{num_microbatches} microbatches are too few for {len(weights)} replicas")
    dealt = list(deal(weights, num_microbatches))
    for lacking in range(len(weights)):
        if lacking not in dealt:
            richest = max(range(len(weights)), key=lambda index: (dealt.count(index), -index))
            dealt[num_microbatches - 1 - dealt[::-1].index(richest)] = lacking
    return tuple(dealt)
