"""Which samples a message is about, among the numbers that travel with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MOST_SAMPLES = 512
"""Of one message; a larger microbatch goes without, for the numbers of a message are bounded."""
_PREFIX = "sample:"


def sample_numbers(samples: Sequence[int]) -> dict[str, float]:
    """Numbers that name these samples, in their order in the microbatch; none where there are too many."""
    if len(samples) > MOST_SAMPLES:
        return {}
    return {f"{_PREFIX}{place}": float(sample) for place, sample in enumerate(samples)}


def samples_of(numbers: Mapping[str, float]) -> tuple[int, ...]:
    """The inverse; empty where no samples are named, or not all of them."""
    named = {name: number for name, number in numbers.items() if name.startswith(_PREFIX)}
    found = tuple(named.get(f"{_PREFIX}{place}", -1.0) for place in range(len(named)))
    return tuple(int(number) for number in found) if all(number >= 0 and number.is_integer() for number in found) else ()


def without_samples(numbers: Mapping[str, float]) -> dict[str, float]:
    """The other numbers."""
    return {name: number for name, number in numbers.items() if not name.startswith(_PREFIX)}
