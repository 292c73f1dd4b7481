"""The links between peers: what was measured, each direction on its own, and an estimate for every pair that was not.

Pure. Rates are bytes a second, latencies seconds one way. A pair's rate is what one connection between the two gets; a
peer's upload and download bound all its connections together. How the estimates come about is in ``link_estimates``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from atoll.coordinator.planning.link_estimates import Matrix as Matrix
from atoll.coordinator.planning.link_estimates import estimate_latencies, estimate_rates
from atoll.protocol.ids import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasurement:
    """From ``source`` to ``target``; None is what was not measured."""

    source: PeerId
    target: PeerId
    bytes_per_second: float | None = None
    latency_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLine:
    """A peer's own line to the network; None is unknown. ``latency_seconds`` is one way to the coordinator.

    The owner's caps (None: there is none) bound what the peer uses of the line; they do not say what it carries. Peers of one
    ``location``, unless that is empty, share a line and reach each other without it.
    """

    upload_bytes_per_second: float | None = None
    download_bytes_per_second: float | None = None
    latency_seconds: float | None = None
    max_upload_bytes_per_second: float | None = None
    max_download_bytes_per_second: float | None = None
    location: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayed:
    """The ``pairs`` of peers whose connections go through the coordinator. Each byte of them comes in there and goes out, so
    all of them together get ``bytes_per_second``, the slower direction of its line; infinite where that is not known."""

    pairs: frozenset[frozenset[PeerId]] = frozenset()
    bytes_per_second: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Network:
    """``rate[i, j]`` and ``latency[i, j]`` from peer ``names[i]`` to peer ``names[j]``; ``estimated`` where the rate was
    not measured.

    ``upload`` and ``download``, caps included, are infinite where unknown. The diagonals are infinite and zero: a peer has no
    link to itself.
    """

    names: tuple[PeerId, ...]
    rate: Matrix
    latency: Matrix
    upload: Matrix
    download: Matrix
    estimated: npt.NDArray[np.bool_]
    relayed: Relayed = Relayed()

    def __post_init__(self) -> None:
        count = len(self.names)
        assert self.rate.shape == self.latency.shape == self.estimated.shape == (count, count), "square matrices"
        assert self.upload.shape == self.download.shape == (count,), "one line a peer"

    def select(self, names: Sequence[PeerId]) -> Network:
        """The network of ``names``, in that order. Raises KeyError for a peer it does not know."""
        places = {name: index for index, name in enumerate(self.names)}
        index = np.array([places[name] for name in names], dtype=np.intp)
        pairs = np.ix_(index, index)
        return Network(
            names=tuple(names),
            rate=self.rate[pairs],
            latency=self.latency[pairs],
            upload=self.upload[index],
            download=self.download[index],
            estimated=self.estimated[pairs],
            relayed=self.relayed,
        )


def build_network(
    names: Iterable[PeerId], measurements: Iterable[LinkMeasurement] = (), lines: Mapping[PeerId, PeerLine] | None = None
) -> Network:
    """The network of ``names``: measured where measured (the last of several counts), else estimated from lines and other
    pairs, and at last defaults. Nothing is faster than an owner's cap."""
    names = tuple(names)
    rate, latency = _measured(names, measurements)
    known = lines or {}
    own = [known.get(name, PeerLine()) for name in names]
    upload = _vector(line.upload_bytes_per_second for line in own)
    download = _vector(line.download_bytes_per_second for line in own)
    upload_cap = _bound(_vector(line.max_upload_bytes_per_second for line in own))
    download_cap = _bound(_vector(line.max_download_bytes_per_second for line in own))
    cap = np.minimum(upload_cap[:, None], download_cap[None, :])
    places = _places(own)
    latency = estimate_latencies(latency, _vector(line.latency_seconds for line in own), places)
    estimated = np.isnan(rate)
    np.fill_diagonal(estimated, False)
    rate = np.where(estimated, estimate_rates(rate, latency, upload, download, cap=cap, places=places), rate)
    upload, download = _bound(upload), _bound(download)
    apart = places[:, None] != places[None, :]
    rate = np.minimum(rate, np.where(apart, np.minimum(upload[:, None], download[None, :]), np.inf))
    rate = np.minimum(rate, cap)
    np.fill_diagonal(rate, np.inf)
    np.fill_diagonal(latency, 0.0)
    return Network(
        names=names,
        rate=rate,
        latency=latency,
        upload=np.minimum(upload, upload_cap),
        download=np.minimum(download, download_cap),
        estimated=estimated,
    )


def _measured(names: Sequence[PeerId], measurements: Iterable[LinkMeasurement]) -> tuple[Matrix, Matrix]:
    """Rates and latencies, NaN where there is no measurement."""
    index = {name: position for position, name in enumerate(names)}
    rate = np.full((len(names), len(names)), np.nan)
    latency = rate.copy()
    for one in measurements:
        if one.source not in index or one.target not in index:
            continue
        pair = index[one.source], index[one.target]
        if one.bytes_per_second is not None:
            rate[pair] = one.bytes_per_second
        if one.latency_seconds is not None:
            latency[pair] = one.latency_seconds
    return rate, latency


def _places(lines: Sequence[PeerLine]) -> npt.NDArray[np.intp]:
    """The number of each peer's location, one of its own for a peer that names none."""
    numbers: dict[tuple[str, int], int] = {}
    keys = [(line.location, 0 if line.location else 1 + position) for position, line in enumerate(lines)]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.intp)


def _vector(values: Iterable[float | None]) -> Matrix:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _bound(values: Matrix) -> Matrix:
    """Infinite where unknown."""
    return np.where(np.isnan(values), np.inf, values)
