"""What peers measure while they work: memory beside its prediction, step time beside its prediction, traffic of the links."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.compression.registry import codec_names
from atoll.coordinator.events import LinkEvent, PredictionEvent, StepEvent
from atoll.coordinator.planning.plan import Plan
from atoll.coordinator.run.deadlines import REMEMBERED_STEPS
from atoll.protocol.ids import PeerId
from atoll.protocol.v1 import session_pb2

DIRECTIONS = ("forward", "backward")
LINKS_EVERY = 10
"""Steps between two reports of the links."""
COMPARED_AT = 3
"""The step after which predictions are first compared: by then buffers and caches have their size."""


class Measurements:
    """Takes in reports, gives events. Pure. A plan's memory is compared with how much a peer's process has grown since
    before."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._before: dict[PeerId, int] = {}
        self._largest: dict[PeerId, int] = {}
        self._steps: list[float] = []
        self._links: dict[tuple[str, str, str, str], LinkEvent] = {}

    def planned(self, plan: Plan, resident_before: dict[PeerId, int]) -> None:
        """A new plan is being loaded by peers whose processes have these sizes."""
        self._plan = plan
        self._before = dict(resident_before)
        self._largest = {}
        self._steps = []

    def reported(self, peer: PeerId, message: session_pb2.PeerMessage) -> None:
        """A Ready or a StageReport."""
        report = message.report if message.HasField("report") else message.ready
        self._largest[peer] = max(self._largest.get(peer, 0), report.resident_bytes)
        for use in message.report.links:
            if not self._is_ours(peer, use):
                continue
            event = LinkEvent(
                source=use.source,
                target=use.target,
                direction=use.direction,
                codec=use.codec,
                bytes=use.bytes,
                seconds_busy=use.seconds_busy,
                relative_error=use.relative_error,
            )
            self._links[event.source, event.target, event.direction, event.codec] = event

    def _is_ours(self, peer: PeerId, use: session_pb2.LinkUse) -> bool:
        """Whether it is one of the plan's links; a peer must not fill our memory with names of its own."""
        known = self._plan is not None and use.target in self._plan.peers
        return known and use.source == peer and use.direction in DIRECTIONS and use.codec in codec_names()

    def bytes_sent(self, peer: PeerId) -> int:
        """What the peer has sent over its links in all."""
        return sum(event.bytes for event in self._links.values() if event.source == peer)

    def after_step(self, event: StepEvent) -> Iterator[LinkEvent | PredictionEvent]:
        """What is worth telling after a committed step."""
        self._steps = [*self._steps[1 - REMEMBERED_STEPS :], event.seconds]
        if len(self._steps) == COMPARED_AT:
            yield from self.predictions()
        if event.step % LINKS_EVERY == 0:
            yield from self.links()

    def links(self) -> Iterator[LinkEvent]:
        """Each link's totals."""
        yield from sorted(self._links.values(), key=lambda event: (event.source, event.target, event.direction))

    def predictions(self) -> Iterator[PredictionEvent]:
        """Each prediction of the plan beside what was measured so far."""
        if self._plan is None or not self._steps:
            return
        # The first step pays for warming up.
        usual = sorted(self._steps[1:] or self._steps)[len(self._steps[1:] or self._steps) // 2]
        yield PredictionEvent(what="step_seconds", peer="", predicted=self._plan.step_seconds, measured=usual)
        for stage in self._plan.stages:
            grown = self._largest.get(stage.peer, 0) - self._before.get(stage.peer, 0)
            yield PredictionEvent(
                what="memory_bytes", peer=stage.peer, predicted=float(stage.memory_bytes), measured=float(grown)
            )
