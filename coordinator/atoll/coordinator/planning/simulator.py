"""What a step of a pipeline takes, event by event. Pure: the same pipeline and disturbances give the same answer.

Theory of operation. A step begins with the coordinator's word, which commits the step before and starts this one: each stage
updates its weights as soon as it has heard, and then computes. It computes one work at a time, chosen as the peers choose it:
backward before forward before accumulate (before forward where many are put off), each in the order of the microbatches, at
most ``in_flight`` begun and not accumulated. A finished forward sends to the next stage, a finished backward to the one before;
sending goes on beside computing. Stages that share processors slow one another down while they compute at the same time.
Events at the same instant are all taken in before any stage chooses, so that rounding never decides the order of work. A stage
that has its gradients, those of shared parameters included, works out their norms and reports; the step ends when the
coordinator has all reports and has written them down. Steps follow one another at exactly this distance.

Replicas of a stage take the microbatches that they are dealt, each in order. A replica that is through with its own sends the
parts of its gradients to the replicas that own them, while others still compute; an owner that has all parts sends their sum.
Whoever has all sums has the stage's gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from atoll.coordinator.planning.disturbances import Disturbances, Jitter, Outage
from atoll.coordinator.planning.pipeline import Activity, Duplex, Pipeline, Simulation, StageTimes, Transfer, WorkKind
from atoll.coordinator.planning.processors import Processors
from atoll.coordinator.planning.wires import Connection, Resource, Wires
from atoll.protocol.assignment import MOST_DEFERRED

_INSTANT = 1e-11
_FORWARD, _BACKWARD, _ACCUMULATE, _UPDATE, _FINISH, _SENT, _ARRIVED, _TOLD, _PROCESSED = range(9)
_PART, _SUM = range(2)
_KINDS = (WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.ACCUMULATE, WorkKind.UPDATE, WorkKind.FINISH)


def simulate(
    pipeline: Pipeline, *, jitter: Jitter | None = None, outages: Iterable[Outage] = (), record: bool = False
) -> Simulation:
    """Run one step. ``record`` keeps every activity, for a picture."""
    return _Run(pipeline, Disturbances(pipeline, jitter, tuple(outages)), record).run()


@dataclass(slots=True)
class _Seat:
    """``mine`` are its microbatches in order; ``onward`` and ``homeward`` the connection for each microbatch's messages.
    ``activations`` and ``gradients`` tell what has arrived, by microbatch."""

    times: StageTimes
    durations: tuple[float, float, float, float, float]
    stage: int
    mine: Sequence[int]
    activations: bytearray
    gradients: bytearray
    onward: Sequence[int] = ()
    homeward: Sequence[int] = ()
    forwards: int = 0
    backwards: int = 0
    accumulated: int = 0
    parts: int = 0
    sums: int = 0
    gathered: bool = False
    busy: bool = True
    doing: tuple[int, int] = (0, 0)
    began: float = 0.0
    peak: int = 0
    awaited: int = 0
    computed: float = 0.0
    busy_seconds: float = 0.0
    reported: float = math.inf


class _Run:
    def __init__(self, pipeline: Pipeline, disturbances: Disturbances, record: bool) -> None:
        self._pipeline = pipeline
        self._num_microbatches = pipeline.num_microbatches
        self._events: list[tuple[float, int, int, int, int]] = []
        self._sequence = 0
        self._touched: list[int] = []
        self._disturbances = disturbances
        self._record = record
        self._activities: list[Activity] = []
        self._seats = _seats(pipeline)
        self._processors = Processors(pipeline.stages, self._schedule_processed)
        sums = sums_of(pipeline)
        self._sum_ends = [(source, target) for source, target, _ in sums]
        self._first_sum = 2 * len(pipeline.links) + len(pipeline.exchanges)
        self._sums_of: list[list[int]] = [[] for _ in pipeline.stages]
        for number, (source, _) in enumerate(self._sum_ends):
            self._sums_of[source].append(self._first_sum + number)
        self._complete_at = [0.0] * len(pipeline.seats)
        self._averaging = [0.0] * len(pipeline.seats)
        for exchange in pipeline.exchanges:
            self._seats[exchange.target].awaited += 1
        stretch = None if disturbances.calm_network else self._stretch
        self._wires = Wires(self._schedule_wire, stretch, self._record_transfer if record else None)
        self._connections = _connect(pipeline, sums)

    def run(self) -> Simulation:
        for index, stage in enumerate(self._seats):
            self._schedule(stage.times.coordinator_seconds, index, 0, _TOLD)
        events = self._events
        while events:
            now = events[0][0]
            horizon = now + _INSTANT * (1.0 + now)
            while events and events[0][0] <= horizon:
                when, _, subject, detail, kind = heappop(events)
                self._handle(when, subject, detail, kind)
            self._now = now
            self._dispatch()
        return self._summary()

    _now = 0.0

    def _schedule(self, when: float, subject: int, detail: int, kind: int) -> None:
        self._sequence += 1
        heappush(self._events, (when, self._sequence, subject, detail, kind))

    def _schedule_wire(self, when: float, connection: Connection, number: int, arrived: bool) -> None:
        self._schedule(when, connection.index, number, _ARRIVED if arrived else _SENT)

    def _schedule_processed(self, when: float, stage: int, version: int) -> None:
        self._schedule(when, stage, version, _PROCESSED)

    def _handle(self, now: float, subject: int, detail: int, kind: int) -> None:
        if kind <= _FINISH:
            self._finished_work(subject, kind, now)
        elif kind == _ARRIVED:
            self._arrived(subject, detail, now)
        elif kind == _SENT:
            self._wires.sent(self._connections[subject], detail, now)
        elif kind == _PROCESSED:
            if self._processors.ended(subject, detail, now):
                self._finished_work(subject, self._seats[subject].doing[0], now)
        else:
            self._begin(subject, self._seats[subject], _UPDATE, 0, now)

    def _arrived(self, index: int, number: int, now: float) -> None:
        num_links = len(self._pipeline.links)
        if index < num_links:
            target = self._pipeline.ends[index][1]
            self._seats[target].activations[number] = 1
            self._touched.append(target)
        elif index < 2 * num_links:
            target = self._pipeline.ends[index - num_links][0]
            self._seats[target].gradients[number] = 1
            self._touched.append(target)
        elif index < self._first_sum:
            target = self._pipeline.exchanges[index - 2 * num_links].target
            self._seats[target].awaited -= 1
            self._finish(target, now)
        else:
            target = self._sum_ends[index - self._first_sum][1]
            if number == _PART:
                self._seats[target].parts += 1
                self._add_up(target, now)
            else:
                self._seats[target].sums += 1
                self._gather(target, now)

    def _finished_work(self, index: int, kind: int, now: float) -> None:
        seat = self._seats[index]
        seat.busy = False
        self._touched.append(index)
        if self._record and now > seat.began:
            self._record_work(index, kind, now)
        if kind != _UPDATE:
            seat.busy_seconds += now - seat.began
        microbatch = seat.doing[1]
        if kind == _FORWARD:
            seat.forwards += 1
            if seat.onward:
                self._wires.send(self._connections[seat.onward[microbatch]], microbatch, now)
            else:
                seat.gradients[microbatch] = 1
        elif kind == _BACKWARD:
            seat.backwards += 1
            if seat.homeward:
                self._wires.send(self._connections[seat.homeward[microbatch]], microbatch, now)
            if seat.durations[_ACCUMULATE] == 0.0:
                self._accumulated(index, now)
        elif kind == _ACCUMULATE:
            self._accumulated(index, now)
        elif kind == _FINISH:
            seat.reported = now + seat.times.coordinator_seconds

    def _accumulated(self, index: int, now: float) -> None:
        """A microbatch is through; after the seat's last one its gradients go to the other replicas."""
        seat = self._seats[index]
        seat.accumulated += 1
        if seat.accumulated == len(seat.mine):
            self._complete_at[seat.stage] = max(self._complete_at[seat.stage], now)
            for connection in self._sums_of[index]:
                self._wires.send(self._connections[connection], _PART, now)
            self._add_up(index, now)

    def _add_up(self, index: int, now: float) -> None:
        """If a replica has all parts of the gradients that it owns, its own among them, everybody gets their sum."""
        seat, others = self._seats[index], self._sums_of[index]
        if seat.accumulated == len(seat.mine) and seat.parts == len(others):
            for connection in others:
                self._wires.send(self._connections[connection], _SUM, now)
            seat.sums += 1
            self._gather(index, now)

    def _gather(self, index: int, now: float) -> None:
        """If the seat has all of its stage's gradients, those of shared parameters leave."""
        seat = self._seats[index]
        if seat.sums <= len(self._sums_of[index]):
            return
        seat.gathered = True
        self._averaging[seat.stage] = max(self._averaging[seat.stage], now - self._complete_at[seat.stage])
        for number, exchange in enumerate(self._pipeline.exchanges):
            if exchange.source == index:
                self._wires.send(self._connections[2 * len(self._pipeline.links) + number], 0, now)
        self._finish(index, now)

    def _finish(self, index: int, now: float) -> None:
        """If all gradients are there, those of shared parameters from other stages among them."""
        seat = self._seats[index]
        if seat.gathered and seat.awaited == 0:
            self._begin(index, seat, _FINISH, 0, now)

    def _dispatch(self) -> None:
        now = self._now
        for index in self._touched:
            seat = self._seats[index]
            if seat.busy:
                continue
            mine, forwards, backwards = seat.mine, seat.forwards, seat.backwards
            held = forwards - seat.accumulated
            if backwards - seat.accumulated > MOST_DEFERRED:
                self._begin(index, seat, _ACCUMULATE, mine[seat.accumulated], now)
            elif backwards < forwards and seat.gradients[mine[backwards]]:
                self._begin(index, seat, _BACKWARD, mine[backwards], now)
            elif forwards < len(mine) and held < seat.times.in_flight and seat.activations[mine[forwards]]:
                seat.peak = max(seat.peak, held + 1)
                self._begin(index, seat, _FORWARD, mine[forwards], now)
            elif seat.accumulated < backwards:
                self._begin(index, seat, _ACCUMULATE, mine[seat.accumulated], now)
        self._touched.clear()

    def _begin(self, index: int, seat: _Seat, kind: int, microbatch: int, now: float) -> None:
        seconds = seat.durations[kind]
        if kind <= _ACCUMULATE:
            if not self._disturbances.calm:
                seconds = self._disturbances.seconds(seconds, kind=kind, stage=index, microbatch=microbatch)
            seat.computed += seconds
        if not self._disturbances.calm:
            seconds += self._disturbances.standstill(index, now, now + seconds)
        seat.busy = True
        seat.began = now
        seat.doing = kind, microbatch
        if self._processors.shared(index):
            self._processors.start(index, seconds, now)
        else:
            self._schedule(now + seconds, index, microbatch, kind)

    def _record_work(self, index: int, kind: int, now: float) -> None:
        seat = self._seats[index]
        self._activities.append(
            Activity(kind=_KINDS[kind], stage=index, microbatch=seat.doing[1], start_seconds=seat.began, end_seconds=now)
        )

    def _stretch(self, connection: Connection, microbatch: int) -> float:
        return self._disturbances.stretch(connection.index, microbatch)

    def _record_transfer(self, connection: Connection, microbatch: int, start: float, end: float) -> None:
        num_links, ends = len(self._pipeline.links), self._pipeline.ends
        if connection.index >= self._first_sum:
            kind, seat = WorkKind.AVERAGE, self._sum_ends[connection.index - self._first_sum][0]
        elif connection.index >= 2 * num_links:
            kind, seat = WorkKind.EXCHANGE, self._pipeline.exchanges[connection.index - 2 * num_links].source
        elif connection.urgent:
            kind, seat = WorkKind.SEND_BACKWARD, ends[connection.index - num_links][1]
        else:
            kind, seat = WorkKind.SEND_FORWARD, ends[connection.index][0]
        self._activities.append(Activity(kind=kind, stage=seat, microbatch=microbatch, start_seconds=start, end_seconds=end))

    def _summary(self) -> Simulation:
        reported = max(seat.reported for seat in self._seats)
        assert reported < math.inf, "every stage finishes, for no work waits for a later microbatch"
        num_links = len(self._pipeline.links)
        busy = [connection.busy_seconds for connection in self._connections]
        return Simulation(
            step_seconds=reported + self._pipeline.commit_seconds,
            compute_seconds=tuple(seat.computed for seat in self._seats),
            busy_seconds=tuple(seat.busy_seconds for seat in self._seats),
            sent_seconds=tuple((busy[index], busy[num_links + index]) for index in range(num_links)),
            peak_in_flight=tuple(seat.peak for seat in self._seats),
            averaging_seconds=tuple(self._averaging),
            activities=tuple(sorted(self._activities, key=lambda activity: (activity.start_seconds, activity.stage))),
        )


def sums_of(pipeline: Pipeline) -> tuple[tuple[int, int, Transfer], ...]:
    """What the replicas of a stage send each other to sum their gradients, twice a step: from seat, to seat, and the part."""
    return tuple(
        (source, target, part)
        for seats, group in zip(pipeline.seats, pipeline.groups, strict=False)
        if group is not None
        for source, row in zip(seats, group.averaging.parts, strict=True)
        for target, part in zip(seats, row, strict=True)
        if part is not None
    )


def _seats(pipeline: Pipeline) -> list[_Seat]:
    """Each with its own microbatches, all of which have arrived at the first stage."""
    count, last = pipeline.num_microbatches, len(pipeline.seats) - 1
    seats = [
        _Seat(
            times=pipeline.stages[index],
            durations=_durations(pipeline.stages[index]),
            stage=stage,
            mine=range(count),
            activations=bytearray([0] * count if stage else [1] * count),
            gradients=bytearray(count),
        )
        for stage, members in enumerate(pipeline.seats)
        for index in members
    ]
    if not pipeline.groups:
        for stage, seat in enumerate(seats):
            seat.onward = (stage,) * count if stage < last else ()
            seat.homeward = (last + stage - 1,) * count if stage else ()
        return seats
    connection = {pair: number for number, pair in enumerate(pipeline.ends)}
    for stage, holders in enumerate(pipeline.holders):
        for index in pipeline.seats[stage]:
            seats[index].mine = [microbatch for microbatch, holder in enumerate(holders) if holder == index]
            # By microbatch, of which the seat asks for its own only.
            if stage < last:
                seats[index].onward = [connection.get((index, other), -1) for other in pipeline.holders[stage + 1]]
            if stage:
                back = [connection.get((other, index), -1) for other in pipeline.holders[stage - 1]]
                seats[index].homeward = [len(connection) + number for number in back]
    return seats


def _durations(times: StageTimes) -> tuple[float, float, float, float, float]:
    """Of each kind of work, in the order of ``_KINDS``."""
    backward = times.recompute_seconds + times.backward_seconds
    return times.forward_seconds, backward, times.accumulate_seconds, times.update_seconds, times.finish_seconds


def _connect(pipeline: Pipeline, sums: Sequence[tuple[int, int, Transfer]]) -> list[Connection]:
    """Forward connections, then backward ones, exchanges and sums, each attached to the resources it shares."""
    num_links = len(pipeline.links)
    uplinks = [Resource(stage.upload_bytes_per_second) for stage in pipeline.stages]
    downlinks = [Resource(stage.download_bytes_per_second) for stage in pipeline.stages]
    media: list[Resource] = []
    connections: list[Connection] = []
    ends = [*pipeline.ends, *((target, source) for source, target in pipeline.ends)]
    connections += [Connection(index, link.forward, urgent=False) for index, link in enumerate(pipeline.links)]
    for index, link in enumerate(pipeline.links):
        connections.append(Connection(num_links + index, link.backward, urgent=True))
        if link.duplex is not Duplex.FULL:
            rate = max(link.forward.bytes_per_second, link.backward.bytes_per_second)
            users = [connections[index], connections[num_links + index]]
            media.append(Resource(rate, exclusive=link.duplex is Duplex.SERIAL, users=users))
    for number, exchange in enumerate(pipeline.exchanges):
        connections.append(Connection(2 * num_links + number, exchange.transfer, urgent=False))
        ends.append((exchange.source, exchange.target))
    for source, target, part in sums:
        connections.append(Connection(len(connections), part, urgent=False))
        ends.append((source, target))
    relay = Resource(pipeline.relay_bytes_per_second)
    serial = {user.index for medium in media if medium.exclusive for user in medium.users}
    for connection, (source, target) in zip(connections, ends, strict=True):
        if connection.index not in serial:
            uplinks[source].users.append(connection)
            downlinks[target].users.append(connection)
            if (min(source, target), max(source, target)) in pipeline.relayed:
                relay.users.append(connection)
    Wires.settle([*media, *uplinks, *downlinks, relay])
    return connections
