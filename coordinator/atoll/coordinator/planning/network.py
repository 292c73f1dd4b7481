"""The links between peers: what was measured, each direction on its own, and an estimate for every pair that was not.

Pure. Rates are bytes a second, latencies seconds one way. A pair's rate is what one connection between the two gets; a
peer's upload and download bound all its connections together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse.csgraph import shortest_path

from atoll.protocol.ids import PeerId

DEFAULT_BYTES_PER_SECOND = 125e6
"""A gigabit: between peers of whom nothing is known, so that all links count as equal."""
DEFAULT_LATENCY_SECONDS = 0.0005

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasurement:
    """From ``source`` to ``target``; None is what was not measured."""

    source: PeerId
    target: PeerId
    bytes_per_second: float | None = None
    latency_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLine:
    """A peer's own line to the network; None is unknown. ``latency_seconds`` is one way to the coordinator."""

    upload_bytes_per_second: float | None = None
    download_bytes_per_second: float | None = None
    latency_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Network:
    """``rate[i, j]`` and ``latency[i, j]`` from peer ``names[i]`` to peer ``names[j]``; ``estimated`` where the rate was
    not measured.

    ``upload`` and ``download`` are infinite where unknown. The diagonals are infinite and zero: a peer has no link to
    itself.
    """

    names: tuple[PeerId, ...]
    rate: Matrix
    latency: Matrix
    upload: Matrix
    download: Matrix
    estimated: npt.NDArray[np.bool_]

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
        )


def build_network(
    names: Iterable[PeerId], measurements: Iterable[LinkMeasurement] = (), lines: Mapping[PeerId, PeerLine] | None = None
) -> Network:
    """The network of ``names``: measured where measured, else estimated from lines, other pairs and, at last, defaults."""
    names = tuple(names)
    places = {name: index for index, name in enumerate(names)}
    rate = np.full((len(names), len(names)), np.nan)
    latency = np.full((len(names), len(names)), np.nan)
    for one in measurements:
        if one.source not in places or one.target not in places:
            continue
        pair = places[one.source], places[one.target]
        if one.bytes_per_second is not None:
            rate[pair] = one.bytes_per_second
        if one.latency_seconds is not None:
            latency[pair] = one.latency_seconds
    known = lines or {}
    own = [known.get(name, PeerLine()) for name in names]
    upload = _vector(line.upload_bytes_per_second for line in own)
    download = _vector(line.download_bytes_per_second for line in own)
    access = _vector(line.latency_seconds for line in own)
    estimated = np.isnan(rate)
    np.fill_diagonal(estimated, False)
    rate = np.where(estimated, _estimate_rates(rate, upload, download), rate)
    latency = _estimate_latencies(latency, access)
    upload, download = np.nan_to_num(upload, nan=np.inf, posinf=np.inf), np.nan_to_num(download, nan=np.inf, posinf=np.inf)
    rate = np.minimum(rate, np.minimum(upload[:, None], download[None, :]))
    np.fill_diagonal(rate, np.inf)
    np.fill_diagonal(latency, 0.0)
    return Network(names=names, rate=rate, latency=latency, upload=upload, download=download, estimated=estimated)


def _vector(values: Iterable[float | None]) -> Matrix:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _estimate_rates(rate: Matrix, upload: Matrix, download: Matrix) -> Matrix:
    """What a pair could do: the slower of the sender's upload and the receiver's download.

    A peer whose line is unknown is credited with the best that was measured of it, else with the middle of all
    measurements.
    """
    measured = rate[~np.isnan(rate)]
    usual = float(np.median(measured)) if measured.size else DEFAULT_BYTES_PER_SECOND
    best_out = np.fmax.reduce(rate, axis=1, initial=-np.inf)
    best_in = np.fmax.reduce(rate, axis=0, initial=-np.inf)
    out = np.where(np.isnan(upload), np.where(np.isfinite(best_out), best_out, np.inf), upload)
    into = np.where(np.isnan(download), np.where(np.isfinite(best_in), best_in, np.inf), download)
    estimate = np.minimum(out[:, None], into[None, :])
    return np.where(np.isinf(estimate), usual, estimate)


def _estimate_latencies(latency: Matrix, access: Matrix) -> Matrix:
    """An unmeasured pair lies between what the triangle inequality allows through third peers; else the sum of both lines'
    latencies."""
    if latency.size == 0:
        return latency
    known = np.fmin(latency, latency.T)
    np.fill_diagonal(known, 0.0)
    weights = np.where(np.isnan(known), 0.0, np.maximum(known, 1e-9))
    upper = shortest_path(weights, directed=False)
    detours = np.abs(known[:, None, :] - known[None, :, :]) if len(known) <= 128 else np.zeros((1, 1, 1))
    lower = np.nan_to_num(np.fmax.reduce(detours, axis=2, initial=0.0))
    estimate = np.where(np.isfinite(upper), (upper + lower) / 2.0, np.nan)
    through_lines = access[:, None] + access[None, :]
    measured = latency[~np.isnan(latency)]
    usual = float(np.median(measured)) if measured.size else DEFAULT_LATENCY_SECONDS
    estimate = np.where(np.isnan(estimate), through_lines, estimate)
    estimate = np.where(np.isnan(estimate), usual, estimate)
    return np.where(np.isnan(latency), np.where(np.isnan(known), estimate, known), latency)
