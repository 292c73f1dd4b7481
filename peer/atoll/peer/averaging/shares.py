"""How large a part of the sum each replica makes.

In a butterfly all-reduce each of n replicas owns a share of the values: it receives the others' values of its share, adds
them, and sends each the sum. One with the share s sends V (1 - s) values to the owners of other shares and V s (n - 1) sums
to the others: V (1 + (n - 2) s) in all, and receives as many. So the time is the largest (1 + (n - 2) s) / bandwidth, and
the shares are to make that the least: hivemind's load balancing. It solves a linear programme, whose solution among equally
good ones, and last bits, depend on the solver; every replica must find the same shares, so they are computed here by
filling up, in plain arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence


def shares(bandwidths: Sequence[float | None]) -> tuple[float, ...]:
    """The part of the values that each replica owns, which add up to 1, for the least time by the slower direction of
    everyone's link.

    ``bandwidths`` are in any unit; None is taken for the mean of those that are known.
    """
    known = [value for value in bandwidths if value is not None]
    mean = sum(known) / len(known) if known else 1.0
    filled = [mean if value is None else value for value in bandwidths]
    assert all(value > 0 for value in filled), f"bandwidths must be positive: {bandwidths}"
    if len(filled) <= 2:  # the times do not depend on the shares
        return tuple(1.0 / len(filled) for _ in filled)
    return _filled_up(filled)


def _filled_up(bandwidths: Sequence[float]) -> tuple[float, ...]:
    """Those of at least three replicas.

    All that own something finish at one time t: s = (t b - 1) / (n - 2). The slowest own nothing if their s would be
    negative: then they take 1 / b for their own values alone, and the others need not be sooner than that, so they share in
    proportion to bandwidth.
    """
    count = len(bandwidths)
    owners = sorted(range(count), key=lambda index: bandwidths[index])
    while True:
        total = sum(bandwidths[index] for index in owners)
        time = (count - 2 + len(owners)) / total
        if time * bandwidths[owners[0]] >= 1.0:
            break
        owners.pop(0)
    raw = [(time * bandwidths[index] - 1.0) / (count - 2) if index in owners else 0.0 for index in range(count)]
    return tuple(value / sum(raw) for value in raw)
