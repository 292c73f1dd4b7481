"""What a placement decides, as values: which peer runs which nodes, and what that is predicted to cost."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.compression.context import Direction
from atoll.protocol.ids import NodeIndex, PeerId, StageIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Stage ``stage``: peer ``peer`` runs the nodes from ``first`` up to, not including, ``end``.

    ``memory_bytes`` is the predicted need with ``in_flight`` microbatches held, ``microbatch_seconds`` the predicted time of
    one microbatch forward and backward alone on its machine, ``sent_bytes`` what crosses to later stages in one forward.
    ``step_compute_seconds`` is how long the stage is predicted to compute in a step, beside what else runs on its machine; 0
    where nothing was predicted."""

    stage: StageIndex
    peer: PeerId
    first: NodeIndex
    end: NodeIndex
    in_flight: int
    recompute: bool
    memory_bytes: int
    microbatch_seconds: float
    sent_bytes: int
    step_compute_seconds: float = 0.0


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
        """The peers that hold a stage, in stage order."""
        return tuple(stage.peer for stage in self.stages)

    def stage_of(self, peer: PeerId) -> StageIndex | None:
        """The stage that ``peer`` holds, if any."""
        return next((stage.stage for stage in self.stages if stage.peer == peer), None)
