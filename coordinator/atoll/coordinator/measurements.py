"""What peers measure while they work, beside what the plan predicted: a step, and in a step each stage's computing and memory
and the links' traffic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from atoll.compression.context import Direction
from atoll.compression.registry import is_codec
from atoll.coordinator.codec_choices import CodecChoices
from atoll.coordinator.events import LinkEvent, PredictionEvent, StepEvent
from atoll.coordinator.planning.plan import LinkPlan, Plan, StagePlan
from atoll.coordinator.run.deadlines import REMEMBERED_STEPS
from atoll.coordinator.survey.observed import Observed
from atoll.coordinator.timelines import Timelines
from atoll.protocol.ids import PeerId
from atoll.protocol.job import Compression
from atoll.protocol.v1 import session_pb2

COMPARED_EVERY = 10
"""Steps between two reports of the links and of the predictions."""
COMPARED_AT = 3
"""The step after which predictions are first compared: by then buffers and caches have their size."""


class Measurements:
    """Takes in reports, gives events. Pure. A plan's memory is compared with the peak of a peer's process beyond what it took
    when it joined. ``observed`` keeps what follows for later plans, ``codecs`` what
    follows for the links, ``timelines`` what a step looked like."""

    def __init__(self, compression: Compression) -> None:
        self.observed = Observed()
        self.codecs = CodecChoices(compression, self.observed)
        self.timelines = Timelines()
        self._plan: Plan | None = None
        self._before: dict[PeerId, int] = {}
        self._largest: dict[PeerId, int] = {}
        self._steps: list[float] = []
        self._links: dict[tuple[str, str, str], LinkEvent] = {}

    def planned(self, plan: Plan, resident_before: Mapping[PeerId, int], factors: Mapping[PeerId, float]) -> None:
        """A new plan is being loaded by peers whose processes had these sizes before they had a stage. Of ``factors`` see
        :meth:`Observed.planned`."""
        self.observed.planned(plan, factors)
        self.timelines.keep(plan.peers)
        self._plan = plan
        self._before = dict(resident_before)
        self._largest = {}
        self._steps = []

    def reported(self, peer: PeerId, message: session_pb2.PeerMessage) -> None:
        """A Ready or a StageReport."""
        report = message.report if message.HasField("report") else message.ready
        self._largest[peer] = max(self._largest.get(peer, 0), report.resident_bytes)
        uses = [use for use in message.report.links if self._is_ours(peer, use)]
        self.observed.reported(peer, message.report)
        if message.HasField("report"):
            self.timelines.reported(peer, message.report)
        self.observed.carried(peer, uses, evaluation=message.report.evaluation)
        self.codecs.carried(uses)
        for use in uses:
            event = LinkEvent(
                source=use.source,
                target=use.target,
                direction=use.direction,
                codec=use.codec,
                bytes=use.bytes,
                seconds_busy=use.seconds_busy,
                relative_error=use.relative_error,
                raw_bytes=use.raw_bytes,
                damage=self.codecs.damage(use),
            )
            self._links[event.source, event.target, event.direction] = event

    def _is_ours(self, peer: PeerId, use: session_pb2.LinkUse) -> bool:
        """Whether it is one of the plan's links; a peer must not fill our memory with names of its own."""
        known = self._plan is not None and use.target in self._plan.peers
        return known and use.source == peer and use.direction in list(Direction) and is_codec(use.codec)

    def bytes_sent(self, peer: PeerId) -> int:
        """What the peer has sent over its links in all."""
        return sum(event.bytes for event in self._links.values() if event.source == peer)

    @property
    def step_seconds(self) -> float:
        """The middle of the last steps; 0 before there are any. The first one under a plan pays for warming up."""
        steady = self._steps[1:] or self._steps
        return median(steady) if steady else 0.0

    def grown_bytes(self, peer: PeerId) -> int:
        """By how much the peer's process has grown since it joined, at its peak under this plan."""
        return max(0, self._largest.get(peer, 0) - self._before.get(peer, 0))

    def link_bytes(self, source: PeerId, target: PeerId) -> int:
        """What has crossed since the peer started."""
        return sum(event.bytes for event in self._links.values() if (event.source, event.target) == (source, target))

    def link(self, source: PeerId, target: PeerId) -> LinkEvent | None:
        """What the last report said of a link of the plan."""
        return next((event for event in self._links.values() if self._is_data(event, source, target)), None)

    def _is_data(self, event: LinkEvent, source: PeerId, target: PeerId) -> bool:
        """Whether it is about activations or gradients between these, and not about sums of shared gradients."""
        return (event.source, event.target) == (source, target) and event.raw_bytes > 0

    def after_step(self, event: StepEvent) -> Iterator[LinkEvent | PredictionEvent]:
        """What is worth telling after a committed step."""
        self._steps = [*self._steps[1 - REMEMBERED_STEPS :], event.seconds]
        if len(self._steps) == COMPARED_AT or event.step % COMPARED_EVERY == 0:
            yield from self.predictions()
        if event.step % COMPARED_EVERY == 0:
            yield from self.links()

    def links(self) -> Iterator[LinkEvent]:
        """Each link's totals."""
        yield from sorted(self._links.values(), key=lambda event: (event.source, event.target, event.direction))

    def predictions(self) -> Iterator[PredictionEvent]:
        """Each prediction of the plan beside what was measured so far."""
        if self._plan is None or not self._steps:
            return
        yield PredictionEvent(what="step_seconds", peer="", predicted=self._plan.step_seconds, measured=self.step_seconds)
        yield from self._memory(self._plan.stages)
        for stage in self._plan.stages:
            for peer in stage.replicas:
                measured = self.observed.compute_seconds(peer)
                if measured > 0.0:
                    predicted = stage.of(peer).step_compute_seconds
                    yield PredictionEvent(what="compute_seconds", peer=peer, predicted=predicted, measured=measured)
        for link in self._plan.links:
            seconds = self.observed.transfer_seconds(link.source, link.target)
            if seconds > 0.0:
                yield _of_link("transfer_seconds", link, link.step_seconds, seconds)
            rate = self.observed.rates.get((link.source, link.target))
            if rate is not None:
                yield _of_link("bytes_per_second", link, link.bytes_per_second, rate)

    def _memory(self, stages: Sequence[StagePlan]) -> Iterator[PredictionEvent]:
        for stage in stages:
            for peer in stage.replicas:
                grown = float(self.grown_bytes(peer))
                predicted = float(stage.of(peer).memory_bytes)
                yield PredictionEvent(what="memory_bytes", peer=peer, predicted=predicted, measured=grown)


def _of_link(what: str, link: LinkPlan, predicted: float, measured: float) -> PredictionEvent:
    return PredictionEvent(what=what, peer=link.source, target=link.target, predicted=predicted, measured=measured)
