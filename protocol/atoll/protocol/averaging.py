"""How the replicas of a stage sum their gradients, as a job says it and peers are told it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

PLAIN = "none"
CODECS = ("fp16", "int8")
_LOW_RANK = "powersgd-"
MOST_RANK = 1024


class Transport(StrEnum):
    """What carries the values: our own links, or hivemind's connections."""

    LINKS = "links"
    HIVEMIND = "hivemind"


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """``compression`` is PLAIN, one of CODECS, or ``powersgd-RANK``. ``bandwidths`` are of each replica, in bytes a second, in
    the slower direction; None where nobody knows, and empty where nothing is known. Raises ValueError for what there is not."""

    transport: Transport = Transport.LINKS
    compression: str = PLAIN
    bandwidths: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        rank_of(self.compression)
        if self.compression in CODECS and self.transport is not Transport.HIVEMIND:
            raise ValueError(f"{self.compression} needs the transport {Transport.HIVEMIND}")
        if not all(value is None or (math.isfinite(value) and value > 0.0) for value in self.bandwidths):
            raise ValueError(f"bandwidths must be above 0, got {list(self.bandwidths)}")

    @property
    def codec(self) -> str:
        """Of the values on their way."""
        return self.compression if self.compression in CODECS else "raw"

    @property
    def rank(self) -> int | None:
        """Of the thin matrices that gradients are sent as; None where they are sent as they are."""
        return rank_of(self.compression)


def rank_of(compression: str) -> int | None:
    """The rank of ``powersgd-RANK``, None for another compression; raises ValueError for what there is not."""
    if compression in (PLAIN, *CODECS):
        return None
    rank = compression.removeprefix(_LOW_RANK)
    if rank == compression or not (rank.isascii() and rank.isdecimal() and 1 <= int(rank) <= MOST_RANK):
        raise ValueError(f"{compression!r} is none of {PLAIN}, {', '.join(CODECS)} and {_LOW_RANK}RANK, for example powersgd-4")
    return int(rank)
