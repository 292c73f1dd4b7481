"""What a stage did in one step, and when: work, and waiting for what. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.ids import MicrobatchIndex, PeerId

SHORTEST_WAIT_SECONDS = 1e-4
"""Gaps below this are the thread's own."""
MOST_SPANS = 1000
"""Of one step; a report stays small whatever a job's number of microbatches. What comes after is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """``begin_seconds`` counts from when the step began on this peer. ``what`` is a kind of work, or ``waiting for ...``, with
    the ``peer`` that it waited for (None: the coordinator, or nobody)."""

    what: str
    microbatch: MicrobatchIndex | None
    begin_seconds: float
    seconds: float
    peer: PeerId | None = None


class Timeline:
    """Is told of work as it ends, and of waiting whenever there is nothing to do. ``now`` is when the step began."""

    def __init__(self, now: float) -> None:
        self._start = self._until = now
        self._awaited: tuple[str, PeerId | None] | None = None
        self._spans: list[Span] = []

    def waits(self, what: str, peer: PeerId | None) -> None:
        """There is nothing to do before ``what`` is here; the first such word after a piece of work counts."""
        if self._awaited is None and what:
            self._awaited = (what, peer)

    def worked(self, what: str, microbatch: MicrobatchIndex | None, began: float, ended: float) -> None:
        """A piece of work is done; what it had to wait for before ends with its beginning."""
        if self._awaited is not None and began - self._until >= SHORTEST_WAIT_SECONDS:
            awaited, peer = self._awaited
            self._add(f"waiting for {awaited}", None, self._until, began, peer)
        self._add(what, microbatch, began, ended, None)
        self._awaited, self._until = None, ended

    @property
    def spans(self) -> tuple[Span, ...]:
        """In the order of time."""
        return tuple(self._spans)

    def _add(self, what: str, microbatch: MicrobatchIndex | None, began: float, ended: float, peer: PeerId | None) -> None:
        if len(self._spans) < MOST_SPANS:
            begin = began - self._start
            self._spans.append(Span(what=what, microbatch=microbatch, begin_seconds=begin, seconds=ended - began, peer=peer))
