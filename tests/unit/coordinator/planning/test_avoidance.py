"""Plans that go around a broken link, and the refusal of those that cannot."""

from __future__ import annotations

import dataclasses

import pytest

from atoll.coordinator.planning.avoidance import avoiding, neighbours, refuse_needed
from atoll.coordinator.planning.costs import Constraints
from atoll.coordinator.planning.network import build_network
from atoll.coordinator.planning.plan import Plan
from atoll.coordinator.planning.planner import PlanRequest, as_plan, plan_placement
from atoll.coordinator.planning.replanning import MoveCost, replan
from atoll.protocol.errors import PlacementError
from atoll.protocol.ids import PeerId
from support.planning import equal_segments, peers_of

SEGMENTS = equal_segments(6)


def planned(count: int, *broken: tuple[int, int]) -> tuple[Plan, frozenset[frozenset[PeerId]]]:
    """Two stages on equal peers, the links of these pairs broken; the plan and the pairs."""
    peers = peers_of([1e9] * count)
    pairs = frozenset(frozenset((peers[one].name, peers[other].name)) for one, other in broken)
    request = PlanRequest(
        segments=SEGMENTS,
        peers=peers,
        network=build_network(peer.name for peer in peers),
        constraints=Constraints(num_microbatches=4, num_stages=2),
    )
    request = dataclasses.replace(request, network=avoiding(request.network, pairs))
    return as_plan(plan_placement(request), SEGMENTS), pairs


@pytest.mark.parametrize("broken", [(0, 1), (0, 2), (1, 2)])
def test_of_three_peers_the_two_with_a_good_link_are_chosen(broken: tuple[int, int]) -> None:
    plan, pairs = planned(3, broken)
    assert not pairs & neighbours(plan, ())
    refuse_needed(pairs & neighbours(plan, ()))


def test_a_plan_that_needs_a_broken_link_is_refused_by_its_name() -> None:
    plan, pairs = planned(2, (0, 1))
    one, other = sorted(plan.peers)
    with pytest.raises(PlacementError, match=f"no plan does without the link {one} - {other}, which is broken"):
        refuse_needed(pairs & neighbours(plan, ()))


def test_strangers_are_nothing() -> None:
    peers = peers_of([1e9] * 2)
    network = build_network(peer.name for peer in peers)
    assert (avoiding(network, [frozenset((PeerId("x"), peers[0].name))]).rate == network.rate).all()


def test_no_state_is_moved_over_a_broken_link_to_save_time_in_the_steps_that_are_left() -> None:
    peers = peers_of([1e9, 1e9, 1e9])
    network = build_network(peer.name for peer in peers)
    constraints = Constraints(num_microbatches=4, num_stages=2)
    request = PlanRequest(segments=SEGMENTS, peers=peers, network=network, constraints=constraints)
    present = as_plan(plan_placement(request), SEGMENTS)
    pair = frozenset(present.peers)
    around = dataclasses.replace(request, network=avoiding(network, [pair]))
    found = replan(around, present, cost=MoveCost(), steps_left=10_000)
    assert found.move
    assert pair not in neighbours(as_plan(found.planned, SEGMENTS), ())
    assert not [move for move in found.moves if frozenset((move.source, move.target)) == pair]
