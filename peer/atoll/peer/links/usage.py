"""What each link has carried since the peer started, for the reports to the coordinator."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from atoll.compression.context import Direction, direction
from atoll.peer.links.traffic import LinkTraffic
from atoll.protocol.courtesy import Courtesy
from atoll.protocol.ids import PeerId
from atoll.protocol.messages import EncodedMessage, Kind, Message, MessageKey
from atoll.protocol.v1 import session_pb2

KEPT = 0.8
"""What of the earlier samples remains when another one comes: that makes means of about nine."""


@dataclass(slots=True)
class Usage:
    """``seconds_busy`` is how long something was under way that the target had not acknowledged; ``relative_error`` is the last
    measured. ``raw_bytes`` is what the messages that may lose bits would take raw. ``slope``, ``curvature`` and ``bias`` are
    means over ``num_guarded`` samples through the present codec (``loss_guard`` says of what)."""

    codec: str
    num_bytes: int = 0
    seconds_busy: float = 0.0
    relative_error: float = 0.0
    num_messages: int = 0
    raw_bytes: int = 0
    num_guarded: int = 0
    slope: float = 0.0
    curvature: float = 0.0
    bias: float = 0.0
    under_way: set[MessageKey] = field(default_factory=set)
    busy_since: float = 0.0

    def encoded(self, codec: str, message: Message) -> None:
        """A message that may lose bits is to be sent. Whatever was seen of another codec is forgotten."""
        if codec != self.codec:
            self.codec, self.relative_error, self.num_guarded = codec, 0.0, 0
            self.slope = self.curvature = self.bias = 0.0
        self.num_messages += 1
        self.raw_bytes += sum(tensor.numel() * tensor.dtype.itemsize for _, tensor in message.tensors)

    def guard(self, *, slope: float = 0.0, curvature: float = 0.0, bias: float = 0.0) -> None:
        """Takes in a sample."""
        old = KEPT if self.num_guarded else 0.0
        self.num_guarded += 1
        self.slope = old * self.slope + (1.0 - old) * slope
        self.curvature = old * self.curvature + (1.0 - old) * curvature
        self.bias = old * self.bias + (1.0 - old) * bias

    def began(self, key: MessageKey, now: float) -> None:
        """A message is under way."""
        if not self.under_way:
            self.busy_since = now
        self.under_way.add(key)

    def settled(self, key: MessageKey, now: float) -> None:
        """It is no more."""
        if key in self.under_way:
            self.under_way.remove(key)
            self.seconds_busy += now - self.busy_since
            self.busy_since = now


@dataclass(slots=True)
class Reception:
    """What has come from a neighbour; ``seconds`` is for how long a message of its was here in part."""

    num_bytes: int = 0
    seconds: float = 0.0
    since: float | None = None

    def heard(self, num_bytes: int, now: float, *, unfinished: bool) -> None:
        """Something more is here; ``unfinished``: of a message whose rest is yet to come."""
        self.num_bytes += num_bytes
        if self.since is not None:
            self.seconds += now - self.since
        self.since = now if unfinished else None

    def broke(self) -> None:
        """What was here in part is no more."""
        self.since = None


class UsageTable:
    """One :class:`Usage` a target and direction, one :class:`LinkTraffic` a target and one :class:`Reception` a source.
    ``courtesy`` hears of the first two."""

    def __init__(self, own: PeerId, courtesy: Courtesy) -> None:
        self._own = own
        self._courtesy = courtesy
        self._table: dict[tuple[PeerId, Direction], Usage] = {}
        self._traffic: defaultdict[PeerId, LinkTraffic] = defaultdict(LinkTraffic)
        self._receptions: defaultdict[PeerId, Reception] = defaultdict(Reception)

    def of(self, target: PeerId, kind: Kind) -> Usage:
        """The entry to add to."""
        key = (target, direction(kind))
        if key not in self._table:
            self._table[key] = Usage(codec="raw")
        return self._table[key]

    def traffic(self, target: PeerId) -> LinkTraffic:
        """What the link to ``target`` has shown."""
        return self._traffic[target]

    def reception(self, source: PeerId) -> Reception:
        """What has come from ``source``."""
        return self._receptions[source]

    def began(self, target: PeerId, message: EncodedMessage, now: float) -> None:
        """A message is being sent and will be settled; said again with each of its frames."""
        self.of(target, message.key.kind).began(message.key, now)
        self._traffic[target].began(message.key, message.num_bytes, now)
        self._tell()

    def settled(self, target: PeerId, key: MessageKey, now: float, *, arrived: bool) -> None:
        """The target has a message, or will not have it."""
        self.of(target, key.kind).settled(key, now)
        if arrived:
            self._traffic[target].acknowledged(key, now)
        else:
            self._traffic[target].dropped(key, now)
        self._tell()

    def _tell(self) -> None:
        shown = [traffic.bytes_per_second for traffic in self._traffic.values()]
        self._courtesy.tell(
            under_way=any(usage.under_way for usage in self._table.values()),
            line_bytes_per_second=max((rate for rate in shown if rate is not None), default=None),
        )

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
                bytes_per_second=self._traffic[target].bytes_per_second or 0.0,
                round_trip_seconds=self._traffic[target].round_trip_seconds or 0.0,
                messages=usage.num_messages,
                raw_bytes=usage.raw_bytes,
                guarded=usage.num_guarded,
                slope=usage.slope,
                curvature=usage.curvature,
                bias=usage.bias,
            )
            for (target, way), usage in sorted(self._table.items())
        )
