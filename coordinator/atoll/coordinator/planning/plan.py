"""What a placement decides, as values: which peer runs which nodes, and what that is predicted to cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from atoll.compression.context import Direction
from atoll.coordinator.planning.dealing import deal_to_all
from atoll.protocol.groups import Group
from atoll.protocol.ids import MicrobatchIndex, NodeIndex, PeerId, StageIndex

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """What one replica of a stage is predicted to need and to do, as said of the stage."""

    peer: PeerId
    in_flight: int
    memory_bytes: int
    microbatch_seconds: float
    step_compute_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Stage ``stage``: each of its ``replicas`` runs the nodes from ``first`` up to, not including, ``end``, for its part of
    the microbatches.

    The replicas stand in the order in which their gradients are summed; ``deal`` says which of them each microbatch of a step
    goes to (``atoll.protocol.groups``).
    ``memory_bytes`` is the predicted need with ``in_flight`` microbatches held, ``microbatch_seconds`` the predicted time of
    one microbatch forward and backward alone on its machine, ``sent_bytes`` what crosses to later stages in one forward.
    ``step_compute_seconds`` is how long the stage is predicted to compute in a step, beside what else runs on its machine; 0
    where nothing was predicted. Where replicas differ these are the leader's, and ``differing`` has those of each."""

    stage: StageIndex
    replicas: tuple[PeerId, ...]
    first: NodeIndex
    end: NodeIndex
    in_flight: int
    recompute: bool
    memory_bytes: int
    microbatch_seconds: float
    sent_bytes: int
    step_compute_seconds: float = 0.0
    deal: tuple[int, ...] = ()
    differing: tuple[ReplicaPlan, ...] = ()

    def __post_init__(self) -> None:
        Group(stage=self.stage, replicas=self.replicas, deal=self.deal)  # raises ValueError for what does not go together

    @property
    def group(self) -> Group:
        """The replicas as everybody is told of them. Raises ValueError where the deal does not suit them."""
        return Group(stage=self.stage, replicas=self.replicas, deal=self.deal)

    @property
    def leader(self) -> PeerId:
        """Who speaks for the stage where one is enough."""
        return self.replicas[0]

    def of(self, peer: PeerId) -> ReplicaPlan:
        """What is predicted for one of the replicas."""
        found = next((replica for replica in self.differing if replica.peer == peer), None)
        return found or ReplicaPlan(
            peer=peer,
            in_flight=self.in_flight,
            memory_bytes=self.memory_bytes,
            microbatch_seconds=self.microbatch_seconds,
            step_compute_seconds=self.step_compute_seconds,
        )

    def dealt(self, replicas: tuple[PeerId, ...], deal: tuple[int, ...]) -> StagePlan:
        """The same on these of its replicas, dealt microbatches so: each computes as much longer as it has more of them."""
        differing = []
        for index, peer in enumerate(replicas):
            planned = self.of(peer)
            more = deal.count(index) / max(1, self.deal.count(self.replicas.index(peer)))
            differing.append(replace(planned, step_compute_seconds=planned.step_compute_seconds * more))
        seconds = differing[0].step_compute_seconds
        return replace(self, replicas=replicas, deal=deal, step_compute_seconds=seconds, differing=tuple(differing))

    @property
    def pace_seconds(self) -> float:
        """The time for a microbatch when all replicas compute: that of the one which takes longest for its part."""
        if not self.deal:
            return self.microbatch_seconds
        each = [self.of(peer).microbatch_seconds * self.deal.count(index) for index, peer in enumerate(self.replicas)]
        return max(each) / len(self.deal)

    def holder_of(self, microbatch: MicrobatchIndex) -> PeerId:
        """The replica that a microbatch goes to."""
        return self.group.holder_of(microbatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPlan:
    """One direction of the link between two neighbouring stages: ``num_bytes`` are a microbatch's as they cross, encoded,
    ``bytes_per_second`` is the rate that is counted on, and the link is busy for ``step_seconds`` of a step."""

    source: PeerId
    target: PeerId
    direction: Direction
    codec: str
    num_bytes: float
    bytes_per_second: float
    latency_seconds: float
    step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Stages in order; ``spares`` are the peers that got none, ``why_spare`` says of each why.

    ``step_seconds`` is what the simulator predicts, ``bottleneck`` a sentence about what holds the pipeline back, ``links``
    what the links between neighbours carry, each direction on its own, ``microbatch`` the samples in a microbatch, the same in
    all plans of a run.
    """

    stages: tuple[StagePlan, ...]
    spares: tuple[PeerId, ...]
    step_seconds: float
    why_spare: tuple[tuple[PeerId, str], ...] = ()
    bottleneck: str = ""
    links: tuple[LinkPlan, ...] = ()
    microbatch: int = 1

    @property
    def cuts(self) -> tuple[NodeIndex, ...]:
        """Where one stage ends and the next begins."""
        return tuple(stage.first for stage in self.stages[1:])

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The peers that hold a stage, in stage order; the replicas of one in the group's order."""
        return tuple(peer for stage in self.stages for peer in stage.replicas)

    @property
    def leaders(self) -> tuple[PeerId, ...]:
        """The first replica of each stage."""
        return tuple(stage.leader for stage in self.stages)

    def without(self, peer: PeerId) -> Plan | None:
        """The same with the other replicas of that peer's stage, to whom its microbatches are dealt by the shares that they
        have; None where there are none."""
        stage = next((stage for stage in self.stages if peer in stage.replicas), None)
        if stage is None or len(stage.replicas) == 1:
            return None
        left = tuple(replica for replica in stage.replicas if replica != peer)
        shares = [float(stage.deal.count(stage.replicas.index(replica))) for replica in left]
        dealt = stage.dealt(left, deal_to_all(shares, len(stage.deal)))
        links = tuple(link for link in self.links if peer not in (link.source, link.target))
        return replace(self.having(dealt), links=links)

    def having(self, stage: StagePlan) -> Plan:
        """The same with another stage in the place of that with its number."""
        return replace(self, stages=(*self.stages[: stage.stage], stage, *self.stages[stage.stage + 1 :]))

    def spread(self, of_stages: Sequence[Value]) -> tuple[Value, ...]:
        """What there is of each stage, for each of :attr:`peers`."""
        return tuple(of_stages[stage.stage] for stage in self.stages for _ in stage.replicas)

    def stage_of(self, peer: PeerId) -> StageIndex | None:
        """The stage that ``peer`` holds, if any."""
        return next((stage.stage for stage in self.stages if peer in stage.replicas), None)
