"""Large swarms are planned in bounded time."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from atoll.coordinator.planning.planner import plan_placement
from atoll.coordinator.planning.shortlist import SHORTLIST
from support.planning import random_request


def seconds_for(num_peers: int, num_segments: int, num_replicas: int | None = 1) -> float:
    """Of the processor's time, for what else the machine does is no matter of the planner's."""
    request = random_request(5, num_peers, num_segments)
    request = replace(request, constraints=replace(request.constraints, num_replicas=num_replicas))
    started = time.process_time()
    planned = plan_placement(request)
    assert len(planned.seats) + len(planned.spares) == num_peers
    assert 1 < len(planned.seats) <= SHORTLIST
    return time.process_time() - started


@pytest.mark.release
def test_sixty_four_peers_and_ninety_six_segments_take_under_ten_seconds() -> None:
    assert seconds_for(64, 96) < 10.0


@pytest.mark.release
def test_a_thousand_peers_take_under_a_minute() -> None:
    assert seconds_for(1000, 96) < 60.0


@pytest.mark.release
def test_replicas_for_large_swarms_take_as_long_again_at_most() -> None:
    assert seconds_for(64, 96, None) < 20.0
    assert seconds_for(1000, 96, None) < 75.0
