"""New deals for replicas that fall behind: when they pay, and not before."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from atoll.coordinator.planning.dealing import deal
from atoll.coordinator.planning.plan import Plan, StagePlan
from atoll.coordinator.planning.redealing import STEPS_IN_A_ROW, STEPS_KEPT, Redealing, better_deal
from atoll.protocol.ids import NodeIndex, PeerId, StageIndex

ANN, BOB = PeerId("ann"), PeerId("bob")


def stage_of(dealt: tuple[int, ...], *replicas: PeerId) -> StagePlan:
    return StagePlan(
        stage=StageIndex(0),
        replicas=replicas,
        first=NodeIndex(0),
        end=NodeIndex(9),
        in_flight=2,
        recompute=False,
        memory_bytes=1,
        microbatch_seconds=0.5,
        sent_bytes=0,
        deal=dealt,
    )


EVEN = stage_of(deal([1.0, 1.0], 12), ANN, BOB)


def plan_of(stage: StagePlan) -> Plan:
    return Plan(stages=(stage,), spares=(), step_seconds=1.0)


def test_a_replica_that_takes_twice_as_long_gets_half_as_much() -> None:
    found = better_deal(EVEN, {BOB: 2.0})
    assert found is not None
    assert (found.deal.count(0), found.deal.count(1)) == (8, 4)
    assert "bob takes 6 s for its 6 microbatches; with 4 of them the stage takes 4 s" in found.reason


def test_small_differences_change_nothing() -> None:
    assert better_deal(EVEN, {BOB: 1.15}) is None
    assert better_deal(EVEN, {ANN: 2.0, BOB: 2.0}) is None


def test_one_replica_is_dealt_everything() -> None:
    assert better_deal(stage_of((), ANN), {ANN: 9.0}) is None


def test_nobody_is_left_with_nothing() -> None:
    assert better_deal(EVEN, {BOB: 60.0}) is None


def test_one_slow_step_is_no_reason() -> None:
    redealing = Redealing()
    for slow in (2.0, 2.0, 1.0) * 3:
        assert redealing.committed(plan_of(EVEN), {BOB: slow}) == ()


def test_a_lasting_difference_is_followed_once_and_then_the_deal_rests() -> None:
    redealing, stage, changes = Redealing(), EVEN, []
    for step in range(40):
        # Whoever had been slow is fast again as soon as it is dealt less: the worst that could be.
        behind = BOB if stage.deal.count(1) >= stage.deal.count(0) else ANN
        for found in redealing.committed(plan_of(stage), {behind: 2.0}):
            stage = replace(stage, deal=found.deal)
            changes.append(step)
    assert changes[0] == STEPS_IN_A_ROW - 1
    assert all(later - earlier >= STEPS_KEPT for earlier, later in pairwise(changes))
    assert len(changes) <= 40 // STEPS_KEPT + 1
