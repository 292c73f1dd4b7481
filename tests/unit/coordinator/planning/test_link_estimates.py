"""Whole matrices of which probes see a part: what is estimated for the rest is compared with the truth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from atoll.coordinator.planning.network import LinkMeasurement, Network, PeerLine, build_network
from atoll.coordinator.survey.probe_schedule import ProbeParty, probe_pairs
from atoll.protocol.ids import PeerId

Matrix = npt.NDArray[np.float64]
A, B, C, D = (PeerId(name) for name in "abcd")


def probed(rate: Matrix, latency: Matrix | None = None) -> Network:
    """What is known of a fleet whose links have these rates, after its probes."""
    names = [PeerId(f"peer-{index:03}") for index in range(len(rate))]
    index = {name: position for position, name in enumerate(names)}
    measured = []
    for pair in (pair for pair in probe_pairs([ProbeParty(name=name) for name in names]) if pair.target is not None):
        assert pair.target is not None
        for source, target in ((pair.source, pair.target), (pair.target, pair.source)):
            place = index[source], index[target]
            seconds = None if latency is None else float(latency[place])
            rate_seen = float(rate[place])
            one = LinkMeasurement(source=source, target=target, bytes_per_second=rate_seen, latency_seconds=seconds)
            measured.append(one)
    return build_network(names, measured)


def factors(network: Network, rate: Matrix) -> Matrix:
    """Estimate over truth, of each pair that was not measured."""
    found: Matrix = network.rate[network.estimated] / rate[network.estimated]
    return found


def homes(random: np.random.Generator, count: int) -> Matrix:
    up, down = random.uniform(20, 100, count), random.uniform(100, 500, count)
    return np.minimum(up[:, None], down[None, :])


def unequal_lines(random: np.random.Generator, count: int) -> Matrix:
    line = 10 ** random.uniform(1, 3, count)
    return np.minimum(line[:, None], line[None, :])


def few_slow(random: np.random.Generator, count: int) -> Matrix:
    line = np.where(np.arange(count) % 5 == 0, 10.0, 1000.0) * random.uniform(0.95, 1.05, count)
    return np.minimum(line[:, None], line[None, :])


def many_slow(random: np.random.Generator, count: int) -> Matrix:
    line = np.where(np.arange(count) % 5 == 0, 1000.0, 10.0) * random.uniform(0.95, 1.05, count)
    return np.minimum(line[:, None], line[None, :])


@pytest.mark.parametrize("fleet", [homes, unequal_lines, few_slow, many_slow])
@pytest.mark.parametrize("count", [8, 16, 64])
def test_lines_are_found_from_a_few_pairs_each(fleet: Callable[[np.random.Generator, int], Matrix], count: int) -> None:
    rate = fleet(np.random.default_rng(count), count)
    found = factors(probed(rate), rate)
    assert found.size > 0
    assert np.mean((found > 0.8) & (found < 1.25)) >= 0.9


@pytest.mark.parametrize("count", [16, 64])
def test_what_distance_costs_is_seen_in_other_pairs(count: int) -> None:
    random = np.random.default_rng(count)
    cluster = np.arange(count) % 3
    together = cluster[:, None] == cluster[None, :]
    rate = np.where(together, 1000.0, 50.0)
    latency = np.where(together, 0.001, 0.040) + random.uniform(0, 0.001, (count, count))
    found = factors(probed(rate, latency), rate)
    assert np.mean((found > 0.8) & (found < 1.25)) >= 0.8
    assert np.mean(found > 1.25) <= 0.05  # hardly a slow link is taken for a fast one


def test_a_slow_uplink_is_slow_to_everybody_and_says_nothing_of_those_who_received() -> None:
    measured = [
        LinkMeasurement(source=A, target=B, bytes_per_second=1e6),
        LinkMeasurement(source=A, target=C, bytes_per_second=1e6),
        LinkMeasurement(source=B, target=A, bytes_per_second=50e6),
        LinkMeasurement(source=C, target=D, bytes_per_second=50e6),
        LinkMeasurement(source=D, target=C, bytes_per_second=50e6),
    ]
    network = build_network([A, B, C, D], measured)
    assert network.rate[0, 3] == pytest.approx(1e6)
    assert network.rate[3, 1] == pytest.approx(50e6)  # although all that B ever received came slowly


def test_a_cap_bounds_what_was_measured_and_is_known_as_the_line() -> None:
    lines = {A: PeerLine(max_upload_bytes_per_second=2e6, max_download_bytes_per_second=3e6)}
    measured = [LinkMeasurement(source=source, target=target, bytes_per_second=9e6) for source, target in ((A, B), (B, A))]
    network = build_network([A, B], measured, lines)
    assert (network.rate[0, 1], network.rate[1, 0]) == (2e6, 3e6)
    assert (network.upload[0], network.download[0]) == (2e6, 3e6)
    assert np.isinf(network.upload[1])


def test_a_cap_does_not_make_a_slow_line_fast() -> None:
    lines = {A: PeerLine(max_upload_bytes_per_second=100e6)}
    measured = [
        LinkMeasurement(source=A, target=B, bytes_per_second=2e6),
        LinkMeasurement(source=B, target=C, bytes_per_second=9e6),
    ]
    assert build_network([A, B, C], measured, lines).rate[0, 2] == 2e6


def test_what_a_capped_peer_sends_says_nothing_of_the_receiver() -> None:
    lines = {A: PeerLine(max_upload_bytes_per_second=1e6)}
    measured = [
        LinkMeasurement(source=A, target=B, bytes_per_second=1e6),
        LinkMeasurement(source=C, target=D, bytes_per_second=50e6),
        LinkMeasurement(source=D, target=C, bytes_per_second=50e6),
    ]
    assert build_network([A, B, C, D], measured, lines).rate[2, 1] == 50e6


def test_peers_of_one_place_share_a_line_and_reach_each_other_without_it() -> None:
    lines = {A: PeerLine(location="attic"), B: PeerLine(location="attic"), C: PeerLine(location="attic")}
    measured = [
        LinkMeasurement(source=A, target=B, bytes_per_second=900e6, latency_seconds=1e-4),
        LinkMeasurement(source=A, target=D, bytes_per_second=2e6, latency_seconds=0.02),
        LinkMeasurement(source=D, target=A, bytes_per_second=20e6, latency_seconds=0.02),
    ]
    network = build_network([A, B, C, D], measured, lines)
    assert network.rate[1, 2] == 900e6
    assert network.rate[2, 3] == 2e6
    assert network.rate[3, 1] == 20e6
    assert network.latency[2, 3] == 0.02
    assert network.latency[1, 2] == pytest.approx(1e-4)
    assert network.estimated[2, 3]


def test_loopback_says_nothing_of_the_line() -> None:
    lines = {A: PeerLine(location="attic"), B: PeerLine(location="attic")}
    measured = [
        LinkMeasurement(source=A, target=B, bytes_per_second=900e6),
        LinkMeasurement(source=C, target=D, bytes_per_second=5e6),
    ]
    assert build_network([A, B, C, D], measured, lines).rate[0, 2] == 5e6


def test_a_known_line_does_not_slow_loopback_down() -> None:
    lines = {name: PeerLine(location="attic", upload_bytes_per_second=2e6) for name in (A, B)}
    network = build_network([A, B, C], [LinkMeasurement(source=A, target=B, bytes_per_second=900e6)], lines)
    assert network.rate[0, 1] == 900e6
    assert network.rate[0, 2] == 2e6
