"""What each link has carried since the peer started, for the reports to the coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.compression.context import Direction, direction
from atoll.protocol.ids import PeerId
from atoll.protocol.messages import Kind
from atoll.protocol.v1 import session_pb2


@dataclass(slots=True)
class Usage:
    """``seconds_busy`` is how long the transport took to accept what was written; ``relative_error`` is the last measured."""

    codec: str
    num_bytes: int = 0
    seconds_busy: float = 0.0
    relative_error: float = 0.0
    num_encoded: int = 0


class UsageTable:
    """One :class:`Usage` a target and direction."""

    def __init__(self, own: PeerId) -> None:
        self._own = own
        self._table: dict[tuple[PeerId, Direction], Usage] = {}

    def of(self, target: PeerId, kind: Kind) -> Usage:
        """The entry to add to."""
        key = (target, direction(kind))
        if key not in self._table:
            self._table[key] = Usage(codec="raw")
        return self._table[key]

    def report(self) -> tuple[session_pb2.LinkUse, ...]:
        """Every entry, as stage reports carry them."""
        return tuple(
            session_pb2.LinkUse(
                source=self._own,
                target=target,
                direction=way,
                codec=usage.codec,
                bytes=usage.num_bytes,
                seconds_busy=usage.seconds_busy,
                relative_error=usage.relative_error,
            )
            for (target, way), usage in sorted(self._table.items())
        )
