"""Which codec each link of the plan uses, step by step: what the policy is told, what it decided, and why. Pure.

A link is an ordered pair of peers: activations go from an earlier stage to a later one, gradients back, so each pair is one
direction. A plan brings first choices; after each committed step the policy may change some, for the next step and whatever is
run again of it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from atoll.compression.context import Direction
from atoll.compression.policy import CodecPolicy, Demand, Pace, Rung, first_choices
from atoll.coordinator.planning.codecs import adaptive_codecs, codec_between, codecs_allowed, coding_shares, link_rate
from atoll.coordinator.planning.network import Network
from atoll.coordinator.planning.plan import Plan
from atoll.coordinator.planning.segments import PeerOffer
from atoll.coordinator.run.instructions import WriteCommit
from atoll.coordinator.survey.observed import Observed
from atoll.protocol.codec_names import ADAPTIVE
from atoll.protocol.graph import StageGraph
from atoll.protocol.groups import Group
from atoll.protocol.ids import MicrobatchIndex, PeerId, StepNumber
from atoll.protocol.job import Compression
from atoll.protocol.v1 import session_pb2

_log = logging.getLogger(__name__)

Ends = tuple[PeerId, PeerId]

MOST_DAMAGE = 0.005
"""The part of the loss that the codecs of all links together may cost in training, by the guard's estimate: half of the one
percent that is to be kept at the end of a run. How the two hang together has not been measured over whole runs."""
MOST_GRADIENT_ERROR = 0.4
"""Relative, of gradients. Without bias, 0.2 has cost nothing and 0.65 two or three percent of the loss."""
MOST_GRADIENT_BIAS = 0.1
"""By what part of their length gradients may arrive too short: what descends is then slower by as much at most."""
FEWEST_SAMPLES = 3
"""Before an estimate counts: single microbatches differ by several times."""
AVERAGED_SAMPLES = 9
"""What the guard's means are of, at most."""
REMEMBERED_STEPS = 5
RAW = "raw"
FEWEST_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecChange:
    """From ``step`` on ``source`` encodes what it sends to ``target`` with ``codec``, for this reason."""

    step: StepNumber
    source: PeerId
    target: PeerId
    codec: str
    reason: str


@dataclass(slots=True, kw_only=True)
class _Edge:
    """One direction of a link; ``users`` is how many links share the lines of its ends, ``shares`` what computing loses
    there of each second of coding."""

    direction: Direction
    source: PeerOffer
    target: PeerOffer
    planned_bytes: float
    users: tuple[int, int]
    shares: tuple[float, float]
    use: session_pb2.LinkUse = field(default_factory=session_pb2.LinkUse)

    @property
    def raw_bytes(self) -> float:
        """Of a microbatch: as it was seen, else by the graph."""
        return self.use.raw_bytes / self.use.messages if self.use.messages else self.planned_bytes

    @property
    def seen_rate(self) -> float | None:
        """What traffic has lately shown, by the sender's own mean, which slow transfers weigh down at once."""
        rate = self.use.bytes_per_second
        return rate if math.isfinite(rate) and rate > 0.0 else None

    def rungs(self, names: Sequence[str]) -> tuple[Rung, ...]:
        return tuple(codec_between(name, self.source, self.target) for name in names)


class CodecChoices:
    """``planned`` a plan, tell it what was ``carried`` and each step that was ``committed``, then ask what ``changes``.
    ``lossless``: no link of the run has ever used a codec that may lose anything, as far as is known."""

    def __init__(self, compression: Compression, observed: Observed) -> None:
        self._names = {
            Direction.FORWARD: codecs_allowed(compression.forward, compression),
            Direction.BACKWARD: codecs_allowed(compression.backward, compression),
        }
        self._adaptive = {
            way
            for way, name in ((Direction.FORWARD, compression.forward), (Direction.BACKWARD, compression.backward))
            if name == ADAPTIVE
        }
        self._observed = observed
        self._policy: CodecPolicy[Ends] = CodecPolicy()
        self._edges: dict[Ends, _Edge] = {}
        self._network: Network | None = None
        self._peers: tuple[PeerId, ...] = ()
        self._num_microbatches = 1
        self._seconds: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._num_tokens, self._loss = 0, math.nan
        self._decided = StepNumber(0)
        self._warm = False
        self._before: Mapping[Ends, str] = {}
        self.lossless = True

    def resume(self, codecs: Mapping[Ends, str]) -> None:
        """The run goes on: what links had in use, which the first plan keeps where it can."""
        self._before = codecs
        self.lossless = all(codec == RAW for codec in codecs.values())

    def planned(
        self,
        plan: Plan,
        graphs: Sequence[StageGraph],
        offers: Iterable[PeerOffer],
        network: Network,
        *,
        num_microbatches: int,
        next_step: StepNumber,
    ) -> tuple[CodecChange, ...]:
        """The first choices for a plan, which are in force from ``next_step`` on."""
        self._network, self._peers, self._num_microbatches = network, plan.peers, num_microbatches
        self._edges = _edges(plan, graphs, {offer.name: offer for offer in offers})
        self._policy.keep_only(self._edges)
        self._seconds.clear()
        self._warm = False
        planned = {(link.source, link.target): link.codec for link in plan.links}
        rungs = {ends: edge.rungs(names) for (ends, edge), names in zip(self._edges.items(), self._allowed(), strict=True)}
        computing = [stage.pace_seconds for stage in plan.stages]
        pace = Pace(
            microbatch_seconds=max(computing),
            num_microbatches=num_microbatches,
            fill_seconds=sum(computing) - max(computing),
        )
        demands = [self._demand(ends) for ends in self._edges]
        for ends, first in zip(self._edges, first_choices(list(rungs.values()), demands, pace), strict=True):
            names = [rung.name for rung in rungs[ends]]
            wanted = self._before.get(ends, planned.get(ends))
            self._policy.start(ends, rungs[ends], wanted if wanted in names else first.name)
        self._decided = next_step
        before, self._before = self._before, {}
        return tuple(
            CodecChange(
                step=next_step,
                source=ends[0],
                target=ends[1],
                codec=codec,
                reason="as before the restart" if before.get(ends) == codec else "the plan's choice",
            )
            for ends, codec in self._policy.codecs.items()
        )

    def _allowed(self) -> list[tuple[str, ...]]:
        """The codecs that each link may use."""
        if not self._adaptive:
            return [self._names[edge.direction] for edge in self._edges.values()]
        demands = {ends: self._demand(ends) for ends in self._edges}
        adaptive = adaptive_codecs({ends: demand.raw_bytes / demand.bytes_per_second for ends, demand in demands.items()})
        return [
            (adaptive[ends],) if edge.direction in self._adaptive else self._names[edge.direction]
            for ends, edge in self._edges.items()
        ]

    def carried(self, uses: Iterable[session_pb2.LinkUse]) -> None:
        """What peers report of the links of the plan."""
        for use in uses:
            edge = self._edges.get((PeerId(use.source), PeerId(use.target)))
            if edge is not None and use.direction == edge.direction:
                edge.use = use

    def committed(self, commit: WriteCommit) -> None:
        """A step was committed. The first one under a plan pays for buffers and caches, and is no measure."""
        if self._warm:
            self._seconds.append(commit.seconds)
        self._warm = True
        self._num_tokens, self._loss = commit.num_tokens, commit.loss

    def changes(self, step: StepNumber) -> tuple[CodecChange, ...]:
        """What changes for ``step``. A step that is run again is run as it was."""
        if step <= self._decided:
            return ()
        self._decided = step
        pace = self._pace()
        demands = {} if pace is None else {ends: self._demand(ends) for ends in self._edges}
        chosen = self._policy.decide(step, demands, pace or Pace(microbatch_seconds=0.0, num_microbatches=1), self._harm())
        if chosen:
            self._seconds.clear()
        changes = []
        for choice in chosen:
            source, target = choice.place
            _log.info("link %s -> %s: %s from step %d on: %s", source, target, choice.codec, step, choice.reason)
            changes.append(CodecChange(step=step, source=source, target=target, codec=choice.codec, reason=choice.reason))
        return tuple(changes)

    def of(self, source: PeerId, *, raw: bool = False) -> Mapping[PeerId, str]:
        """What ``source`` encodes with for each peer that it sends to; ``raw``: if nothing may be lost."""
        used = {target: RAW if raw else codec for (one, target), codec in self._policy.codecs.items() if one == source}
        self.lossless = self.lossless and all(codec == RAW for codec in used.values())
        return used

    def codec(self, source: PeerId, target: PeerId) -> str:
        """In use now; empty for a link that is none of the plan's."""
        return self._policy.codecs.get((source, target), "")

    def damage(self, use: session_pb2.LinkUse) -> float | None:
        """The part of the loss that a codec of activations costs, by what the sender's guard saw (``loss_guard`` says what that
        is); None where it is not known."""
        finite = all(math.isfinite(value) for value in (use.slope, use.curvature, self._loss))
        if use.direction != Direction.FORWARD or use.guarded < FEWEST_SAMPLES or not finite or self._loss <= 0.0:
            return None
        # Gradients are those of the mean over all tokens of the step, the curvature is that of their sum.
        curved = 0.5 * self._num_tokens * use.curvature
        straight = max(0.0, -use.slope) + 2.0 * math.sqrt(use.curvature / min(use.guarded, AVERAGED_SAMPLES))
        return self._num_microbatches * min(curved, straight) / self._loss

    def _harm(self) -> dict[Ends, str]:
        return {ends: why for ends, edge in self._edges.items() if (why := self._harm_of(ends, edge.use))}

    def _harm_of(self, ends: Ends, use: session_pb2.LinkUse) -> str:
        if use.codec != self.codec(*ends) or use.guarded < FEWEST_SAMPLES:
            return ""
        damage, allowed = self.damage(use), MOST_DAMAGE / self._num_forward
        if damage is not None and damage > allowed:
            return f"costs {damage:.2%} of the loss, and {allowed:.2%} is allowed"
        if use.direction == Direction.BACKWARD and use.relative_error > MOST_GRADIENT_ERROR:
            return f"changes gradients by {use.relative_error:.0%}, and {MOST_GRADIENT_ERROR:.0%} is allowed"
        if use.direction == Direction.BACKWARD and use.bias > MOST_GRADIENT_BIAS:
            return f"makes gradients {use.bias:.0%} too short, and {MOST_GRADIENT_BIAS:.0%} is allowed"
        return ""

    @property
    def _num_forward(self) -> int:
        return sum(edge.direction is Direction.FORWARD for edge in self._edges.values())

    def _pace(self) -> Pace | None:
        """By what was seen of steps under this plan and these codecs; None before there was enough."""
        seconds = [self._observed.compute_seconds(peer) for peer in self._peers]
        if len(self._seconds) < FEWEST_STEPS or not all(seconds):
            return None
        return Pace(
            microbatch_seconds=max(seconds) / self._num_microbatches,
            num_microbatches=self._num_microbatches,
            fill_seconds=(sum(seconds) - max(seconds)) / self._num_microbatches,
            step_seconds=median(self._seconds),
        )

    def _demand(self, ends: Ends) -> Demand:
        assert self._network is not None, "links belong to a plan"
        edge = self._edges[ends]
        rate = link_rate(self._network, edge.source, edge.target, edge.users, edge.seen_rate)
        encoding, decoding = edge.shares
        return Demand(raw_bytes=edge.raw_bytes, bytes_per_second=rate, encoding_share=encoding, decoding_share=decoding)


def _edges(plan: Plan, graphs: Sequence[StageGraph], offers: Mapping[PeerId, PeerOffer]) -> dict[Ends, _Edge]:
    """Every pair of peers that exchange activations or gradients, with what crosses in a microbatch on average: replicas have
    only some of a step's in common."""
    sizes: defaultdict[Ends, float] = defaultdict(float)
    for graph in graphs:
        bindings = dict(graph.example)
        for boundary in graph.sends:
            if boundary.spec.dtype.is_floating_point:
                num_bytes = boundary.spec.num_bytes(bindings)
                for (one, other), part in _parts(plan.stages[boundary.source].group, plan.stages[boundary.target].group):
                    sizes[one, other] += part * num_bytes
                    if boundary.differentiable:
                        sizes[other, one] += part * num_bytes
    sends, receives = Counter(one for one, _ in sizes), Counter(other for _, other in sizes)
    places = {peer: place for place, peer in enumerate(plan.peers)}
    shares = coding_shares([offers[peer] for peer in plan.peers])
    return {
        (one, other): _Edge(
            direction=Direction.FORWARD if places[one] < places[other] else Direction.BACKWARD,
            source=offers[one],
            target=offers[other],
            planned_bytes=size,
            users=(sends[one], receives[other]),
            shares=(shares[places[one]], shares[places[other]]),
        )
        for (one, other), size in sizes.items()
    }


def _parts(source: Group, target: Group) -> Iterator[tuple[Ends, float]]:
    """For each pair of replicas of two stages the part of a step's microbatches that both have."""
    num = max(len(source.deal), len(target.deal), 1)
    pairs = Counter((source.holder_of(index), target.holder_of(index)) for index in map(MicrobatchIndex, range(num)))
    for ends, count in pairs.items():
        yield ends, count / num
