"""What real traffic shows: how much slower than planned each peer computes, and how fast the busy links are. Pure.

Peers that share a machine take longer because they share it, not because they are slow; so what a stage took is compared with
what the simulator predicted for it, sharing included. Both follow as moving averages: one slow step changes little."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from atoll.coordinator.planning.plan import Plan
from atoll.protocol.ids import PeerId
from atoll.protocol.v1 import session_pb2

WEIGHT = 0.25
"""Of the newest step in a moving average."""
WARMING_STEPS = 1
"""The first steps under a plan pay for buffers and caches, and are no measure of speed."""
LARGEST_FACTOR = 64.0
"""How far from its prediction a peer's time is believed to be."""
REMEMBERED_STEPS = 20


@dataclass(slots=True)
class _Peer:
    predicted: float | None = None
    slowdown: float = 1.0
    baked: float = 1.0
    steps: int = 0
    seen: bool = False
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))


@dataclass(slots=True)
class _Link:
    seconds: float = 0.0
    rate: float | None = None
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))


class Observed:
    """Takes in reports of steps. ``slowdown`` is relative to the plan in force, ``factor`` to what was measured beforehand."""

    def __init__(self) -> None:
        self._peers: dict[PeerId, _Peer] = {}
        self._links: dict[tuple[PeerId, PeerId], _Link] = {}

    def planned(self, plan: Plan, factors: Mapping[PeerId, float]) -> None:
        """A new plan is in force, made in the belief that peers take ``factors`` times longer than was measured."""
        for name, peer in self._peers.items():
            peer.baked = factors.get(name, peer.baked * peer.slowdown)
            peer.slowdown, peer.predicted, peer.steps = 1.0, None, 0
            peer.seconds.clear()
        for stage in plan.stages:
            for name in stage.replicas:
                peer = self._peers.setdefault(name, _Peer(baked=factors.get(name, 1.0)))
                peer.predicted = stage.of(name).step_compute_seconds or None
        for link in self._links.values():
            link.step_seconds.clear()

    def reported(self, name: PeerId, report: session_pb2.StageReport) -> None:
        """A stage has done a step of training."""
        peer = self._peers.get(name)
        if report.evaluation or peer is None or not (math.isfinite(report.compute_seconds) and report.compute_seconds > 0.0):
            return
        peer.steps += 1
        if peer.steps <= WARMING_STEPS:
            return
        peer.seen = True
        peer.seconds.append(report.compute_seconds)
        if peer.predicted is not None:
            ratio = min(max(report.compute_seconds / peer.predicted, 1.0 / LARGEST_FACTOR), LARGEST_FACTOR)
            # The average of logarithms: twice as slow and twice as fast are equally far.
            peer.slowdown = math.exp(_follow(math.log(peer.slowdown), math.log(ratio), WEIGHT if peer.steps > 2 else 1.0))

    def carried(self, name: PeerId, uses: Iterable[session_pb2.LinkUse], *, evaluation: bool = False) -> None:
        """What a peer's links have carried since it started, told after each step; an evaluation is no step of training."""
        busy: dict[PeerId, float] = {}
        for use in uses:
            target = PeerId(use.target)
            busy[target] = busy.get(target, 0.0) + use.seconds_busy
            rate, link = use.bytes_per_second, self._links.setdefault((name, target), _Link())
            if math.isfinite(rate) and rate > 0.0:
                link.rate = rate if link.rate is None else _follow(link.rate, rate, WEIGHT)
        for target, total in busy.items():
            link = self._links[name, target]
            seconds, link.seconds = total - link.seconds, total
            if not evaluation and math.isfinite(seconds) and seconds >= 0.0:  # below zero, the peer has started anew
                link.step_seconds.append(seconds)

    def forget(self, name: PeerId) -> None:
        """The peer is gone; its successor starts afresh."""
        self._peers.pop(name, None)
        self._links = {pair: link for pair, link in self._links.items() if name not in pair}

    def slowdown(self, name: PeerId) -> float:
        """How many times longer than predicted the peer's stage computes in a step; 1 before a step was seen."""
        return self._peers[name].slowdown if name in self._peers else 1.0

    def factor(self, name: PeerId) -> float:
        """How many times longer than was measured before the peer takes."""
        peer = self._peers.get(name)
        return 1.0 if peer is None else peer.baked * peer.slowdown

    def is_seen(self, name: PeerId) -> bool:
        """Whether a step has shown anything of the peer's speed."""
        peer = self._peers.get(name)
        return peer is not None and peer.seen

    def compute_seconds(self, name: PeerId) -> float:
        """The middle of what the peer's last steps took; 0 before there are any."""
        peer = self._peers.get(name)
        return median(peer.seconds) if peer is not None and peer.seconds else 0.0

    def transfer_seconds(self, source: PeerId, target: PeerId) -> float:
        """The middle of how long sending took in the last steps; 0 before there are any."""
        link = self._links.get((source, target))
        return median(link.step_seconds) if link is not None and link.step_seconds else 0.0

    @property
    def rates(self) -> Mapping[tuple[PeerId, PeerId], float]:
        """Bytes a second that the links have shown they can carry."""
        return {pair: link.rate for pair, link in self._links.items() if link.rate is not None}


def _follow(old: float, new: float, weight: float) -> float:
    return old + weight * (new - old)
