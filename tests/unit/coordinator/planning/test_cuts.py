"""The dynamic programme against every cut of every part of an order."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from atoll.compression.policy import Rung
from atoll.coordinator.planning.costs import Constraints
from atoll.coordinator.planning.cuts import UNHURRIED, solve, within
from atoll.coordinator.planning.layouts import Layout, layout_loops, layout_pace
from atoll.coordinator.planning.prediction import Predictor
from atoll.coordinator.planning.segments import RAW
from support.planning import equal_segments, every_layout, network_of, peers_of, predictor_of, random_request

ORDER = np.array([[2, 0, 3, 1]], dtype=np.intp)


def shortest_loop(predictor: Predictor, pace: float, num_stages: int | None) -> float:
    """The shortest loop over all layouts that follow ORDER and keep the pace, memory included, one by one."""
    place = {int(peer): index for index, peer in enumerate(ORDER[0])}
    best = np.inf
    for layout in every_layout(predictor):
        places = [place[peer] for peer in layout.peers]
        if places != sorted(places) or num_stages not in (None, layout.num_stages):
            continue
        if layout_pace(predictor.table, layout) > pace * (1 + 1e-9):
            continue
        loops = layout_loops(predictor.table, layout, pace)
        most = predictor.constraints.num_microbatches
        held = predictor.most_in_flight(layout)
        if all(number >= most or loop <= number * pace * (1 + 1e-9) for number, loop in zip(held, loops, strict=True)):
            best = min(best, loops[0])
    return best


@pytest.mark.parametrize("num_stages", [None, 2, 3])
@pytest.mark.parametrize("seed", range(25))
def test_it_is_exact_for_an_order_and_a_pace(seed: int, num_stages: int | None) -> None:
    predictor = predictor_of(random_request(seed, 4, 6))
    loose = solve(within(predictor.table, UNHURRIED), ORDER, num_stages)
    paces = [UNHURRIED]
    if np.isfinite(loose.loop[0]):
        slowest = layout_pace(predictor.table, loose.layout(0))
        paces += [slowest * factor for factor in (1.0, 0.8, 0.6, 0.45, 0.3)]
    for pace in paces:
        found = solve(within(predictor.table, pace), ORDER, num_stages)
        assert found.loop[0] == pytest.approx(shortest_loop(predictor, pace, num_stages))
        if np.isfinite(found.loop[0]):
            layout = found.layout(0)
            assert predictor.fits(layout)
            assert layout_loops(predictor.table, layout, pace)[0] == pytest.approx(found.loop[0])
            assert layout_pace(predictor.table, layout) <= pace * (1 + 1e-6)


def test_many_orders_at_once_are_as_good_as_one_by_one() -> None:
    predictor = predictor_of(random_request(3, 4, 6))
    orders = np.array([[0, 1, 2, 3], [3, 1, 2, 0], [2, 0, 3, 1]], dtype=np.intp)
    costs = within(predictor.table, UNHURRIED)
    together = solve(costs, orders)
    for number in range(len(orders)):
        alone = solve(costs, orders[number : number + 1])
        assert alone.loop[0] == together.loop[number]
        assert alone.layout(0) == together.layout(number)


def test_a_link_takes_the_least_lossy_codec_that_keeps_the_pace() -> None:
    request = random_request(0, 2, 3)
    peers = peers_of([1e9, 1e9])
    segments = equal_segments(2, flops=1e9, crossing=8e6)
    network = network_of([peer.name for peer in peers], 1e6)
    small = Rung(name="small", ratio=0.25)
    constraints = Constraints(num_microbatches=8, forward_codecs=(RAW, small), backward_codecs=(RAW, small), num_stages=2)
    predictor = predictor_of(type(request)(segments=segments, peers=peers, network=network, constraints=constraints))
    layout = Layout((0, 1), (0, 1, 2), (False, False))
    # Raw, a message takes 8 s, and a stage 3 s a microbatch; with the codec 2 s.
    assert layout_pace(predictor.table, layout) == pytest.approx(3.0)
    assert {(codecs.forward.name, codecs.backward.name) for codecs in predictor.codecs(layout)} == {("small", "small")}
    unhurried, hurried = within(predictor.table, 9.0), within(predictor.table, 3.0)
    assert unhurried.edge[0, 1, 1] == pytest.approx(16.0)
    assert hurried.edge[0, 1, 1] == pytest.approx(4.0)


def test_no_range_is_forgotten() -> None:
    predictor = predictor_of(random_request(1, 3, 5))
    fits = [predictor.possible(0, first, end, False) for first, end in combinations(range(6), 2)]
    assert len(fits) == 15
