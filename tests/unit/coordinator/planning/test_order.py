"""Clusters and paths."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest

from atoll.coordinator.planning.order import bottleneck_path, clustered_path, clusters, starting_orders, variations


def two_places(num_peers: int) -> np.ndarray:
    """Peers of even number are near one another, so are those of odd number."""
    side = np.arange(num_peers) % 2
    seconds = np.where(side[:, None] == side[None, :], 1.0, 50.0) + 0.01 * np.abs(np.subtract.outer(side, side))
    np.fill_diagonal(seconds, 0.0)
    return seconds


@pytest.mark.parametrize("num_peers", [6, 20, 40])
def test_clusters_are_found(num_peers: int) -> None:
    assert clusters(two_places(num_peers)) == (tuple(range(0, num_peers, 2)), tuple(range(1, num_peers, 2)))


def test_a_clustered_path_crosses_once() -> None:
    seconds = two_places(20)
    path = clustered_path(seconds, clusters(seconds))
    assert sorted(path) == list(range(20))
    assert sum(one % 2 != other % 2 for one, other in pairwise(path)) == 1


@pytest.mark.parametrize("seed", range(20))
def test_the_path_has_a_good_worst_link(seed: int) -> None:
    generator = np.random.default_rng(seed)
    seconds = generator.uniform(1.0, 10.0, (7, 7))
    seconds = (seconds + seconds.T) / 2
    path = bottleneck_path(seconds)
    assert sorted(path) == list(range(7))
    worst = max(seconds[one, other] for one, other in pairwise(path))
    best = min(max(seconds[one, other] for one, other in pairwise(row)) for row in permutations(range(7)))
    assert worst <= 1.6 * best


def test_one_peer_is_a_path() -> None:
    assert bottleneck_path(np.zeros((1, 1))) == (0,)
    assert clusters(np.zeros((1, 1))) == ((0,),)


def test_starting_orders_are_orders() -> None:
    generator = np.random.default_rng(0)
    rows = starting_orders(two_places(10), generator.uniform(1, 2, 10), generator.uniform(1, 2, 10))
    assert all(sorted(row) == list(range(10)) for row in rows.tolist())
    assert len({tuple(row) for row in rows.tolist()}) == len(rows)


def test_variations_are_orders() -> None:
    rows = variations(tuple(range(9)), frozenset({0, 4, 5}), 50, np.random.default_rng(1))
    assert all(sorted(row) == list(range(9)) for row in rows.tolist())
