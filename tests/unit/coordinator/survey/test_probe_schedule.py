from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import combinations

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.coordinator.sessions.membership import Introduction
from atoll.coordinator.survey.probe_schedule import ProbePair, ProbeParty, places_of, probe_pairs, probe_party
from atoll.protocol.ids import PeerId


def parties(count: int, machines: int | None = None) -> list[ProbeParty]:
    """``count`` peers, each on a machine of its own, or dealt to so many."""
    return [
        ProbeParty(name=PeerId(f"peer-{index}"), machine=f"machine-{index if machines is None else index % machines}")
        for index in range(count)
    ]


def between_peers(pairs: Iterable[ProbePair]) -> list[frozenset[PeerId]]:
    return [frozenset((pair.source, pair.target)) for pair in pairs if pair.target is not None]


fleets = st.lists(
    st.builds(
        ProbeParty,
        name=st.integers(0, 200).map(lambda number: PeerId(f"p{number}")),
        machine=st.sampled_from(["", "m1", "m2", "m3"]),
        host=st.sampled_from(["", "10.0.0.1", "10.0.0.2", "10.0.0.3"]),
        max_upload_bytes_per_second=st.sampled_from([None, 1e6]),
    ),
    max_size=40,
    unique_by=lambda party: party.name,
)


@given(fleets, st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_order_of_the_peers_does_not_matter(fleet: list[ProbeParty], random: object) -> None:
    shuffled = list(fleet)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert probe_pairs(shuffled) == probe_pairs(fleet)


@given(fleets)
@settings(max_examples=100, deadline=None)
def test_no_pair_is_probed_twice_and_no_peer_against_itself(fleet: list[ProbeParty]) -> None:
    pairs = between_peers(probe_pairs(fleet))
    assert len(set(pairs)) == len(pairs)
    assert all(len(pair) == 2 for pair in pairs)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_all_pairs_of_a_few(count: int) -> None:
    peers = parties(count)
    pairs = probe_pairs(peers)
    assert set(between_peers(pairs)) == {frozenset((a.name, b.name)) for a, b in combinations(peers, 2)}


@pytest.mark.parametrize("count", [7, 8, 16, 31, 64, 200])
def test_a_few_pairs_each_of_many(count: int) -> None:
    pairs = probe_pairs(parties(count))
    graph = networkx.Graph([tuple(pair) for pair in between_peers(pairs)])
    degrees = dict(graph.degree())
    assert len(degrees) == count
    wanted = math.log2(count) + 2
    assert all(wanted - 1.5 <= degree <= wanted + 1.5 for degree in degrees.values())
    assert networkx.is_connected(graph)
    assert networkx.diameter(graph) <= wanted
    dialled = Counter(pair.source for pair in pairs if pair.target is not None)
    assert max(dialled.values()) < max(degrees.values())


def test_each_peer_is_probed_with_the_coordinator() -> None:
    pairs = probe_pairs(parties(5))
    assert len([pair for pair in pairs if pair.target is None]) == 5
    assert not any(pair.latency_only for pair in pairs)


def test_with_many_peers_the_coordinator_is_asked_for_latency_alone() -> None:
    pairs = probe_pairs(parties(40))
    to_coordinator = [pair for pair in pairs if pair.target is None]
    assert len(to_coordinator) == 40
    assert all(pair.latency_only for pair in to_coordinator)
    assert not any(pair.latency_only for pair in pairs if pair.target is not None)


def test_of_a_thousand_peers_each_is_measured_against_a_few() -> None:
    assert len(between_peers(probe_pairs(parties(1000)))) == 6000


def test_peers_of_one_address_are_measured_once_for_all() -> None:
    here = [ProbeParty(name=PeerId(name), machine="m", host="10.0.0.1") for name in ("a", "b", "c", "d")]
    there = [ProbeParty(name=PeerId(name), machine="n", host="10.0.0.2") for name in ("e", "f")]
    pairs = between_peers(probe_pairs([*here, *there]))
    assert sorted(sorted(pair) for pair in pairs) == [["a", "b"], ["a", "e"], ["e", "f"]]


def test_a_capped_peer_does_not_speak_for_its_neighbour() -> None:
    fast = ProbeParty(name=PeerId("fast"), machine="m", host="10.0.0.1")
    capped = ProbeParty(name=PeerId("capped"), machine="m", host="10.0.0.1", max_upload_bytes_per_second=1e6)
    other = ProbeParty(name=PeerId("other"), machine="n", host="10.0.0.2")
    pairs = set(between_peers(probe_pairs([fast, capped, other])))
    assert pairs == {frozenset(pair) for pair in (("fast", "other"), ("capped", "other"), ("fast", "capped"))}


def test_containers_of_one_machine_have_lines_of_their_own() -> None:
    hosts = [ProbeParty(name=PeerId(name), machine="m", host=f"10.77.0.{name}") for name in ("1", "2", "3")]
    pairs = probe_pairs(hosts)
    assert len(between_peers(pairs)) == 3
    shared = [places_of(pair, {host.name: host for host in hosts}) for pair in pairs]
    assert all(("machine", "m") in places for places in shared), "but not processors"


def test_what_is_known_is_left_out() -> None:
    peers = parties(4)
    known = [ProbePair(source=PeerId("peer-1"), target=PeerId("peer-0")), ProbePair(source=PeerId("peer-2"), target=None)]
    found = probe_pairs(peers, known=known)
    assert len(found) == 6 + 4 - 2
    assert not any({pair.source, pair.target} == {"peer-0", "peer-1"} for pair in found)
    assert PeerId("peer-2") not in [pair.source for pair in found if pair.target is None]


def test_one_peer_has_only_the_coordinator() -> None:
    assert probe_pairs(parties(1)) == (ProbePair(source=PeerId("peer-0"), target=None),)
    assert probe_pairs([]) == ()


def test_a_party_is_made_of_what_the_peer_said() -> None:
    introduction = Introduction(
        protocol_version=2,
        version="1",
        name="attic",
        address="[fd00::7]:7000",
        device="cpu",
        threads=2,
        memory_bytes=1,
        flops_per_second=1.0,
        machine="m",
        max_upload_bytes_per_second=2.5e6,
    )
    assert probe_party(introduction) == ProbeParty(
        name=PeerId("attic"), machine="m", host="fd00::7", max_upload_bytes_per_second=2.5e6
    )
