"""What a plan means for each peer, and what changes would bring."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atoll.coordinator.planning.costs import Constraints
from atoll.coordinator.planning.forecast import forecast, forecast_links, what_if
from atoll.coordinator.planning.network import build_network
from atoll.coordinator.planning.planner import PlanRequest, plan_placement
from atoll.coordinator.planning.segments import SharedBytes
from support.planning import equal_segments, network_of, peers_of


def test_each_peer_is_told_its_memory_and_traffic() -> None:
    peers = peers_of([1e9, 1e9])
    network = network_of([peer.name for peer in peers], 1e8)
    constraints = Constraints(num_microbatches=4, num_stages=2)
    request = PlanRequest(segments=equal_segments(4, crossing=1e5), peers=peers, network=network, constraints=constraints)
    planned = plan_placement(request)
    first, last = forecast(request, planned)
    assert first.sent_bytes == first.received_bytes == last.sent_bytes == last.received_bytes == 4e5
    assert first.memory_bytes == planned.seats[0].memory_bytes <= first.allowed_bytes == 900_000_000_000
    assert 0.5 < first.busy_share <= 1.0
    assert not first.estimated_link
    assert first.estimated_compute
    there, back = forecast_links(request, planned)
    assert (there.source, there.target, there.direction) == (first.peer, last.peer, "forward")
    assert (back.source, back.target, back.direction) == (last.peer, first.peer, "backward")
    assert (there.codec, there.num_bytes, there.bytes_per_second, there.estimated) == ("raw", 1e5, 1e8, False)
    assert 0.0 < there.busy_share < 1.0


def test_another_peer_brings_processors_of_its_own() -> None:
    """Two peers that share the only core of their machine: a third like them helps, for it would not share that core."""
    alone, shared = (
        tuple(replace(peer, machine=machine, cores=1, threads=1) for peer in peers_of([1e9, 1e9])) for machine in ("", "attic")
    )
    for peers in (alone, shared):
        network = network_of([peer.name for peer in peers], 1e9)
        constraints = Constraints(num_microbatches=16)
        request = PlanRequest(segments=equal_segments(12), peers=peers, network=network, constraints=constraints)
        planned = plan_placement(request)
        more = what_if(request, planned)[0]
        assert more.step_seconds < 0.75 * planned.step_seconds


def test_exchanges_of_shared_parameters_are_traffic() -> None:
    peers = peers_of([1e9, 1e9])
    segments = equal_segments(4, crossing=1e5)
    object.__setattr__(segments, "shared", (SharedBytes(segments=(0, 3), num_bytes=7_000),))
    constraints = Constraints(num_microbatches=4, num_stages=2)
    network = build_network(peer.name for peer in peers)
    request = PlanRequest(segments=segments, peers=peers, network=network, constraints=constraints)
    first, last = forecast(request, plan_placement(request))
    assert first.sent_bytes == last.sent_bytes == 4e5 + 7_000
    assert first.estimated_link
    assert not last.estimated_link


@pytest.mark.parametrize(
    ("rate", "peer_helps", "link_helps"),
    [(1e9, True, False), (0.02e6, False, True)],
)
def test_it_says_what_would_help(rate: float, peer_helps: bool, link_helps: bool) -> None:
    peers = peers_of([1e9, 1e9])
    network = network_of([peer.name for peer in peers], rate, 0.0, np.inf, np.inf)
    constraints = Constraints(num_microbatches=16, num_stages=None if peer_helps else 2)
    request = PlanRequest(segments=equal_segments(12), peers=peers, network=network, constraints=constraints)
    planned = plan_placement(request)
    more, faster = what_if(request, planned)
    assert more.change == "one more peer like peer-01"
    assert faster.change.startswith("twice the bandwidth between peer-0")
    assert (more.step_seconds < 0.95 * planned.step_seconds) == peer_helps
    assert (faster.step_seconds < 0.95 * planned.step_seconds) == link_helps
    assert ("no faster" in more.sentence) != peer_helps
    assert ("no faster" in faster.sentence) != link_helps
    assert more.sentence.endswith(", with plan.stages at 2") != peer_helps


def test_a_single_peer_has_no_link_to_make_faster() -> None:
    peers = peers_of([1e9])
    request = PlanRequest(
        segments=equal_segments(4),
        peers=peers,
        network=build_network(peer.name for peer in peers),
        constraints=Constraints(num_microbatches=16),
    )
    planned = plan_placement(request)
    (more,) = what_if(request, planned)
    assert more.step_seconds < 0.7 * planned.step_seconds
