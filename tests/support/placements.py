"""Plans that a test chooses, in place of those that the planner would make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from atoll.coordinator.planning.dealing import deal
from atoll.coordinator.planning.network import Network
from atoll.coordinator.planning.plan import Plan, StagePlan
from atoll.coordinator.planning.segments import PeerOffer
from atoll.coordinator.traced_model import Proposal, TracedModel
from atoll.protocol.ids import PeerId, StageIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """``shares`` of the segments for each stage, whose replicas are in ``peers``; microbatches go to them in turn."""

    peers: tuple[tuple[str, ...], ...]
    shares: tuple[int, ...]

    def proposal(self, model: TracedModel) -> Proposal:
        positions, total = model.segments.positions, sum(self.shares)
        bounds = [len(positions[:-1]) * sum(self.shares[:count]) // total for count in range(len(self.shares) + 1)]
        num_microbatches = model.job.training.num_microbatches
        stages = tuple(
            StagePlan(
                stage=StageIndex(index),
                replicas=tuple(map(PeerId, replicas)),
                first=positions[bounds[index]],
                end=positions[bounds[index + 1]],
                in_flight=2,
                recompute=False,
                memory_bytes=10**8,
                microbatch_seconds=0.01,
                sent_bytes=1000,
                deal=deal([1.0] * len(replicas), num_microbatches),
            )
            for index, replicas in enumerate(self.peers)
        )
        return model.sliced(Plan(stages=stages, spares=(), step_seconds=0.1))


def placed(*stages: tuple[str | tuple[str, ...], int]) -> Placement:
    """``placed(("peer-0", 1), (("peer-1", "peer-2"), 3))``: a quarter on the one, the rest on each of the others."""
    names = tuple((name,) if isinstance(name, str) else name for name, _ in stages)
    return Placement(peers=names, shares=tuple(share for _, share in stages))


class ScriptedPlacements:
    """The first of ``placements`` is what is planned at first, each next one what a look at the plan proposes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, placements: Sequence[Placement]) -> None:
        self._placements = list(placements)
        monkeypatch.setattr(TracedModel, "propose", lambda model, peers, *_: self._propose(model))
        monkeypatch.setattr(TracedModel, "reconsider", self._reconsider_as_method())

    def _propose(self, model: TracedModel) -> Proposal:
        return self._placements[0].proposal(model)

    def _reconsider_as_method(self) -> object:
        def reconsider(
            model: TracedModel,
            peers: Sequence[PeerOffer],
            current: Plan,
            steps_left: int,
            network: Network | None = None,
            broken: frozenset[frozenset[PeerId]] = frozenset(),
        ) -> tuple[Proposal | None, str]:
            self._placements.pop(0)
            return self._placements[0].proposal(model), "the test says so"

        return reconsider
