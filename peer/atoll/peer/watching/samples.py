"""A peer's numbers for Prometheus, from what it knows of itself. Pure.

Names begin with ``atoll_own_``, so that nothing is counted twice where the coordinator is watched too, which knows some of this
from reports. Labels are fixed words and the names of present neighbours, nothing that grows with time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.peer.links.usage import Reception
from atoll.peer.watching.doings import Doings
from atoll.protocol.exposition import counters, gauges, labelled, labelled_counter
from atoll.protocol.ids import PeerId
from atoll.protocol.v1 import session_pb2

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PREFIX = "atoll_own_"

NOW = {
    "stage": "The stage that it holds, -1 without one.",
    "generation": "Number of the plan.",
    "step": "The step that it is at.",
    "memory_bytes": "Memory of the process, or of it on the device.",
    "grown_memory_bytes": "By how much that has grown at most since it joined.",
    "predicted_memory_bytes": "By how much the plan expects it to grow.",
    "queued_commands": "What computing has not taken up yet.",
    "queued_codings": "Messages that wait to be encoded or decoded.",
    "lease_age_seconds": "Since it last spoke to the coordinator; its lease is over when this grows too long.",
    "fetched_bytes": "State that has come from other peers.",
}
COUNTS = {
    "steps": "Steps of training that it did its part of.",
    "evaluations": "Evaluations that it did its part of.",
    "void_steps": "Steps that it dropped.",
    "faults": "What went wrong here.",
    "snapshots": "Snapshots that it has written.",
}
LINK_COUNTS = {
    "bytes": "Sent.",
    "raw_bytes": "What of it may lose bits would have taken raw.",
    "messages": "Messages that may lose bits.",
    "seconds_busy": "For which something was under way that the neighbour had not acknowledged: sending.",
}
LINK_NOW = {
    "relative_error": "Of what the codec gave last.",
    "bytes_per_second": "What the link has lately shown that it can do.",
    "round_trip_seconds": "The shortest seen.",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Standing:
    """How a peer stands at the moment ``now``. ``links`` is what it has sent and ``receptions`` what it has received, of any
    neighbour that it ever had; ``unacknowledged`` are messages that present neighbours do not have yet, by whose names it is
    known who those are."""

    now: float
    peer: PeerId
    run: str
    device: str
    session: str
    states: tuple[str, ...]
    stage: int
    generation: int
    step: int
    memory_bytes: int
    grown_memory_bytes: int
    queued_commands: int
    queued_codings: int
    lease_age_seconds: float
    fetched_bytes: int
    doings: Doings
    coding_seconds: Mapping[str, float] = field(default_factory=dict)
    links: tuple[session_pb2.LinkUse, ...] = ()
    receptions: Mapping[PeerId, Reception] = field(default_factory=dict)
    unacknowledged: Mapping[PeerId, int] = field(default_factory=dict)

    @property
    def predicted_memory_bytes(self) -> int:
        """By how much the plan expects it to grow."""
        return self.doings.predicted_memory_bytes

    def collect(self) -> Iterator[Metric]:
        """What prometheus-client asks a collector."""
        who = (self.peer, self.run, self.device)
        yield labelled(f"{PREFIX}info", "1: who this is.", ("peer", "run", "device"), [(who, 1.0)])
        states = (((state,), float(state == self.session)) for state in self.states)
        yield labelled(f"{PREFIX}session", "1 for the state that its session is in.", ("state",), states)
        yield from gauges(PREFIX, NOW, self)
        if self.doings.snapshot is not None:
            step, known = self.doings.snapshot
            yield labelled(f"{PREFIX}snapshot_step", "Of the newest snapshot on its disk.", (), [((), float(step))])
            yield labelled(f"{PREFIX}snapshot_age_seconds", "Since that was written.", (), [((), self.now - known)])
        yield from counters(PREFIX, COUNTS, self.doings.counts)
        parts = (((part,), seconds) for part, seconds in sorted(self.doings.seconds.items()))
        yield labelled_counter(
            f"{PREFIX}seconds", "Of the thread that computes, by what it did or waited for.", ("part",), parts
        )
        coded = (((what,), seconds) for what, seconds in sorted(self.coding_seconds.items()))
        yield labelled_counter(f"{PREFIX}coding_seconds", "Of the thread beside it, for codecs.", ("part",), coded)
        yield from self._links()

    def _links(self) -> Iterator[Metric]:
        links = [link for link in self.links if link.target in self.unacknowledged]
        labels = ("target", "direction")
        for name, text in LINK_COUNTS.items():
            samples = (((link.target, link.direction), float(getattr(link, name))) for link in links)
            yield labelled_counter(f"{PREFIX}link_{name}", text, labels, samples)
        for name, text in LINK_NOW.items():
            samples = (((link.target, link.direction), float(getattr(link, name))) for link in links)
            yield labelled(f"{PREFIX}link_{name}", text, labels, samples)
        codecs = (((link.target, link.direction, link.codec), 1.0) for link in links)
        yield labelled(f"{PREFIX}link_codec", "1 for the codec that a link uses.", (*labels, "codec"), codecs)
        waiting = (((peer,), float(number)) for peer, number in sorted(self.unacknowledged.items()))
        yield labelled(f"{PREFIX}link_unacknowledged", "Messages that a neighbour does not have yet.", ("target",), waiting)
        received = [(peer, self.receptions[peer]) for peer in sorted(self.unacknowledged) if peer in self.receptions]
        came = (((peer,), float(reception.num_bytes)) for peer, reception in received)
        yield labelled_counter(f"{PREFIX}received_bytes", "From a neighbour.", ("source",), came)
        took = (((peer,), reception.seconds) for peer, reception in received)
        text = "For which a message of a neighbour's was here in part: receiving."
        yield labelled_counter(f"{PREFIX}receiving_seconds", text, ("source",), took)
