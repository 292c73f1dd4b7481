"""A step over slow links, worked out and not waited for: the planner's simulator, with a processor for each stage.

Every stage computes as long as every other, and all links carry the same bits a second each way, without delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.coordinator.planning.pipeline import Link, Pipeline, StageTimes, Transfer
from atoll.coordinator.planning.simulator import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossed:
    """A microbatch's message over a link, one way: encoding and decoding take ``coding_seconds`` together."""

    num_bytes: float
    coding_seconds: float


def step_seconds(
    *, stage_seconds: float, microbatches: int, links: Sequence[tuple[Crossed, Crossed]], bits_per_second: float
) -> float:
    """``stage_seconds`` is a stage's for a microbatch, forward and back; ``links`` are what crosses each there and back."""
    third = stage_seconds / 3.0
    stages = tuple(
        StageTimes(
            forward_seconds=third,
            backward_seconds=third if stage else 2.0 * third,
            accumulate_seconds=third if stage else 0.0,
            in_flight=microbatches,
        )
        for stage in range(len(links) + 1)
    )
    transfers = [
        Link(forward=_transfer(there, bits_per_second), backward=_transfer(back, bits_per_second)) for there, back in links
    ]
    return simulate(Pipeline(stages=stages, links=tuple(transfers), num_microbatches=microbatches)).step_seconds


def _transfer(crossed: Crossed, bits_per_second: float) -> Transfer:
    half = crossed.coding_seconds / 2.0
    return Transfer(
        num_bytes=crossed.num_bytes, bytes_per_second=bits_per_second / 8.0, encode_seconds=half, decode_seconds=half
    )
