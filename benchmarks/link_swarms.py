"""Swarms to plan for: peers of unequal speed and memory at the places of a link matrix, drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from atoll.coordinator.planning.network import Matrix, Network
from atoll.coordinator.planning.segments import PeerOffer
from atoll.protocol.ids import PeerId

FOLDER = Path(__file__).parent / "link_matrices"
MBPS, GBPS = 1e6 / 8.0, 1e9 / 8.0
TERAFLOPS = (4.0, 8.0, 14.0, 24.0, 40.0)
"""What a consumer GPU reaches in training, from an old one to a new one."""
GIGABYTES = (8.0, 10.0, 12.0, 16.0, 24.0)


def load(name: str) -> dict[str, Any]:
    """The file ``link_matrices/NAME.yaml``."""
    values: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return values


def peers_of(count: int, generator: np.random.Generator) -> tuple[PeerOffer, ...]:
    """Speed and memory are drawn apart from one another: a fast card may have little memory."""
    return tuple(
        PeerOffer(
            name=PeerId(f"peer-{index:03d}"),
            flops_per_second=float(generator.choice(TERAFLOPS)) * 1e12,
            memory_bytes=int(float(generator.choice(GIGABYTES)) * 1e9),
        )
        for index in range(count)
    )


def names_of(count: int) -> tuple[PeerId, ...]:
    """The names that ``peers_of`` gives."""
    return tuple(PeerId(f"peer-{index:03d}") for index in range(count))


def network_at(rate: Matrix, latency: Matrix, upload: Matrix, download: Matrix) -> Network:
    """A measured network of the peers ``peers_of`` gives."""
    rate = np.minimum(rate, np.minimum(upload[:, None], download[None, :]))
    np.fill_diagonal(rate, np.inf)
    np.fill_diagonal(latency, 0.0)
    return Network(
        names=names_of(len(rate)),
        rate=rate,
        latency=latency,
        upload=upload,
        download=download,
        estimated=np.zeros(rate.shape, dtype=np.bool_),
    )


def sites(name: str, count: int, generator: np.random.Generator) -> Network:
    """Peers at random places of a matrix; a peer's line is never the narrow place."""
    values = load(name)
    places = {site: index for index, site in enumerate(values["sites"])}
    gbps = np.full((len(places), len(places)), float(values["within"]["gbps"]))
    rtt = np.full((len(places), len(places)), float(values["within"]["rtt_ms"]))
    for one, other, milliseconds, rate, *direction in values["links"]:
        pairs = [(places[one], places[other])]
        if direction != ["one-way"]:
            pairs.append((places[other], places[one]))
        for pair in pairs:
            rtt[pair], gbps[pair] = milliseconds, rate
    chosen = generator.integers(len(places), size=count)
    pairs_of_peers = np.ix_(chosen, chosen)
    unlimited = np.full(count, np.inf)
    return network_at(gbps[pairs_of_peers] * GBPS, rtt[pairs_of_peers] / 2000.0, unlimited, unlimited)


def homes(count: int, generator: np.random.Generator) -> Network:
    """Peers in households: a line each."""
    lines = load("homes")["lines"]

    def drawn(key: str) -> Matrix:
        least, most = (float(value) for value in lines[key])
        return generator.uniform(least, most, count)

    upload, download, access = drawn("upload_mbps") * MBPS, drawn("download_mbps") * MBPS, drawn("latency_ms") / 2000.0
    return network_at(np.full((count, count), np.inf), access[:, None] + access[None, :], upload, download)


def random_links(count: int, generator: np.random.Generator) -> Network:
    """No structure at all: every direction of every pair on its own, over two orders of magnitude."""
    rate = GBPS * np.exp(generator.uniform(np.log(0.02), np.log(2.0), (count, count)))
    latency = generator.uniform(0.001, 0.1, (count, count))
    unlimited = np.full(count, np.inf)
    return network_at(rate, latency, unlimited, unlimited)


NETWORKS: dict[str, Callable[[int, np.random.Generator], Network]] = {
    "ten cities": lambda count, generator: sites("ten_cities", count, generator),
    "three regions": lambda count, generator: sites("three_regions", count, generator),
    "homes": homes,
    "random": random_links,
}
