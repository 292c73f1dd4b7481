"""Who computed, sent and waited in the last step, as peers report it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from atoll.protocol.ids import PeerId
from atoll.protocol.v1 import session_pb2

MOST_SPANS = 1000
"""Of one peer and step; a peer must not fill our memory."""
MOST_LETTERS = 80


class Timelines:
    """Keeps each peer's last step of training."""

    def __init__(self) -> None:
        self._steps: dict[PeerId, tuple[int, tuple[session_pb2.Span, ...]]] = {}

    def reported(self, peer: PeerId, report: session_pb2.StageReport) -> None:
        """A stage has done a step; an evaluation leaves what is known of training."""
        if not report.evaluation:
            self._steps[peer] = (report.step, tuple(_sound(report.spans)))

    def keep(self, peers: Iterable[PeerId]) -> None:
        """The plan has these peers; what others did is no part of the picture any more."""
        known = set(peers)
        self._steps = {peer: step for peer, step in self._steps.items() if peer in known}

    @property
    def last(self) -> Mapping[PeerId, tuple[int, tuple[session_pb2.Span, ...]]]:
        """By peer: the step, and its spans in the order of time."""
        return self._steps


def _sound(spans: Iterable[session_pb2.Span]) -> Iterable[session_pb2.Span]:
    """What a peer may be believed to have meant."""
    for number, span in enumerate(spans):
        if number >= MOST_SPANS:
            return
        times = (span.begin_seconds, span.seconds)
        if all(math.isfinite(one) and one >= 0.0 for one in times) and len(span.what) <= MOST_LETTERS:
            yield span
