"""The simulator's network: messages that queue for a connection and share uplinks, downlinks and half-duplex links.

A connection carries one message at a time, in order. Connections that meet at a resource which cannot serve all of them at
their own rates share it as water fills a vessel: nobody gets more than it can use, the rest is split evenly. A connection
whose resources always suffice is computed at once, without events for its changes of rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from atoll.coordinator.planning.pipeline import Transfer


@dataclass(slots=True, eq=False)
class Resource:
    """A capacity in bytes a second that several connections share; ``exclusive`` serves one message at a time."""

    capacity: float
    exclusive: bool = False
    users: list[Connection] = field(default_factory=list)
    occupied: bool = False

    @property
    def scarce(self) -> bool:
        """Whether its users could want more than there is."""
        return self.exclusive or sum(user.transfer.bytes_per_second for user in self.users) > self.capacity * (1 + 1e-9)

    def share(self, wanted: Connection) -> float:
        """The rate of ``wanted``, one of the active users."""
        remaining = self.capacity
        active = sorted(user.transfer.bytes_per_second for user in self.users if user.active)
        own = wanted.transfer.bytes_per_second
        for index, cap in enumerate(active):
            fair = remaining / (len(active) - index)
            if cap > fair or cap == own:
                return min(own, fair)
            remaining -= cap
        return own


@dataclass(slots=True, eq=False)
class Connection:
    """One direction between two stages. ``urgent`` messages go first where one at a time is served."""

    index: int
    transfer: Transfer
    urgent: bool
    scarce: list[Resource] = field(default_factory=list)
    queue: deque[tuple[int, float]] = field(default_factory=deque)
    active: bool = False
    remaining: float = 0.0
    rate: float = 0.0
    since: float = 0.0
    started: float = 0.0
    version: int = 0
    free_at: float = 0.0
    encoder_free_at: float = 0.0
    decoder_free_at: float = 0.0
    last_arrival: float = 0.0
    busy_seconds: float = 0.0


Schedule = Callable[[float, Connection, int, bool], None]
"""``schedule(when, connection, number, arrived)``: ``number`` is a microbatch when it arrived, a version when it was sent."""
Stretch = Callable[[Connection, int], float]
Record = Callable[[Connection, int, float, float], None]


class Wires:
    """All connections of a pipeline. The owner calls ``send``, and ``sent`` when the time it was told of has come."""

    def __init__(self, schedule: Schedule, stretch: Stretch | None, record: Record | None) -> None:
        self._schedule = schedule
        self._stretch = stretch
        self._record = record

    @staticmethod
    def settle(resources: Iterable[Resource]) -> None:
        """Note at each connection which of its resources can ever be short."""
        for resource in resources:
            if resource.scarce:
                for user in resource.users:
                    user.scarce.append(resource)

    def send(self, connection: Connection, microbatch: int, now: float) -> None:
        """Hand over a message at ``now``."""
        transfer = connection.transfer
        ready = now
        if transfer.encode_seconds:
            ready = connection.encoder_free_at = max(now, connection.encoder_free_at) + transfer.encode_seconds
        if connection.scarce:
            connection.queue.append((microbatch, ready))
            if ready > now:
                self._schedule(ready, connection, -1, False)
            else:
                self._start_next(connection, now)
            return
        start = max(ready, connection.free_at)
        end = start + self._bytes(connection, microbatch) / transfer.bytes_per_second
        connection.free_at = end
        self._arrive(connection, microbatch, start, end)

    def sent(self, connection: Connection, version: int, now: float) -> None:
        """A time that was scheduled for ``connection`` has come; outdated ones change nothing."""
        if version == -1:
            self._start_next(connection, now)
        elif connection.active and version == connection.version:
            self._finish(connection, now)

    def _bytes(self, connection: Connection, microbatch: int) -> float:
        size = connection.transfer.num_bytes
        return size if self._stretch is None else size * self._stretch(connection, microbatch)

    def _arrive(self, connection: Connection, microbatch: int, start: float, end: float) -> None:
        transfer = connection.transfer
        arrival = end + transfer.latency_seconds
        if transfer.decode_seconds:
            arrival = connection.decoder_free_at = max(arrival, connection.decoder_free_at) + transfer.decode_seconds
        connection.last_arrival = arrival = max(arrival, connection.last_arrival)
        connection.busy_seconds += end - start
        if self._record is not None:
            self._record(connection, microbatch, start, end)
        self._schedule(arrival, connection, microbatch, True)

    def _start_next(self, connection: Connection, now: float) -> None:
        if connection.active or not connection.queue or connection.queue[0][1] > now:
            return
        exclusive = [resource for resource in connection.scarce if resource.exclusive]
        if any(resource.occupied for resource in exclusive):
            return
        for resource in exclusive:
            resource.occupied = True
        connection.active = True
        connection.started = connection.since = now
        connection.remaining = self._bytes(connection, connection.queue[0][0])
        connection.rate = 0.0
        if exclusive:
            wire = connection.remaining / connection.transfer.bytes_per_second
            connection.version += 1
            self._schedule(now + wire + connection.transfer.latency_seconds, connection, connection.version, False)
        else:
            self._share_anew(connection, now)

    def _finish(self, connection: Connection, now: float) -> None:
        microbatch, _ = connection.queue.popleft()
        connection.active = False
        exclusive = [resource for resource in connection.scarce if resource.exclusive]
        # An exclusive link was held until the message arrived, so its latency has passed.
        end = now - connection.transfer.latency_seconds if exclusive else now
        self._arrive(connection, microbatch, connection.started, end)
        for resource in exclusive:
            resource.occupied = False
            for user in sorted(resource.users, key=lambda user: not user.urgent):
                self._start_next(user, now)
        if not exclusive:
            self._share_anew(connection, now)
            self._start_next(connection, now)

    def _share_anew(self, changed: Connection, now: float) -> None:
        """New rates for all that share a resource with ``changed``."""
        affected = {user.index: user for resource in changed.scarce for user in resource.users if user.active}
        for index in sorted(affected):
            connection = affected[index]
            rate = min(resource.share(connection) for resource in connection.scarce)
            if rate == connection.rate:
                continue
            connection.remaining = max(0.0, connection.remaining - connection.rate * (now - connection.since))
            connection.rate, connection.since = rate, now
            connection.version += 1
            self._schedule(now + connection.remaining / rate, connection, connection.version, False)
