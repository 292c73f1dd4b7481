"""A run's numbers for Prometheus: what `atoll status --json` says, as gauges, and counts of what happened.

Labels are the names of the peers and links of the run as it stands, nothing that grows with time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from atoll.coordinator.events import (
    EvaluationEvent,
    Event,
    MovedEvent,
    PeerEvent,
    RecoveredEvent,
    ReplayedEvent,
    SnapshotEvent,
    StepEvent,
    VoidEvent,
)
from atoll.coordinator.run.states import RunState
from atoll.protocol.exposition import counters, gauges, labelled, text_of
from atoll.protocol.v1.operator_pb2 import LinkStatus, PeerStatus, StatusReply

STATES = tuple(state.value for state in RunState)

RUN = {
    "step": "Last committed step.",
    "steps": "Steps that the run will have.",
    "loss": "Loss of the last committed step.",
    "tokens_per_second": "Of the last committed step.",
    "generation": "Number of the plan in force.",
    "predicted_step_seconds": "What the plan predicts for a step.",
    "measured_step_seconds": "The middle of the last steps.",
}
PEER = {
    "resident_bytes": "Memory of the process.",
    "memory_bytes": "Memory that it offers.",
    "predicted_memory_bytes": "What its stage is predicted to need.",
    "measured_memory_bytes": "By how much its process has grown since it got its stage.",
    "predicted_compute_seconds": "Predicted computing in a step.",
    "measured_compute_seconds": "Computing in a step, the middle of the last ones.",
    "silent_seconds": "Since it was last heard; its lease is over when this grows too long.",
    "bytes_sent": "Sent to neighbours since it started.",
    "stage": "The stage that it holds, -1 without one.",
}
LINK = {
    "bytes": "Sent since the peer started.",
    "raw_bytes": "What would have been sent without a codec.",
    "relative_error": "Of what crosses.",
    "damage": "What the codec is estimated to cost the loss, as a part of it; below 0: not known.",
    "predicted_seconds": "Predicted sending in a step.",
    "measured_seconds": "Sending in a step, the middle of the last ones.",
    "predicted_bytes_per_second": "What the plan counts on.",
    "measured_bytes_per_second": "What traffic has shown.",
}
COUNTS = {
    "committed_steps": "Steps committed by this coordinator.",
    "committed_seconds": "What these steps took: over the time that passed, the goodput.",
    "tokens": "Tokens in these steps.",
    "void_steps": "Steps that were void and ran again.",
    "replayed_steps": "Committed steps that were done again after a loss.",
    "recoveries": "Losses that the run got over.",
    "recovery_seconds": "From a loss to the next new step, in all.",
    "moves": "Changes of the plan between two steps.",
    "snapshots": "Snapshots that became whole.",
    "peers_lost": "Peers that were lost.",
}


class RunMetrics:
    """Takes in events and the status, and gives them as text for a scraper. One a run."""

    def __init__(self) -> None:
        self._status = StatusReply()
        self._counts = dict.fromkeys(COUNTS, 0.0)
        self._validation: float | None = None

    def event(self, event: Event) -> None:
        """Counts what happened."""
        for name, amount in _counted(event):
            self._counts[name] += amount
        if isinstance(event, EvaluationEvent):
            self._validation = event.loss

    def refresh(self, status: StatusReply) -> None:
        """Takes note of how things stand."""
        self._status = status

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return text_of(self)

    def collect(self) -> Iterator[Metric]:
        """What prometheus-client asks a collector."""
        status = self._status
        yield from gauges("atoll_", RUN, status)
        if self._validation is not None:
            yield GaugeMetricFamily("atoll_validation_loss", "Of the last evaluation.", value=self._validation)
        yield labelled("atoll_state", "1 for the state that the run is in.", ("state",), _states(status))
        if status.HasField("safe_snapshot") or status.HasField("complete_snapshot"):
            newest = status.safe_snapshot if status.HasField("safe_snapshot") else status.complete_snapshot
            yield GaugeMetricFamily("atoll_snapshot_step", "What the run could go back to.", value=float(newest.step))
            yield GaugeMetricFamily("atoll_snapshot_age_seconds", "How old that is.", value=newest.age_seconds)
        yield from counters("atoll_", COUNTS, self._counts)
        yield from _of_peers(status.peers)
        yield from _of_links(status.links)
        yield labelled(
            "atoll_peer_step_part_seconds", "Of a peer's last step, by what it did.", ("peer", "part"), _parts(status)
        )


def _counted(event: Event) -> Iterator[tuple[str, float]]:
    match event:
        case StepEvent():
            yield "committed_steps", 1.0
            yield "committed_seconds", event.seconds
            yield "tokens", float(event.tokens)
        case VoidEvent():
            yield "void_steps", 1.0
        case ReplayedEvent():
            yield "replayed_steps", 1.0
        case RecoveredEvent():
            yield "recoveries", 1.0
            yield "recovery_seconds", event.seconds
        case MovedEvent():
            yield "moves", 1.0
        case SnapshotEvent() if not event.failure:
            yield "snapshots", 1.0
        case PeerEvent(state="lost"):
            yield "peers_lost", 1.0


def _states(status: StatusReply) -> Iterator[tuple[tuple[str, ...], float]]:
    for state in STATES:
        yield (state,), float(state == status.state)


def _parts(status: StatusReply) -> Iterator[tuple[tuple[str, ...], float]]:
    for timeline in status.timelines:
        parts: dict[str, float] = {}
        for span in timeline.spans:
            parts[span.what] = parts.get(span.what, 0.0) + span.seconds
        for what, seconds in parts.items():
            yield (timeline.peer, what), seconds


def _of_peers(peers: Iterable[PeerStatus]) -> Iterator[Metric]:
    for name, help_text in PEER.items():
        samples = (((peer.name,), float(getattr(peer, name))) for peer in peers)
        yield labelled(f"atoll_peer_{name}", help_text, ("peer",), samples)


def _of_links(links: Iterable[LinkStatus]) -> Iterator[Metric]:
    labels = ("source", "target", "direction")
    for name, help_text in LINK.items():
        samples = (((link.source, link.target, link.direction), float(getattr(link, name))) for link in links)
        yield labelled(f"atoll_link_{name}", help_text, labels, samples)
    codecs = (((link.source, link.target, link.direction, link.codec), 1.0) for link in links)
    yield labelled("atoll_link_codec", "1 for the codec that a link uses.", (*labels, "codec"), codecs)
