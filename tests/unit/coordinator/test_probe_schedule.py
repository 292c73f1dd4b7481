from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.coordinator.membership import Introduction
from atoll.coordinator.probe_schedule import ProbePair, ProbeParty, probe_party, probe_rounds
from atoll.protocol.ids import PeerId

Rounds = tuple[tuple[ProbePair, ...], ...]


def parties(count: int, machines: int | None = None) -> list[ProbeParty]:
    """``count`` peers, each on a machine of its own, or dealt to so many."""
    return [
        ProbeParty(name=PeerId(f"peer-{index}"), machine=f"machine-{index if machines is None else index % machines}")
        for index in range(count)
    ]


def flat(rounds: Rounds) -> list[ProbePair]:
    return [pair for one in rounds for pair in one]


def between_peers(rounds: Rounds) -> list[frozenset[PeerId]]:
    return [frozenset((pair.source, pair.target)) for pair in flat(rounds) if pair.target is not None]


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


@given(fleets)
@settings(max_examples=150, deadline=None)
def test_nobody_is_in_two_probes_of_a_round(fleet: list[ProbeParty]) -> None:
    places = {party.name: party for party in fleet}
    for one in probe_rounds(fleet):
        assert one, "no round is empty"
        ends = [places[name] for pair in one for name in (pair.source, pair.target) if name is not None]
        assert len({end.name for end in ends}) == len(ends)
        for place in ("machine", "host"):
            within = Counter(
                name
                for pair in one
                for name in {getattr(places[end], place) for end in (pair.source, pair.target) if end is not None}
                if name
            )
            assert not within or max(within.values()) == 1
        assert sum(pair.target is None and not pair.latency_only for pair in one) <= 1


@given(fleets, st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_order_of_the_peers_does_not_matter(fleet: list[ProbeParty], random: object) -> None:
    shuffled = list(fleet)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert probe_rounds(shuffled) == probe_rounds(fleet)


@given(fleets)
@settings(max_examples=100, deadline=None)
def test_no_pair_is_probed_twice_and_no_peer_against_itself(fleet: list[ProbeParty]) -> None:
    pairs = between_peers(probe_rounds(fleet))
    assert len(set(pairs)) == len(pairs)
    assert all(len(pair) == 2 for pair in pairs)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_all_pairs_of_a_few(count: int) -> None:
    peers = parties(count)
    rounds = probe_rounds(peers, coordinator=False)
    assert set(between_peers(rounds)) == {frozenset((a.name, b.name)) for a, b in combinations(peers, 2)}
    assert len(rounds) <= count + 1  # n - 1, or n where n is odd, is what can be reached


@pytest.mark.parametrize("count", [7, 8, 16, 31, 64, 200])
def test_a_few_pairs_each_of_many(count: int) -> None:
    rounds = probe_rounds(parties(count), coordinator=False)
    graph = networkx.Graph([tuple(pair) for pair in between_peers(rounds)])
    degrees = dict(graph.degree())
    assert len(degrees) == count
    wanted = math.log2(count) + 2
    assert all(wanted - 1.5 <= degree <= wanted + 1.5 for degree in degrees.values())
    assert networkx.is_connected(graph)
    assert networkx.diameter(graph) <= wanted
    assert len(rounds) <= max(degrees.values()) + 3
    dialled = Counter(pair.source for pair in flat(rounds))
    assert max(dialled.values()) < max(degrees.values())


def test_each_peer_is_probed_with_the_coordinator() -> None:
    rounds = probe_rounds(parties(5))
    assert [pair.source for pair in flat(rounds) if pair.target is None].__len__() == 5
    assert not any(pair.latency_only for pair in flat(rounds))


def test_with_many_peers_the_coordinator_is_asked_for_latency_alone() -> None:
    rounds = probe_rounds(parties(40))
    to_coordinator = [pair for pair in flat(rounds) if pair.target is None]
    assert len(to_coordinator) == 40
    assert all(pair.latency_only for pair in to_coordinator)
    assert len(rounds) < 14
    assert not any(pair.latency_only for pair in flat(rounds) if pair.target is not None)


def test_a_thousand_peers_are_scheduled_at_once() -> None:
    rounds = probe_rounds(parties(1000))
    assert len(between_peers(rounds)) == 6000
    assert len(rounds) < 150


def test_peers_of_one_address_are_measured_once_for_all() -> None:
    here = [ProbeParty(name=PeerId(name), machine="m", host="10.0.0.1") for name in ("a", "b", "c", "d")]
    there = [ProbeParty(name=PeerId(name), machine="n", host="10.0.0.2") for name in ("e", "f")]
    pairs = between_peers(probe_rounds([*here, *there], coordinator=False))
    assert sorted(sorted(pair) for pair in pairs) == [["a", "b"], ["a", "e"], ["e", "f"]]


def test_a_capped_peer_does_not_speak_for_its_neighbour() -> None:
    fast = ProbeParty(name=PeerId("fast"), machine="m", host="10.0.0.1")
    capped = ProbeParty(name=PeerId("capped"), machine="m", host="10.0.0.1", max_upload_bytes_per_second=1e6)
    other = ProbeParty(name=PeerId("other"), machine="n", host="10.0.0.2")
    pairs = set(between_peers(probe_rounds([fast, capped, other], coordinator=False)))
    assert pairs == {frozenset(pair) for pair in (("fast", "other"), ("capped", "other"), ("fast", "capped"))}


def test_containers_of_one_machine_have_lines_of_their_own() -> None:
    hosts = [ProbeParty(name=PeerId(name), machine="m", host=f"10.77.0.{name}") for name in ("1", "2", "3")]
    rounds = probe_rounds(hosts, coordinator=False)
    assert [len(one) for one in rounds] == [1, 1, 1]


def test_what_is_known_is_left_out() -> None:
    peers = parties(4)
    known = [ProbePair(source=PeerId("peer-1"), target=PeerId("peer-0")), ProbePair(source=PeerId("peer-2"), target=None)]
    found = flat(probe_rounds(peers, known=known))
    assert len(found) == 6 + 4 - 2
    assert not any({pair.source, pair.target} == {"peer-0", "peer-1"} for pair in found)
    assert PeerId("peer-2") not in [pair.source for pair in found if pair.target is None]


def test_one_peer_has_only_the_coordinator() -> None:
    assert probe_rounds(parties(1)) == ((ProbePair(source=PeerId("peer-0"), target=None),),)
    assert probe_rounds([]) == ()


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
