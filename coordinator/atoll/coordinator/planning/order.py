"""In what order peers might stand in the pipeline: clusters of close peers, and paths whose worst link is good.

A slow link costs as often as the pipeline crosses it, so peers that are close to one another should stand side by side, and
the clusters in an order that joins them by their best links. These are starting points; the search improves on them with
what stages really cost. Everything here depends on the numbers alone, and on the peers' order only to break ties.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import networkx
import numpy as np

from atoll.coordinator.planning.cuts import Indices
from atoll.coordinator.planning.network import Matrix, Network

CLOSEST = 8
"""How many of its closest peers each peer is joined to in the graph that is clustered."""
_LEAST_SECONDS = 1e-9
_MOST_IMPROVED = 128


def pair_seconds(network: Network, forward_bytes: float, backward_bytes: float) -> Matrix:
    """There and back between each two peers, for a typical cut; the same from either side."""
    there = forward_bytes / network.rate + network.latency
    back = (backward_bytes / network.rate + network.latency).T
    seconds = there + back
    return np.asarray((seconds + seconds.T) / 2.0, dtype=np.float64)


def clusters(seconds: Matrix) -> tuple[tuple[int, ...], ...]:
    """Peers grouped by how quickly they reach one another (Louvain communities), each sorted, the largest first."""
    count = len(seconds)
    graph = networkx.Graph()
    graph.add_nodes_from(range(count))
    for one in range(count):
        nearest = [int(other) for other in np.argsort(seconds[one], kind="stable") if other != one][:CLOSEST]
        graph.add_weighted_edges_from((one, other, 1.0 / max(float(seconds[one, other]), _LEAST_SECONDS)) for other in nearest)
    found = networkx.community.louvain_communities(graph, weight="weight", seed=0)
    return tuple(sorted((tuple(sorted(group)) for group in found), key=lambda group: (-len(group), group)))


def bottleneck_path(seconds: Matrix) -> tuple[int, ...]:
    """All peers in a row so that the slowest link, then the sum, is small: best links first, then 2-opt."""
    count = len(seconds)
    rows, columns = np.triu_indices(count, k=1)
    links = networkx.utils.UnionFind(range(count))
    beside: list[list[int]] = [[] for _ in range(count)]
    for index in np.argsort(seconds[rows, columns], kind="stable"):
        one, other = int(rows[index]), int(columns[index])
        if len(beside[one]) < 2 and len(beside[other]) < 2 and links[one] != links[other]:
            beside[one].append(other)
            beside[other].append(one)
            links.union(one, other)
    path = _walk(beside)
    return _two_opt(path, seconds) if count <= _MOST_IMPROVED else tuple(path)


def _walk(beside: list[list[int]]) -> list[int]:
    """The path that the neighbours describe, from its end with the smaller number."""
    current = next(index for index, others in enumerate(beside) if len(others) < 2)
    path, previous = [current], -1
    while following := [other for other in beside[current] if other != previous]:
        previous, current = current, following[0]
        path.append(current)
    return path


def _two_opt(path: list[int], seconds: Matrix) -> tuple[int, ...]:
    """Turn a part of the path around while that makes its slowest link, or else the sum, smaller."""
    best = _path_cost(path, seconds)
    improved = True
    while improved:
        improved = False
        worst = max(range(len(path) - 1), key=lambda place: seconds[path[place], path[place + 1]], default=0)
        for first, last in _turns(len(path), worst):
            turned = [*path[:first], *reversed(path[first : last + 1]), *path[last + 1 :]]
            cost = _path_cost(turned, seconds)
            if cost < best:
                path, best, improved = turned, cost, True
                break
    return tuple(path)


def _turns(length: int, worst: int) -> Iterator[tuple[int, int]]:
    """The parts whose turning replaces the link after place ``worst``."""
    for last in range(worst + 2, length):
        yield worst + 1, last
    for first in range(worst):
        yield first, worst
    if worst > 0:
        yield 0, worst
    if worst + 2 < length:
        yield worst + 1, length - 1


def _path_cost(path: Sequence[int], seconds: Matrix) -> tuple[float, float]:
    links = [float(seconds[one, other]) for one, other in pairwise(path)]
    return max(links, default=0.0), sum(links)


def clustered_path(seconds: Matrix, groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Clusters in a row joined by good links, inside each a row that starts near the cluster before."""
    between = np.array([[_closest(seconds, one, other) for other in groups] for one in groups])
    np.fill_diagonal(between, 0.0)
    order = bottleneck_path(between) if len(groups) > 1 else (0,)
    path: list[int] = []
    for group in (groups[index] for index in order):
        inside = [group[place] for place in bottleneck_path(seconds[np.ix_(group, group)])]
        if path and seconds[path[-1], inside[-1]] < seconds[path[-1], inside[0]]:
            inside.reverse()
        path.extend(inside)
    return tuple(path)


def _closest(seconds: Matrix, one: Sequence[int], other: Sequence[int]) -> float:
    return float(seconds[np.ix_(one, other)].min())


def starting_orders(seconds: Matrix, speed: Matrix, memory: Matrix) -> Indices:
    """Orders to start from, one a row, without repetition."""
    groups = clusters(seconds)
    path = clustered_path(seconds, groups)
    place = {peer: index for index, group in enumerate(groups) for peer in group}
    group_order = list(dict.fromkeys(place[peer] for peer in path))
    roomy_first = [peer for index in group_order for peer in sorted(groups[index], key=lambda peer: (-memory[peer], peer))]
    fast_first = [peer for index in group_order for peer in sorted(groups[index], key=lambda peer: (-speed[peer], peer))]
    rows = [
        path,
        tuple(roomy_first),
        tuple(fast_first),
        bottleneck_path(seconds),
        tuple(int(peer) for peer in np.lexsort((np.arange(len(speed)), -speed))),
        tuple(int(peer) for peer in np.lexsort((np.arange(len(memory)), -memory))),
        tuple(range(len(speed))),
    ]
    rows += [tuple(reversed(row)) for row in rows]
    return np.array(list(dict.fromkeys(rows)), dtype=np.intp)


def variations(order: Sequence[int], used: frozenset[int], count: int, generator: np.random.Generator) -> Indices:
    """``count`` changed copies of ``order``: two peers swapped, one moved, or a part turned around; a used peer always
    takes part."""
    length = len(order)
    places = [place for place, peer in enumerate(order) if peer in used]
    rows = []
    for _ in range(count):
        row = list(order)
        one = places[int(generator.integers(len(places)))]
        other = int(generator.integers(length - 1))
        other += other >= one
        match int(generator.integers(4)):
            case 0:
                row[one], row[other] = row[other], row[one]
            case 1:
                row.insert(other, row.pop(one))
            case 2:
                row.insert(one, row.pop(other))
            case _:
                first, last = min(one, other), max(one, other)
                row[first : last + 1] = reversed(row[first : last + 1])
        rows.append(row)
    return np.array(rows, dtype=np.intp)
