"""Other ways to place a model, for comparison: OP-Fence as FusionLLM describes it, and an equal split.

Both use every peer and are judged on the same simulator under the same memory limits; where memory forbids a stage its
bounds are moved as little as possible, and as many microbatches are in flight as fit, which favours them.
"""

from __future__ import annotations

from itertools import pairwise

import networkx
import numpy as np

from atoll.coordinator.planning.changes import settle
from atoll.coordinator.planning.layouts import Layout
from atoll.coordinator.planning.network import Matrix
from atoll.coordinator.planning.order import bottleneck_path
from atoll.coordinator.planning.prediction import Predictor


def equal_split(predictor: Predictor) -> Layout | None:
    """The same number of segments for each peer, peers in the order in which they came."""
    peers = tuple(range(min(len(predictor.peers), predictor.segments.num_segments)))
    return _fitted(peers, np.ones(len(peers)), predictor)


def op_fence(predictor: Predictor) -> Layout | None:
    """Clusters of peers with good links, in a row that joins them by their best links; a fence between clusters.

    The operators between two fences are in proportion to the cluster's computing power, and inside a cluster to each
    peer's.
    """
    network = predictor.network
    bandwidth = np.minimum(network.rate, network.rate.T)
    groups = _communities(bandwidth)
    between = np.array([[1.0 / bandwidth[np.ix_(one, other)].max() for other in groups] for one in groups])
    np.fill_diagonal(between, 0.0)
    order = bottleneck_path(between) if len(groups) > 1 else (0,)
    peers = tuple(peer for index in order for peer in groups[index])[: predictor.segments.num_segments]
    power = 1.0 / predictor.seconds.all_works[:, -1]
    return _fitted(peers, power[list(peers)], predictor)


def _communities(bandwidth: Matrix) -> list[list[int]]:
    """Louvain communities of the full graph, weighted by bandwidth."""
    graph = networkx.Graph()
    graph.add_nodes_from(range(len(bandwidth)))
    rows, columns = np.triu_indices(len(bandwidth), k=1)
    graph.add_weighted_edges_from(
        (int(one), int(other), float(bandwidth[one, other])) for one, other in zip(rows, columns, strict=True)
    )
    found = networkx.community.louvain_communities(graph, weight="weight", seed=0)
    return sorted((sorted(group) for group in found), key=lambda group: (-len(group), group))


def _fitted(peers: tuple[int, ...], power: Matrix, predictor: Predictor) -> Layout | None:
    """Work in proportion to ``power``; segments then move on to the next peer where memory does not hold them."""
    flops = np.asarray(predictor.segments.forward_flops) + np.asarray(predictor.segments.backward_flops)
    wanted = np.cumsum(power) / np.sum(power) * flops[-1]
    num_segments = predictor.segments.num_segments
    bounds = [0]
    for stage, peer in enumerate(peers):
        left = len(peers) - stage - 1
        end = int(np.argmin(np.abs(flops - wanted[stage])))
        end = min(max(end, bounds[-1] + 1), num_segments - left) if left else num_segments
        while end > bounds[-1] + 1 and not _possible(predictor, peer, bounds[-1], end):
            end -= 1
        bounds.append(end)
    if bounds[-1] != num_segments or any(first >= end for first, end in pairwise(bounds)):
        return None
    return settle(peers, tuple(bounds), predictor)


def _possible(predictor: Predictor, peer: int, first: int, end: int) -> bool:
    return predictor.possible(peer, first, end, False) or predictor.possible(peer, first, end, True)
