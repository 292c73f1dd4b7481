"""Who holds a stage, and which of a step's microbatches each of them has. Pure.

The replicas of a stage hold the same weights. Each takes its share of a step's microbatches; at the step's end their gradients
are summed in the order in which they stand here, so that all of them have the same bits whoever was quicker.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.ids import MicrobatchIndex, PeerId, StageIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ``replicas`` of a stage. ``deal`` has an entry for each microbatch of a step: the index of the replica that it goes
    to. Each has at least one, for only who has computed gradients knows which there are; it may be empty where there is one
    replica. Raises ValueError for anything else."""

    stage: StageIndex
    replicas: tuple[PeerId, ...]
    deal: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        num = len(self.replicas)
        if not num or len(set(self.replicas)) != num:
            raise ValueError(f"stage {self.stage} needs replicas, each once, got {self.replicas}")
        if set(self.deal) != set(range(num)) and (self.deal or num > 1):
            raise ValueError(f"the deal of stage {self.stage} must give each of {num} replicas something, got {self.deal}")

    @property
    def leader(self) -> PeerId:
        """The first replica: it speaks for the stage where one is enough."""
        return self.replicas[0]

    def holder_of(self, microbatch: MicrobatchIndex) -> PeerId:
        """The replica that a microbatch goes to. An evaluation has other numbers of them; they are dealt in the same turns."""
        return self.replicas[self.deal[microbatch % len(self.deal)]] if self.deal else self.leader

    def share_of(self, peer: PeerId, num_microbatches: int) -> tuple[MicrobatchIndex, ...]:
        """Which of the microbatches 0, 1, 2, ... go to ``peer``."""
        return tuple(index for index in map(MicrobatchIndex, range(num_microbatches)) if self.holder_of(index) == peer)

    def meets(self, other: Group) -> frozenset[tuple[PeerId, PeerId]]:
        """The pairs of a replica here and one of ``other`` that have a microbatch in common."""
        turns = range(max(len(self.deal), len(other.deal), 1))
        return frozenset((self.holder_of(index), other.holder_of(index)) for index in map(MicrobatchIndex, turns))
