"""Whom a peer fetches its state from: what it has it keeps, its own disk comes first, and the others stand by."""

from __future__ import annotations

import numpy as np
import torch

from atoll.coordinator.moves import blocked, donations, fetch_seconds
from atoll.coordinator.run.snapshots import THE_STORE
from atoll.protocol.graph import ParameterSpec, StageGraph
from atoll.protocol.ids import PeerId, StageIndex
from support.planning import network_of

A, B, C, D = (PeerId(name) for name in "abcd")


def stage(*names: str) -> StageGraph:
    """A stage that holds parameters of these names, each of 16 bytes."""
    specs = tuple(ParameterSpec(name=name, shape=(4,), dtype=torch.float32) for name in names)
    return StageGraph(
        stage=StageIndex(0), num_stages=1, nodes=(), parameters=specs, buffers=(), inputs=(), receives=(), sends=()
    )


def test_what_a_peer_has_in_memory_it_fetches_from_nobody() -> None:
    assert donations([stage("x", "y")], [A], {"x": (A,), "y": (B,)}, {"x": (B,)}) == {A: ((B, ("y",)),)}


def test_its_own_disk_comes_before_the_memory_of_others_and_these_stand_by() -> None:
    assert donations([stage("x")], [A], {"x": (B,)}, {"x": (A, C)}) == {A: ((A, ("x",)), (B, ("x",)), (C, ("x",)))}


def test_memory_comes_before_other_peers_disks() -> None:
    assert donations([stage("x")], [A], {"x": (C,)}, {"x": (B,)}) == {A: ((C, ("x",)), (B, ("x",)))}


def test_the_donors_share_the_work_evenly_and_each_stands_by_for_the_others() -> None:
    everywhere = dict.fromkeys("wxyz", (B, C))
    (found,) = donations([stage(*"wxyz")], [A], {}, everywhere).values()
    assert found == ((B, ("w", "y")), (C, ("x", "z")), (C, ("w", "y")), (B, ("x", "z")))


def test_what_nobody_has_is_nobody_s_to_give() -> None:
    assert donations([stage("x"), stage("y")], [A, D], {}, {}) == {A: (), D: ()}


def test_a_disk_that_is_reached_comes_before_a_memory_that_is_not() -> None:
    cut = frozenset({frozenset((A, B))})
    assert donations([stage("x")], [A], {"x": (B,)}, {"x": (C,)}, cut) == {A: ((C, ("x",)), (B, ("x",)))}


def test_a_plan_is_blocked_where_everybody_who_has_a_name_is_behind_a_broken_link() -> None:
    cut = frozenset({frozenset((A, B)), frozenset((A, C))})
    graphs, peers = [stage("x")], [A]
    assert blocked(graphs, peers, {"x": (B,)}, {}, cut) == {frozenset((A, B))}
    assert blocked(graphs, peers, {}, {"x": (C,)}, cut) == {frozenset((A, C))}, "a snapshot's holder is behind it, too"
    assert blocked(graphs, peers, {"x": (B,)}, {"x": (C,)}, cut) == cut
    assert blocked(graphs, peers, {"x": (B,)}, {"x": (D,)}, cut) == frozenset(), "another has it on its disk"
    assert blocked(graphs, peers, {"x": (B,)}, {"x": (A,)}, cut) == frozenset(), "it has it on its own"
    assert blocked(graphs, peers, {"x": (B,)}, {"x": (THE_STORE,)}, cut) == frozenset(), "the coordinator gives it"


def test_fetching_takes_as_long_as_what_is_lacking_over_the_best_line() -> None:
    network = network_of([A, B, C], np.array([[1.0, 8.0, 1.0], [1.0, 1.0, 1.0], [1.0, 16.0, 1.0]]))
    three = stage("x", "y", "z")
    holders = {"x": (A,), "y": (A, C), "z": (B,)}
    assert fetch_seconds(three, B, holders, network, state_copies=3) == 2 * 16 * 3 / 16.0
    assert fetch_seconds(three, B, dict.fromkeys("xyz", (B, C)), network, state_copies=3) == 0.0
    assert fetch_seconds(three, B, {}, network, state_copies=3) == 0.0, "first values can be made anew"
    assert fetch_seconds(three, B, {"x": (D,)}, network, state_copies=3) == 0.0, "nobody knows the way from there"
