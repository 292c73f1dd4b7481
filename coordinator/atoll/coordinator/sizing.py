"""How many samples a microbatch has: as many as the job says, or as suit the peers of the run's first plan.

Theory of operation. Small microbatches fill a pipeline sooner and hold less memory, large ones pay less often for starting
work, for streaming a stage's weights through the processor and for a link's delay. With ``training.microbatch: auto`` the
model is traced once, with sizes that vary, costed at several sizes that divide the global batch, and each is planned for.
Nothing was measured by then, for peers measure real microbatches: speeds are what peers said at joining, with what starting
work costs on top. So the two sizes with the shortest steps are both measured if they are close, and the larger one is taken
unless the other is faster by more than predictions err.

The size decides which samples share a sum of gradients, and with that the last bits of the weights. So it is chosen once, and
every later plan of the run has the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.coordinator.data.feed import Feed
from atoll.coordinator.data.opening import open_feed
from atoll.coordinator.planning.network import Network
from atoll.coordinator.planning.planner import MicrobatchOption, plan_microbatches
from atoll.coordinator.planning.segments import PeerOffer
from atoll.coordinator.traced_model import TracedModel, trace_model, with_sizes_of
from atoll.protocol.errors import JobError
from atoll.protocol.graph import OpGraph
from atoll.protocol.job import Job

_log = logging.getLogger(__name__)

MOST_SIZES = 6
"""Each is planned for, and planning for a large swarm takes seconds."""
WORK_SECONDS = 1e-3
"""What one forward or backward of a stage costs whatever its size: messages, and choosing what comes next."""
NODE_SECONDS = 2e-5
"""What starting an operator costs whatever its size."""
CLOSE = 0.1
"""By how much longer a step may be, by estimate, for its size to be measured as well: estimates know neither how much slower a
processor is with little work at a time, nor what a microbatch costs for the weights that it passes."""
WORTH_SMALLER = 0.06
"""By how much of a step a smaller microbatch must be faster, by prediction: it means more messages, which cost more than is
predicted wherever processors have other things to do. Measured on two busy cores, steps of microbatches of one sequence were
predicted 7 to 11 % too short, of two 1 to 4 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """The model and the data of a run, in microbatches of one size. ``step_seconds`` are an estimate, 0 without one."""

    model: TracedModel
    feed: Feed
    step_seconds: float = 0.0


class Sizing:
    """What there is to choose from: ``feeds`` by size, of which ``traced`` is one. ``asked``: the job leaves it open."""

    def __init__(self, traced: Sized, feeds: Mapping[int, Feed], *, asked: bool) -> None:
        self.asked = asked
        self._traced = traced
        self._feeds = feeds

    @property
    def graph(self) -> OpGraph:
        return self._traced.model.graph

    @property
    def trainable(self) -> tuple[str, ...]:
        """The trained parameters, in the graph's order."""
        return self._traced.model.trainable

    @property
    def changing(self) -> frozenset[str]:
        """The parameters and buffers whose state training changes."""
        return self._traced.model.changing

    def candidates(self, peers: Sequence[PeerOffer], network: Network | None = None) -> tuple[Sized, ...]:
        """The size with the shortest step on ``peers`` by estimate, and the next best where it is close; the larger one first.
        Takes seconds. Raises PlacementError when none fits."""
        if len(self._feeds) == 1:
            return (self._traced,)
        models = {size: with_sizes_of(self._traced.model, feed) for size, feed in self._feeds.items()}
        plans = plan_microbatches(
            MicrobatchOption(num_samples=size, request=model.request(_with_overhead(model, peers), network))
            for size, model in models.items()
        )
        seconds = {option.num_samples: planned.step_seconds for option, planned in plans}
        sizes = close_to_best(seconds)
        _log.info("seconds a step by size of microbatch, as estimated: %s; considered: %s", seconds, sizes)
        return tuple(_sized(models[size], self._feeds[size], seconds[size]) for size in sizes)

    def choose(self, peers: Sequence[PeerOffer], network: Network | None = None) -> Sized:
        """The size that estimates alone speak for. Raises PlacementError when none fits."""
        candidates = {sized.feed.microbatch: sized for sized in self.candidates(peers, network)}
        return candidates[preferred({size: sized.step_seconds for size, sized in candidates.items()})]


def _sized(model: TracedModel, feed: Feed, step_seconds: float) -> Sized:
    """A trace for varying sizes says nothing about 1, which operators may treat as a size to repeat."""
    model = trace_model(model.job, feed) if feed.microbatch == 1 else model
    return Sized(model=model, feed=feed, step_seconds=step_seconds)


def close_to_best(seconds: Mapping[int, float]) -> tuple[int, ...]:
    """Of sizes with the seconds of their steps the best and perhaps one that is close to it, the larger one first. Of equal
    ones the larger is better."""
    best, *others = sorted(seconds, key=lambda size: (seconds[size], -size))
    close = [size for size in others[:1] if seconds[size] <= (1.0 + CLOSE) * seconds[best]]
    return tuple(sorted((best, *close), reverse=True))


def preferred(seconds: Mapping[int, float]) -> int:
    """Of sizes with the predicted seconds of their steps the largest that none is notably faster than."""
    fastest = min(seconds.values())
    return max(size for size in seconds if seconds[size] * (1.0 - WORTH_SMALLER) <= fastest)


def open_sizing(job: Job, cache: Path) -> Sizing:
    """Open the data and trace the model; takes seconds. Raises JobError or TraceError with what to change."""
    sizes = job.training.microbatch_sizes
    feed = open_feed(job.with_microbatch(sizes[0]), cache)
    feeds = {sizes[0]: feed}
    for size in some_of(sizes)[1:]:
        try:
            feeds[size] = feed.with_microbatch(size)
        except JobError:  # there are fewer validation samples
            break
    traced = next((size for size in feeds if size > 1), sizes[0])
    model = trace_model(job.with_microbatch(traced), feeds[traced])
    return Sizing(Sized(model=model, feed=feeds[traced]), feeds, asked=job.training.microbatch == "auto")


def some_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """At most ``MOST_SIZES`` of ``sizes``, which rise: the first, the last and those between that are most evenly apart."""
    last = len(sizes) - 1
    if last < MOST_SIZES:
        return tuple(sizes)
    return tuple(sizes[round(number * last / (MOST_SIZES - 1))] for number in range(MOST_SIZES))


def _with_overhead(model: TracedModel, peers: Sequence[PeerOffer]) -> tuple[PeerOffer, ...]:
    """The peers with what starting work costs them, and without what they measured: that was at one size."""
    wanted = model.job.plan.stages
    num_stages = min(len(peers), model.segments.num_segments) if wanted == "auto" else wanted
    overhead = WORK_SECONDS + NODE_SECONDS * len(model.graph.nodes) / max(1, num_stages)
    return tuple(replace(peer, measured=None, overhead_seconds=max(overhead, peer.overhead_seconds)) for peer in peers)
