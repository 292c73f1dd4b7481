from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from atoll.coordinator.planning.network import Relayed
from atoll.coordinator.survey.probe_results import ProbeResult, link_measurements, probe_result, probed_network
from atoll.coordinator.survey.probe_schedule import ProbePair, ProbeParty
from atoll.protocol.ids import PeerId
from atoll.protocol.v1 import session_pb2

A, B, C = (PeerId(name) for name in "abc")
PAIR = ProbePair(source=A, target=B)


def test_one_answer_gives_both_directions() -> None:
    probed = session_pb2.Probed(round_trip_seconds=0.08, upload_bytes_per_second=1e6, download_bytes_per_second=5e6)
    result = probe_result(PAIR, probed)
    assert isinstance(result, ProbeResult)
    up, down = link_measurements([result])
    assert (up.source, up.target, up.bytes_per_second, up.latency_seconds) == (A, B, 1e6, 0.04)
    assert (down.source, down.target, down.bytes_per_second, down.latency_seconds) == (B, A, 5e6, 0.04)


def test_a_failure_is_no_measurement() -> None:
    assert probe_result(PAIR, session_pb2.Probed(failure="b does not answer")) == "b does not answer"


@pytest.mark.parametrize(
    "probed",
    [
        session_pb2.Probed(),
        session_pb2.Probed(round_trip_seconds=float("nan"), upload_bytes_per_second=1e6),
        session_pb2.Probed(round_trip_seconds=0.1, upload_bytes_per_second=-1.0),
        session_pb2.Probed(round_trip_seconds=0.1, download_bytes_per_second=float("inf")),
    ],
)
def test_impossible_numbers_are_no_measurement(probed: session_pb2.Probed) -> None:
    assert "impossible" in str(probe_result(PAIR, probed))


def test_what_was_not_measured_is_unknown() -> None:
    result = probe_result(PAIR, session_pb2.Probed(round_trip_seconds=0.1))
    assert isinstance(result, ProbeResult)
    assert {one.bytes_per_second for one in link_measurements([result])} == {None}


def result(source: PeerId, target: PeerId | None, seconds: float, up: float, down: float) -> ProbeResult:
    pair = ProbePair(source=source, target=target)
    return ProbeResult(pair=pair, round_trip_seconds=seconds, upload_bytes_per_second=up, download_bytes_per_second=down)


def test_the_coordinators_links_are_evidence_but_not_part_of_the_network() -> None:
    parties = [ProbeParty(name=A), ProbeParty(name=B), ProbeParty(name=C)]
    results = [
        result(A, None, 0.020, 2e6, 40e6),
        result(B, None, 0.060, 3e6, 40e6),
        result(C, None, 0.060, 40e6, 40e6),
        result(A, B, 0.050, 2e6, 3e6),
    ]
    network = probed_network(parties, results)
    assert network.names == (A, B, C)
    assert network.rate[0, 2] == pytest.approx(2e6)
    assert network.rate[2, 0] == pytest.approx(40e6)
    assert network.latency[0, 2] == pytest.approx((0.040 + 0.020) / 2)  # between 30 - 10 and 30 + 10 milliseconds
    assert network.estimated.tolist() == [[False, False, True], [False, False, True], [True, True, False]]


def test_pairs_that_meet_at_the_coordinator_share_its_line_where_three_show_it() -> None:
    parties = [ProbeParty(name=name) for name in (A, B, C)]
    through = replace(result(A, B, 0.05, 2e6, 2e6), relayed=True)
    shown = [result(name, None, 0.02, 4e6, 9e6) for name in (A, B, C)]
    network = probed_network(parties, [through, *shown])
    assert network.relayed == Relayed(pairs=frozenset({frozenset((A, B))}), bytes_per_second=4e6)
    assert network.select([B, A]).relayed == network.relayed
    slow_home = [result(A, None, 0.02, 1e6, 9e6), *shown[1:]]
    assert probed_network(parties, [through, *slow_home]).relayed.bytes_per_second == 9e6, "what comes in tells nothing"
    assert math.isinf(probed_network(parties, [through, *shown[:2]]).relayed.bytes_per_second), "two may be alike by chance"


def test_caps_and_traffic() -> None:
    parties = [ProbeParty(name=A, max_upload_bytes_per_second=2e6), ProbeParty(name=B)]
    network = probed_network(parties, [result(A, B, 0.01, 9e6, 9e6)], {(B, A): 4e6})
    assert (network.rate[0, 1], network.rate[1, 0]) == (2e6, 4e6)
    assert network.upload[0] == 2e6
    assert network.latency[1, 0] == 0.005
    assert not np.isinf(network.rate[0, 1])


def test_a_peer_as_fast_towards_everybody_has_a_line_of_that_rate() -> None:
    """Homes that send 2.5 MB/s each: what they are sent is as fast as the sender, and tells nothing of what they could take."""
    parties = [ProbeParty(name=name, machine=name) for name in (A, B, C)]
    results = [
        result(A, B, 0.04, 2.5e6, 2.4e6),
        result(A, C, 0.04, 2.45e6, 2.5e6),
        result(B, C, 0.04, 2.5e6, 2.5e6),
        *(result(name, None, 0.04, 2.5e6, 25e6) for name in (A, B, C)),
    ]
    network = probed_network(parties, results)
    assert network.upload == pytest.approx([2.5e6] * 3)
    assert np.isinf(network.download).all()


def test_peers_at_one_address_share_the_rate_of_their_line() -> None:
    d, e = PeerId("d"), PeerId("e")
    parties = [
        ProbeParty(name=A, host="10.0.0.1"),
        ProbeParty(name=B, host="10.0.0.1"),
        *(ProbeParty(name=name) for name in (C, d, e)),
    ]
    results = [result(A, other, 0.04, 20e6, 1e9 / (index + 1)) for index, other in enumerate((C, d, e))]
    network = probed_network(parties, results)
    assert network.upload[:2] == pytest.approx([20e6, 20e6])
