"""Whether the replicas of a stage should be dealt other microbatches, by what their steps have shown. Pure.

A deal is no placement: changing it moves no state and costs nothing but the last bits of a sum, which is reason enough not to
follow every flutter of a measurement. So a new deal must make the slowest replica's part noticeably shorter, several steps in a
row must have called for one, and a stage keeps its deal for some steps then. Between steps only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.coordinator.planning.dealing import deal
from atoll.coordinator.planning.plan import Plan, StagePlan
from atoll.protocol.ids import PeerId, StageIndex
from atoll.protocol.quantities import format_seconds

LEAST_GAIN = 0.1
"""The part of a stage's time a microbatch that a new deal must save."""
STEPS_IN_A_ROW = 3
"""So many steps must have called for a new deal."""
STEPS_KEPT = 10
"""So many steps a stage keeps a deal at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redealt:
    """``stage`` is to be dealt microbatches so; ``reason`` is a sentence for people."""

    stage: StageIndex
    deal: tuple[int, ...]
    reason: str


def better_deal(stage: StagePlan, slowdowns: Mapping[PeerId, float]) -> Redealt | None:
    """A deal that is worth changing to when each replica takes ``slowdowns`` times as long as the plan says; None where the
    present one is good enough, or the better one would leave somebody with nothing."""
    if len(stage.replicas) < 2:
        return None
    each = [stage.of(peer).microbatch_seconds * slowdowns.get(peer, 1.0) for peer in stage.replicas]
    if min(each) <= 0.0:
        return None
    dealt = deal([1.0 / seconds for seconds in each], len(stage.deal))
    if len(set(dealt)) < len(each):
        return None
    now, then = (_longest(each, candidate) for candidate in (stage.deal, dealt))
    if then > (1.0 - LEAST_GAIN) * now:
        return None
    slowest = max(range(len(each)), key=lambda index: stage.deal.count(index) * each[index])
    behind = f"{stage.replicas[slowest]} takes {format_seconds(now)} for its {stage.deal.count(slowest)} microbatches"
    reason = f"{behind}; with {dealt.count(slowest)} of them the stage takes {format_seconds(then)}"
    return Redealt(stage=stage.stage, deal=dealt, reason=reason)


def _longest(each: list[float], dealt: tuple[int, ...]) -> float:
    """What the slowest replica takes for its microbatches of a step."""
    return max(dealt.count(index) * seconds for index, seconds in enumerate(each))


@dataclass(slots=True)
class Redealing:
    """Restraint over the steps of a plan. Tell it of every committed step; a new plan begins with a new one."""

    _calls: dict[StageIndex, int] = field(default_factory=dict)
    _rest: dict[StageIndex, int] = field(default_factory=dict)

    def committed(self, plan: Plan, slowdowns: Mapping[PeerId, float]) -> tuple[Redealt, ...]:
        """The deals to change before the next step."""
        changed = []
        for stage in plan.stages:
            self._rest[stage.stage] = max(0, self._rest.get(stage.stage, 0) - 1)
            found = better_deal(stage, slowdowns)
            self._calls[stage.stage] = self._calls.get(stage.stage, 0) + 1 if found is not None else 0
            if found is not None and self._calls[stage.stage] >= STEPS_IN_A_ROW and not self._rest[stage.stage]:
                self._calls[stage.stage], self._rest[stage.stage] = 0, STEPS_KEPT
                changed.append(found)
        return tuple(changed)
