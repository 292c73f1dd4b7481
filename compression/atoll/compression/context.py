"""What both ends of a link know about a tensor without sending it, and so what random numbers can be made of.

A codec that draws numbers draws them from the seed of its context: a resend, a replay of the step and the receiver all draw the
same ones. An edge is named by the graph's value reference (or the parameter's name), never by stages or peers, so a new cut
elsewhere does not change what an edge draws.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

from atoll.protocol.ids import MicrobatchIndex, StepNumber
from atoll.protocol.messages import Kind, MessageKey


class Direction(StrEnum):
    """Gradients go backward, everything else forward."""

    FORWARD = "forward"
    BACKWARD = "backward"


def direction(kind: Kind) -> Direction:
    """The direction in which messages of this kind go."""
    return Direction.BACKWARD if kind in (Kind.GRADIENT, Kind.TIED_GRADIENT) else Direction.FORWARD


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecContext:
    """Which tensor is being encoded or decoded: ``edge`` is its name in the message. ``samples`` are those of its microbatch,
    where they are known."""

    edge: str
    direction: Direction = Direction.FORWARD
    run_seed: int = 0
    step: StepNumber = StepNumber(0)  # noqa: RUF009 - an int at run time
    microbatch: MicrobatchIndex = MicrobatchIndex(0)  # noqa: RUF009
    evaluation: bool = False
    samples: tuple[int, ...] = ()

    @property
    def seed(self) -> int:
        """64 bits that change with each of the fields but the samples, which follow from the step and the microbatch."""
        phase = "evaluation" if self.evaluation else "training"
        text = f"{self.run_seed}/{phase}/{self.step}/{self.microbatch}/{self.direction}/{self.edge}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def context_of(key: MessageKey, edge: str, run_seed: int, samples: tuple[int, ...] = ()) -> CodecContext:
    """The context of the tensor ``edge`` in the message ``key``."""
    return CodecContext(
        edge=edge,
        direction=direction(key.kind),
        run_seed=run_seed,
        step=key.step,
        microbatch=key.microbatch,
        evaluation=key.evaluation,
        samples=samples,
    )
