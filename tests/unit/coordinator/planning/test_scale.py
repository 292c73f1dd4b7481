"""Large swarms are planned in bounded time."""

from __future__ import annotations

import time

import pytest

from atoll.coordinator.planning.planner import plan_placement
from atoll.coordinator.planning.shortlist import SHORTLIST
from support.planning import random_request


def seconds_for(num_peers: int, num_segments: int) -> float:
    """Of the processor's time, for what else the machine does is no matter of the planner's."""
    request = random_request(5, num_peers, num_segments)
    started = time.process_time()
    planned = plan_placement(request)
    assert len(planned.stages) + len(planned.spares) == num_peers
    assert 1 < len(planned.stages) <= SHORTLIST
    return time.process_time() - started


@pytest.mark.release
def test_sixty_four_peers_and_ninety_six_segments_take_under_ten_seconds() -> None:
    assert seconds_for(64, 96) < 10.0


@pytest.mark.release
def test_a_thousand_peers_take_under_a_minute() -> None:
    assert seconds_for(1000, 96) < 60.0
