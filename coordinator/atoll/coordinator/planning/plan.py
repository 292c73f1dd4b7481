"""What a placement decides, as values: which peer runs which nodes, and what that is predicted to cost."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.ids import NodeIndex, PeerId, StageIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Stage ``stage``: peer ``peer`` runs the nodes from ``first`` up to, not including, ``end``.

    ``memory_bytes`` is the predicted need with ``in_flight`` microbatches held, ``microbatch_seconds`` the predicted time of
    one microbatch forward and backward, ``sent_bytes`` what crosses to later stages in one forward."""

    stage: StageIndex
    peer: PeerId
    first: NodeIndex
    end: NodeIndex
    in_flight: int
    recompute: bool
    memory_bytes: int
    microbatch_seconds: float
    sent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Stages in order; ``spares`` are the peers that got none, ``why_spare`` says of each why.

    ``step_seconds`` is what the simulator predicts, ``bottleneck`` a sentence about what holds the pipeline back.
    """

    stages: tuple[StagePlan, ...]
    spares: tuple[PeerId, ...]
    step_seconds: float
    why_spare: tuple[tuple[PeerId, str], ...] = ()
    bottleneck: str = ""

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
