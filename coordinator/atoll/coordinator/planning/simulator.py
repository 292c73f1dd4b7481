"""What a step of a pipeline takes, event by event. Pure: the same pipeline and disturbances give the same answer.

Theory of operation. A step begins with the coordinator's word, which commits the step before and starts this one: each stage
updates its weights as soon as it has heard, and then computes. It computes one work at a time, chosen as the peers choose it:
backward before forward before accumulate (before forward where many are put off), each in the order of the microbatches, at
most ``in_flight`` begun and not accumulated. A finished forward sends to the next stage, a finished backward to the one before;
sending goes on beside computing. Stages that share processors slow one another down while they compute at the same time.
Events at the same instant are all taken in before any stage chooses, so that rounding never decides the order of work. A stage
that has its gradients, those of shared parameters included, works out their norms and reports; the step ends when the
coordinator has all reports and has written them down. Steps follow one another at exactly this distance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from atoll.coordinator.planning.disturbances import Disturbances, Jitter, Outage
from atoll.coordinator.planning.pipeline import Activity, Duplex, Pipeline, Simulation, StageTimes, WorkKind
from atoll.coordinator.planning.processors import Processors
from atoll.coordinator.planning.wires import Connection, Resource, Wires
from atoll.protocol.assignment import MOST_DEFERRED

_INSTANT = 1e-11
_FORWARD, _BACKWARD, _ACCUMULATE, _UPDATE, _FINISH, _SENT, _ARRIVED, _TOLD, _PROCESSED = range(9)
_KINDS = (WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.ACCUMULATE, WorkKind.UPDATE, WorkKind.FINISH)


def simulate(
    pipeline: Pipeline, *, jitter: Jitter | None = None, outages: Iterable[Outage] = (), record: bool = False
) -> Simulation:
    """Run one step. ``record`` keeps every activity, for a picture."""
    return _Run(pipeline, Disturbances(pipeline, jitter, tuple(outages)), record).run()


@dataclass(slots=True)
class _Stage:
    times: StageTimes
    durations: tuple[float, float, float, float, float]
    forwards: int = 0
    backwards: int = 0
    accumulated: int = 0
    activations: int = 0
    gradients: int = 0
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
        self._stages = [_Stage(times, _durations(times)) for times in pipeline.stages]
        self._processors = Processors(pipeline.stages, self._schedule_processed)
        self._stages[0].activations = self._num_microbatches
        for exchange in pipeline.exchanges:
            self._stages[exchange.target].awaited += 1
        stretch = None if disturbances.calm_network else self._stretch
        self._wires = Wires(self._schedule_wire, stretch, self._record_transfer if record else None)
        self._connections = _connect(pipeline)

    def run(self) -> Simulation:
        for index, stage in enumerate(self._stages):
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
            self._arrived(subject, now)
        elif kind == _SENT:
            self._wires.sent(self._connections[subject], detail, now)
        elif kind == _PROCESSED:
            if self._processors.ended(subject, detail, now):
                self._finished_work(subject, self._stages[subject].doing[0], now)
        else:
            self._begin(subject, self._stages[subject], _UPDATE, 0, now)

    def _arrived(self, index: int, now: float) -> None:
        num_links = len(self._pipeline.links)
        if index < num_links:
            self._stages[index + 1].activations += 1
            self._touched.append(index + 1)
        elif index < 2 * num_links:
            self._stages[index - num_links].gradients += 1
            self._touched.append(index - num_links)
        else:
            target = self._pipeline.exchanges[index - 2 * num_links].target
            self._stages[target].awaited -= 1
            self._finish(target, now)

    def _finished_work(self, index: int, kind: int, now: float) -> None:
        stage = self._stages[index]
        stage.busy = False
        self._touched.append(index)
        if self._record and now > stage.began:
            self._record_work(index, kind, now)
        if kind != _UPDATE:
            stage.busy_seconds += now - stage.began
        if kind == _FORWARD:
            stage.forwards += 1
            if index + 1 < len(self._stages):
                self._wires.send(self._connections[index], stage.forwards - 1, now)
            else:
                stage.gradients += 1
        elif kind == _BACKWARD:
            stage.backwards += 1
            if index > 0:
                self._wires.send(self._connections[len(self._pipeline.links) + index - 1], stage.backwards - 1, now)
            if stage.durations[_ACCUMULATE] == 0.0:
                self._accumulated(index, now)
        elif kind == _ACCUMULATE:
            self._accumulated(index, now)
        elif kind == _FINISH:
            stage.reported = now + stage.times.coordinator_seconds

    def _accumulated(self, index: int, now: float) -> None:
        """A microbatch is through; after the last one the gradients of shared parameters leave."""
        stage = self._stages[index]
        stage.accumulated += 1
        if stage.accumulated == self._num_microbatches:
            for number, exchange in enumerate(self._pipeline.exchanges):
                if exchange.source == index:
                    self._wires.send(self._connections[2 * len(self._pipeline.links) + number], 0, now)
            self._finish(index, now)

    def _finish(self, index: int, now: float) -> None:
        """If all microbatches are through and all gradients of shared parameters have come."""
        stage = self._stages[index]
        if stage.accumulated == self._num_microbatches and stage.awaited == 0:
            self._begin(index, stage, _FINISH, 0, now)

    def _dispatch(self) -> None:
        now = self._now
        for index in self._touched:
            stage = self._stages[index]
            if stage.busy:
                continue
            held = stage.forwards - stage.accumulated
            if stage.backwards - stage.accumulated > MOST_DEFERRED:
                self._begin(index, stage, _ACCUMULATE, stage.accumulated, now)
            elif stage.backwards < stage.forwards and stage.gradients > stage.backwards:
                self._begin(index, stage, _BACKWARD, stage.backwards, now)
            elif (
                stage.forwards < self._num_microbatches and held < stage.times.in_flight and stage.activations > stage.forwards
            ):
                stage.peak = max(stage.peak, held + 1)
                self._begin(index, stage, _FORWARD, stage.forwards, now)
            elif stage.accumulated < stage.backwards:
                self._begin(index, stage, _ACCUMULATE, stage.accumulated, now)
        self._touched.clear()

    def _begin(self, index: int, stage: _Stage, kind: int, microbatch: int, now: float) -> None:
        seconds = stage.durations[kind]
        if kind <= _ACCUMULATE:
            if not self._disturbances.calm:
                seconds = self._disturbances.seconds(seconds, kind=kind, stage=index, microbatch=microbatch)
            stage.computed += seconds
        if not self._disturbances.calm:
            seconds += self._disturbances.standstill(index, now, now + seconds)
        stage.busy = True
        stage.began = now
        stage.doing = kind, microbatch
        if self._processors.shared(index):
            self._processors.start(index, seconds, now)
        else:
            self._schedule(now + seconds, index, microbatch, kind)

    def _record_work(self, index: int, kind: int, now: float) -> None:
        stage = self._stages[index]
        self._activities.append(
            Activity(kind=_KINDS[kind], stage=index, microbatch=stage.doing[1], start_seconds=stage.began, end_seconds=now)
        )

    def _stretch(self, connection: Connection, microbatch: int) -> float:
        return self._disturbances.stretch(connection.index, microbatch)

    def _record_transfer(self, connection: Connection, microbatch: int, start: float, end: float) -> None:
        num_links = len(self._pipeline.links)
        if connection.index >= 2 * num_links:
            kind, stage = WorkKind.EXCHANGE, self._pipeline.exchanges[connection.index - 2 * num_links].source
        elif connection.urgent:
            kind, stage = WorkKind.SEND_BACKWARD, connection.index - num_links + 1
        else:
            kind, stage = WorkKind.SEND_FORWARD, connection.index
        self._activities.append(Activity(kind=kind, stage=stage, microbatch=microbatch, start_seconds=start, end_seconds=end))

    def _summary(self) -> Simulation:
        reported = max(stage.reported for stage in self._stages)
        assert reported < math.inf, "every stage finishes, for no work waits for a later microbatch"
        num_links = len(self._pipeline.links)
        busy = [connection.busy_seconds for connection in self._connections]
        return Simulation(
            step_seconds=reported + self._pipeline.commit_seconds,
            compute_seconds=tuple(stage.computed for stage in self._stages),
            busy_seconds=tuple(stage.busy_seconds for stage in self._stages),
            sent_seconds=tuple((busy[index], busy[num_links + index]) for index in range(num_links)),
            peak_in_flight=tuple(stage.peak for stage in self._stages),
            activities=tuple(sorted(self._activities, key=lambda activity: (activity.start_seconds, activity.stage))),
        )


def _durations(times: StageTimes) -> tuple[float, float, float, float, float]:
    """Of each kind of work, in the order of ``_KINDS``."""
    backward = times.recompute_seconds + times.backward_seconds
    return times.forward_seconds, backward, times.accumulate_seconds, times.update_seconds, times.finish_seconds


def _connect(pipeline: Pipeline) -> list[Connection]:
    """Forward connections, then backward ones, then exchanges, each attached to the resources it shares."""
    num_links = len(pipeline.links)
    uplinks = [Resource(stage.upload_bytes_per_second) for stage in pipeline.stages]
    downlinks = [Resource(stage.download_bytes_per_second) for stage in pipeline.stages]
    media: list[Resource] = []
    connections: list[Connection] = []
    ends: list[tuple[int, int]] = []
    for index, link in enumerate(pipeline.links):
        connections.append(Connection(index, link.forward, urgent=False))
        ends.append((index, index + 1))
    for index, link in enumerate(pipeline.links):
        connections.append(Connection(num_links + index, link.backward, urgent=True))
        ends.append((index + 1, index))
        if link.duplex is not Duplex.FULL:
            rate = max(link.forward.bytes_per_second, link.backward.bytes_per_second)
            users = [connections[index], connections[num_links + index]]
            media.append(Resource(rate, exclusive=link.duplex is Duplex.SERIAL, users=users))
    for number, exchange in enumerate(pipeline.exchanges):
        connections.append(Connection(2 * num_links + number, exchange.transfer, urgent=False))
        ends.append((exchange.source, exchange.target))
    serial = {user.index for medium in media if medium.exclusive for user in medium.users}
    for connection, (source, target) in zip(connections, ends, strict=True):
        if connection.index not in serial:
            uplinks[source].users.append(connection)
            downlinks[target].users.append(connection)
    Wires.settle([*media, *uplinks, *downlinks])
    return connections
