"""What a step of a pipeline takes, event by event. Pure: the same pipeline and disturbances give the same answer.

Theory of operation. A stage computes one work at a time, chosen as the peers choose it: backward before forward before
accumulate (before forward where many are put off), each in the order of the microbatches, at most ``in_flight`` begun and
not accumulated. A finished forward sends
to the next stage, a finished backward to the one before; sending goes on beside computing. Events at the same instant are
all taken in before any stage chooses, so that rounding never decides the order of work. The step ends when every stage has
its gradients, those of shared parameters included, the coordinator has answered and the optimizer has run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from atoll.coordinator.planning.pipeline import Activity, Duplex, Pipeline, Simulation, StageTimes, WorkKind
from atoll.coordinator.planning.wires import Connection, Resource, Wires
from atoll.protocol.assignment import MOST_DEFERRED

_INSTANT = 1e-11
_FORWARD, _BACKWARD, _ACCUMULATE = 0, 1, 2
_KINDS = (WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.ACCUMULATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """Works take longer or shorter by a log-normal factor with median 1; ``compute`` and ``network`` are its sigma."""

    compute: float = 0.0
    network: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """Stage ``stage`` computes nothing from ``start_seconds`` on, for ``seconds``; what it was doing takes that much
    longer."""

    stage: int
    start_seconds: float
    seconds: float


def simulate(
    pipeline: Pipeline, *, jitter: Jitter | None = None, outages: Iterable[Outage] = (), record: bool = False
) -> Simulation:
    """Run one step. ``record`` keeps every activity, for a picture."""
    return _Run(pipeline, jitter, tuple(outages), record).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSimulation:
    """``total_seconds`` for all steps; ``voided`` counts the attempts that a failure ended."""

    total_seconds: float
    voided: int


def simulate_run(
    pipeline: Pipeline, *, num_steps: int, failures: Sequence[float] = (), recovery_seconds: float = 0.0
) -> RunSimulation:
    """``num_steps`` steps while at each of ``failures`` (seconds from the start) a peer is lost.

    The step in progress is void and starts again ``recovery_seconds`` later. A failure during a recovery restarts the
    recovery.
    """
    step_seconds = simulate(pipeline).step_seconds
    now, voided, done = 0.0, 0, 0
    pending = sorted(failures)
    while done < num_steps:
        if pending and pending[0] < now + step_seconds:
            if pending[0] >= now:
                voided += 1
            now = pending.pop(0) + recovery_seconds
            continue
        now += step_seconds
        done += 1
    return RunSimulation(total_seconds=now, voided=voided)


@dataclass(slots=True)
class _Stage:
    times: StageTimes
    durations: tuple[float, float, float]
    forwards: int = 0
    backwards: int = 0
    accumulated: int = 0
    activations: int = 0
    gradients: int = 0
    busy: bool = False
    peak: int = 0
    awaited: int = 0
    computed: float = 0.0
    finished: float = math.inf


class _Run:
    def __init__(self, pipeline: Pipeline, jitter: Jitter | None, outages: tuple[Outage, ...], record: bool) -> None:
        self._pipeline = pipeline
        self._num_microbatches = pipeline.num_microbatches
        self._events: list[tuple[float, int, int, int, int]] = []
        self._sequence = 0
        self._touched: list[int] = []
        self._outages = sorted(outages, key=lambda outage: outage.start_seconds)
        self._record = record
        self._activities: list[Activity] = []
        self._factors = _compute_factors(pipeline, jitter)
        self._stages = [
            _Stage(times, (times.forward_seconds, times.recompute_seconds + times.backward_seconds, times.accumulate_seconds))
            for times in pipeline.stages
        ]
        self._stages[0].activations = self._num_microbatches
        for exchange in pipeline.exchanges:
            self._stages[exchange.target].awaited += 1
        stretch = _stretch(pipeline, jitter)
        self._wires = Wires(self._schedule_wire, stretch, self._record_transfer if record else None)
        self._connections = _connect(pipeline)

    def run(self) -> Simulation:
        last = len(self._stages) - 1
        self._touched = list(range(last + 1))
        self._dispatch()
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
        self._schedule(when, connection.index, number, 4 if arrived else 3)

    def _handle(self, now: float, subject: int, detail: int, kind: int) -> None:
        if kind == 3:
            self._wires.sent(self._connections[subject], detail, now)
        elif kind == 4:
            self._arrived(subject, now)
        else:
            self._finished_work(subject, kind, now)

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
            self._complete(target, now)

    def _finished_work(self, index: int, kind: int, now: float) -> None:
        stage = self._stages[index]
        stage.busy = False
        self._touched.append(index)
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
                stage.accumulated += 1
                self._complete(index, now)
        else:
            stage.accumulated += 1
            self._complete(index, now)

    def _complete(self, index: int, now: float) -> None:
        stage = self._stages[index]
        if stage.accumulated < self._num_microbatches:
            return
        if stage.finished == math.inf:
            stage.finished = now
            for number, exchange in enumerate(self._pipeline.exchanges):
                if exchange.source == index:
                    self._wires.send(self._connections[2 * len(self._pipeline.links) + number], 0, now)
        elif stage.awaited == 0:
            stage.finished = max(stage.finished, now)

    def _dispatch(self) -> None:
        now = self._now
        for index in self._touched:
            stage = self._stages[index]
            if stage.busy:
                continue
            held = stage.forwards - stage.accumulated
            if stage.backwards < stage.forwards and stage.gradients > stage.backwards:
                self._begin(index, stage, _BACKWARD, stage.backwards, now)
            elif stage.backwards - stage.accumulated > MOST_DEFERRED:
                self._begin(index, stage, _ACCUMULATE, stage.accumulated, now)
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
        if self._factors is not None:
            seconds *= float(self._factors[kind, index, microbatch])
        end = now + seconds
        for outage in self._outages:
            if outage.stage == index and outage.start_seconds < end and now < outage.start_seconds + outage.seconds:
                end += outage.start_seconds + outage.seconds - max(now, outage.start_seconds)
        stage.busy = True
        stage.computed += seconds
        if self._record and end > now:
            self._activities.append(
                Activity(kind=_KINDS[kind], stage=index, microbatch=microbatch, start_seconds=now, end_seconds=end)
            )
        self._schedule(end, index, microbatch, kind)

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
        finished = tuple(stage.finished for stage in self._stages)
        assert max(finished) < math.inf, "every stage finishes, for no work waits for a later microbatch"
        committed = max(finished) + self._pipeline.commit_seconds
        updates = [stage.update_seconds for stage in self._pipeline.stages]
        if self._record:
            self._activities.extend(
                Activity(
                    kind=WorkKind.UPDATE, stage=index, microbatch=0, start_seconds=committed, end_seconds=committed + seconds
                )
                for index, seconds in enumerate(updates)
                if seconds > 0.0
            )
        num_links = len(self._pipeline.links)
        busy = [connection.busy_seconds for connection in self._connections]
        return Simulation(
            step_seconds=committed + max(updates),
            finished_seconds=finished,
            compute_seconds=tuple(stage.computed for stage in self._stages),
            sent_seconds=tuple((busy[index], busy[num_links + index]) for index in range(num_links)),
            peak_in_flight=tuple(stage.peak for stage in self._stages),
            activities=tuple(sorted(self._activities, key=lambda activity: (activity.start_seconds, activity.stage))),
        )


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


def _compute_factors(pipeline: Pipeline, jitter: Jitter | None) -> np.ndarray | None:
    if jitter is None or jitter.compute == 0.0:
        return None
    generator = np.random.default_rng((jitter.seed, 0))
    shape = (3, len(pipeline.stages), pipeline.num_microbatches)
    return np.exp(jitter.compute * generator.standard_normal(shape))


class _Stretch:
    """How much longer each message takes on the wire."""

    def __init__(self, pipeline: Pipeline, jitter: Jitter) -> None:
        generator = np.random.default_rng((jitter.seed, 1))
        num_connections = 2 * len(pipeline.links) + len(pipeline.exchanges)
        shape = (num_connections, pipeline.num_microbatches)
        self._factors = np.exp(jitter.network * generator.standard_normal(shape))

    def __call__(self, connection: Connection, microbatch: int) -> float:
        return float(self._factors[connection.index, microbatch])


def _stretch(pipeline: Pipeline, jitter: Jitter | None) -> _Stretch | None:
    return _Stretch(pipeline, jitter) if jitter is not None and jitter.network > 0.0 else None
