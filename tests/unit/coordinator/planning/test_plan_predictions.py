"""What a plan says a step will show, to stand beside what peers report."""

from __future__ import annotations

import dataclasses

import pytest

from atoll.coordinator.planning.costs import Constraints
from atoll.coordinator.planning.plan import Plan
from atoll.coordinator.planning.planner import PlanRequest, as_plan, plan_placement
from support.planning import equal_segments, network_of, peers_of

SEGMENTS = equal_segments(12, flops=1e9, crossing=1e4, weights=2e6)
RATE = 1e8


def plan_for(num_peers: int, *, cores: int | None = None) -> Plan:
    """The plan for as many equal peers, each a machine of its own or all on one with ``cores``."""
    peers = peers_of([1e9] * num_peers)
    if cores is not None:
        peers = tuple(dataclasses.replace(peer, machine="one", cores=cores, threads=1) for peer in peers)
    network = network_of([peer.name for peer in peers], RATE)
    constraints = Constraints(num_microbatches=16, num_stages=num_peers)
    request = PlanRequest(segments=SEGMENTS, peers=peers, network=network, constraints=constraints)
    return as_plan(plan_placement(request), SEGMENTS)


def test_a_stage_alone_on_its_machine_computes_for_as_long_as_its_microbatches_take() -> None:
    for stage in plan_for(3).stages:
        assert stage.step_compute_seconds == pytest.approx(16 * stage.microbatch_seconds, rel=0.01)


def test_stages_that_share_a_core_compute_for_longer() -> None:
    plan = plan_for(2, cores=1)
    longer = [stage.step_compute_seconds / (16 * stage.microbatch_seconds) for stage in plan.stages]
    # How much longer depends on the cut, and on one core no cut is better than another.
    assert min(longer) > 1.0
    assert max(longer) > 1.4
    assert all(stage.step_compute_seconds < plan.step_seconds for stage in plan.stages)


def test_each_link_says_what_crosses_it_and_at_what_rate() -> None:
    plan = plan_for(3)
    names = plan.peers
    assert [(link.source, link.target, link.direction) for link in plan.links] == [
        (names[0], names[1], "forward"),
        (names[1], names[0], "backward"),
        (names[1], names[2], "forward"),
        (names[2], names[1], "backward"),
    ]
    for link in plan.links:
        assert (link.codec, link.bytes_per_second) == ("raw", RATE)
        assert link.step_seconds == pytest.approx(16 * link.num_bytes / RATE)
        assert link.num_bytes > 0.0
