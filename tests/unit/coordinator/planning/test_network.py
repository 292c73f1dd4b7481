"""What is known of links, and how the rest is estimated."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.coordinator.planning.link_estimates import DEFAULT_BYTES_PER_SECOND, DEFAULT_LATENCY_SECONDS
from atoll.coordinator.planning.network import LinkMeasurement, PeerLine, build_network
from atoll.protocol.ids import PeerId

A, B, C, D = (PeerId(name) for name in "abcd")


def test_without_measurements_all_links_are_equal_and_marked() -> None:
    network = build_network([A, B, C])
    apart = ~np.eye(3, dtype=np.bool_)
    assert (network.rate[apart] == DEFAULT_BYTES_PER_SECOND).all()
    assert (network.latency[apart] == DEFAULT_LATENCY_SECONDS).all()
    assert network.estimated[apart].all()
    assert not np.diag(network.estimated).any()
    assert np.isinf(np.diag(network.rate)).all()


def test_each_direction_is_on_its_own() -> None:
    network = build_network([A, B], [LinkMeasurement(source=A, target=B, bytes_per_second=5e6, latency_seconds=0.01)])
    assert network.rate[0, 1] == 5e6
    assert not network.estimated[0, 1]
    assert network.estimated[1, 0]
    assert network.latency[1, 0] == 0.01


def test_an_unmeasured_pair_gets_the_slower_of_both_lines() -> None:
    lines = {
        A: PeerLine(upload_bytes_per_second=2e6, download_bytes_per_second=20e6),
        B: PeerLine(download_bytes_per_second=1e6),
    }
    network = build_network([A, B], lines=lines)
    assert network.rate[0, 1] == 1e6
    assert network.rate[1, 0] == 20e6
    assert network.upload.tolist() == [2e6, np.inf]


def test_a_peer_without_a_line_is_credited_with_its_best_measurement() -> None:
    measured = [
        LinkMeasurement(source=A, target=B, bytes_per_second=3e6),
        LinkMeasurement(source=A, target=C, bytes_per_second=7e6),
        LinkMeasurement(source=C, target=D, bytes_per_second=4e6),
    ]
    network = build_network([A, B, C, D], measured)
    assert network.rate[0, 3] == 4e6
    assert network.rate[2, 1] == 3e6
    assert network.rate[1, 0] == 4e6


def test_a_measurement_never_exceeds_the_lines() -> None:
    network = build_network(
        [A, B],
        [LinkMeasurement(source=A, target=B, bytes_per_second=9e6)],
        {A: PeerLine(upload_bytes_per_second=2e6)},
    )
    assert network.rate[0, 1] == 2e6


def test_an_unmeasured_latency_lies_within_the_triangle() -> None:
    measured = [
        LinkMeasurement(source=A, target=B, latency_seconds=0.100),
        LinkMeasurement(source=B, target=C, latency_seconds=0.020),
    ]
    network = build_network([A, B, C], measured)
    assert network.latency[0, 2] == pytest.approx((0.120 + 0.080) / 2)


def test_a_latency_without_any_path_is_the_sum_of_both_lines() -> None:
    lines = {A: PeerLine(latency_seconds=0.03), B: PeerLine(latency_seconds=0.01)}
    assert build_network([A, B], lines=lines).latency[0, 1] == pytest.approx(0.04)


def test_selection_follows_the_names() -> None:
    network = build_network([A, B, C], [LinkMeasurement(source=A, target=C, bytes_per_second=5e6)])
    some = network.select([C, A])
    assert some.names == (C, A)
    assert some.rate[1, 0] == 5e6
    with pytest.raises(KeyError):
        network.select([D])
