"""Of many peers, the useful ones."""

from __future__ import annotations

import dataclasses

import numpy as np

from atoll.coordinator.planning.costs import Constraints, memory_table
from atoll.coordinator.planning.shortlist import SHORTLIST, shortlist
from support.planning import equal_segments, network_of, peers_of

SEGMENTS = equal_segments(12)


def test_fast_peers_that_are_close_are_on_it() -> None:
    """Eight fast ones near one another among 200 slow ones far away, and eight that are faster still but behind thin lines."""
    speeds = np.full(216, 0.05e9)
    close, thin = np.arange(40, 48), np.arange(100, 108)
    speeds[close], speeds[thin] = 2e9, 4e9
    rate = np.full((216, 216), 1e6)
    rate[np.ix_(close, close)] = 1e9
    upload = np.full(216, 1e9)
    upload[thin] = 1e3
    peers = peers_of([float(speed) for speed in speeds])
    network = network_of([peer.name for peer in peers], rate, 0.05, upload, upload)
    chosen = shortlist(SEGMENTS, peers, network, Constraints(num_microbatches=16), memory_table(SEGMENTS))
    assert set(close) <= set(chosen)
    assert len(chosen) <= SHORTLIST


def test_pinned_and_trusted_peers_are_always_on_it() -> None:
    peers = peers_of([1e9] * 150 + [1e3, 1e3])
    peers = tuple(dataclasses.replace(peer, trusted=peer.name == "peer-151") for peer in peers)
    network = network_of([peer.name for peer in peers], 1e9)
    constraints = Constraints(num_microbatches=16, pins=((3, "peer-150"),), trusted_ends=True)
    chosen = shortlist(SEGMENTS, peers, network, constraints, memory_table(SEGMENTS))
    assert {150, 151} <= set(chosen)
    assert len(chosen) <= SHORTLIST + 2


def test_roomy_peers_are_on_it_where_memory_is_short() -> None:
    """The slower half alone has memory for more than a thin slice."""
    room = [3e6] * 100 + [40e6] * 50
    peers = peers_of([2e9] * 100 + [1e9] * 50, room)
    network = network_of([peer.name for peer in peers], 1e9)
    chosen = shortlist(SEGMENTS, peers, network, Constraints(num_microbatches=16), memory_table(SEGMENTS))
    assert sum(index >= 100 for index in chosen) >= 12
