"""What a link is likely to do of which nothing was measured. Pure; matrices are from row to column, NaN is unknown.

Theory. A connection is as fast as the slower of the sender's upload, the receiver's download and the path between them. So the
best that was measured of a line is a lower bound of it, and a good estimate unless the other ends explain it: what a fast peer
gets to slow ones says nothing of its own line. Such a line counts as no slower than the usual one. Where measured pairs fall
short of their lines, so will others at about the same latency. Peers of one place share a line; between them there is none.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.sparse.csgraph import shortest_path

DEFAULT_BYTES_PER_SECOND = 125e6
"""A gigabit: between peers of whom nothing is known, so that all links count as equal."""
DEFAULT_LOCAL_BYTES_PER_SECOND = 500e6
"""Between two processes of one machine."""
DEFAULT_LATENCY_SECONDS = 0.0005
_NEAR = 0.8
"""Measurements of one line differ by this much."""
_MOST_FOR_DETOURS = 128
"""Peers up to which lower bounds of latency are computed: that takes the third power of their number."""
_SIMILAR_LATENCY = 0.3
"""In logarithms: latencies within about a third of each other tell of similar paths."""
_FEWEST_SIMILAR = 5
_LATENCY_STEPS = 24

Matrix = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.intp]


def estimate_rates(rate: Matrix, latency: Matrix, upload: Matrix, download: Matrix, *, cap: Matrix, places: Places) -> Matrix:
    """A rate for every pair, in bytes a second. ``latency`` is known for all, maybe estimated. ``upload`` and ``download`` are
    what lines are known to carry, ``cap`` bounds each pair without saying anything of lines, ``places`` says who shares a
    line."""
    between = _by_place(rate, places)
    # A connection that ran at its cap shows what the cap is, and of the lines only that they are no slower.
    capped = _by_place(np.where(rate >= _NEAR * cap, rate, np.nan), places) >= between
    local = np.diagonal(between).copy()
    np.fill_diagonal(between, np.nan)
    usual = float(np.nanmedian(between)) if not np.isnan(between).all() else DEFAULT_BYTES_PER_SECOND
    sender, receiver = _line_of_place(upload, places), _line_of_place(download, places)
    out = _lines(between, capped | (between >= _NEAR * receiver[None, :]), sender)
    into = _lines(between.T, (capped | (between >= _NEAR * sender[:, None])).T, receiver)
    estimate = np.minimum(out[:, None], into[None, :])
    estimate *= _share_of_lines(np.where(capped, np.nan, between / estimate), -_by_place(-latency, places))
    estimate = np.where(np.isinf(estimate), usual, estimate)
    estimate = np.where(np.isnan(between), estimate, between)  # another peer of the place was measured
    locally = float(np.nanmedian(local)) if not np.isnan(local).all() else DEFAULT_LOCAL_BYTES_PER_SECOND
    np.fill_diagonal(estimate, np.where(np.isnan(local), locally, local))
    return estimate[np.ix_(places, places)]


def estimate_latencies(latency: Matrix, access: Matrix, places: Places) -> Matrix:
    """A latency for every pair, one way. An unmeasured pair lies between what the triangle inequality allows through third
    peers; else it is the sum of both lines' latencies, ``access``."""
    if latency.size == 0:
        return latency
    known = -_by_place(-latency, places)
    local = np.diagonal(known).copy()
    known = np.fmin(known, known.T)
    np.fill_diagonal(known, 0.0)
    through_lines = _line_of_place(access, places)
    estimate = _by_triangles(known)
    estimate = np.where(np.isnan(estimate), through_lines[:, None] + through_lines[None, :], estimate)
    measured = latency[~np.isnan(latency)]
    usual = float(np.median(measured)) if measured.size else DEFAULT_LATENCY_SECONDS
    estimate = np.where(np.isnan(known), np.where(np.isnan(estimate), usual, estimate), known)
    np.fill_diagonal(estimate, np.where(np.isnan(local), DEFAULT_LATENCY_SECONDS, local))
    return np.where(np.isnan(latency), estimate[np.ix_(places, places)], latency)


def _lines(rate: Matrix, capped: Mask, known: Matrix) -> Matrix:
    """What each row's line carries, by the best that was measured of it; infinite where nothing was. The cells in ``capped``
    are no evidence of the row's line."""
    near_row, near_column = _near_best(rate), _near_best(rate.T).T
    # Whether the column's line explains a cell: another row got as much from it, and nobody more.
    by_column = near_column & (near_column.sum(axis=0)[None, :] > 1)
    own_evidence = near_row & ~by_column & ~capped
    best = np.fmax.reduce(rate, axis=1, initial=-np.inf)
    seen = own_evidence.any(axis=1)
    settled = np.where(np.isnan(known), np.where(seen, best, np.nan), known)
    usual = np.nanmedian(settled) if not np.isnan(settled).all() else -np.inf
    line = np.where(np.isnan(settled), np.maximum(best, usual), settled)
    return np.where(np.isneginf(best) & np.isnan(known), np.inf, line)


def _share_of_lines(share: Matrix, latency: Matrix) -> Matrix:
    """What part of its lines' rate each pair is likely to get, by its latency: a weighted median of the shares that were seen
    at about the same latency."""
    np.fill_diagonal(share, np.nan)
    seen = ~np.isnan(share)
    if not seen.any():
        return np.ones_like(latency)
    shares, order = np.sort(np.minimum(share[seen], 1.0)), np.argsort(share[seen], kind="stable")
    distances = np.log(np.maximum(latency, 1e-6))
    steps = np.linspace(distances.min(), distances.max(), _LATENCY_STEPS)
    apart = np.abs(steps[:, None] - distances[seen][order][None, :])
    nearest = np.sort(apart, axis=1)[:, : min(_FEWEST_SIMILAR, len(shares))][:, -1]
    weight = np.exp(-((apart / np.maximum(nearest, _SIMILAR_LATENCY)[:, None]) ** 2)).cumsum(axis=1)
    middle = (weight < weight[:, -1:] / 2.0).sum(axis=1)
    likely: Matrix = np.interp(distances, steps, shares[middle])
    return likely


def _near_best(rate: Matrix) -> Mask:
    """The cells that are about as fast as the fastest of their row."""
    best = np.fmax.reduce(rate, axis=1, initial=-np.inf)
    return np.nan_to_num(rate, nan=-np.inf) >= _NEAR * np.where(np.isfinite(best), best, np.inf)[:, None]


def _by_place(values: Matrix, places: Places) -> Matrix:
    """The largest value between each two places."""
    count = int(places.max(initial=-1)) + 1
    found = np.full((count, count), -np.inf)
    rows, columns = np.broadcast_arrays(places[:, None], places[None, :])
    np.maximum.at(found, (rows, columns), np.where(np.isnan(values), -np.inf, values))
    return np.where(np.isneginf(found), np.nan, found)


def _line_of_place(values: Matrix, places: Places) -> Matrix:
    """The largest value at each place."""
    found = np.full(int(places.max(initial=-1)) + 1, -np.inf)
    np.maximum.at(found, places, np.where(np.isnan(values), -np.inf, values))
    return np.where(np.isneginf(found), np.nan, found)


def _by_triangles(known: Matrix) -> Matrix:
    """The middle of what the triangle inequality allows; NaN for pairs that no measurements connect."""
    weights = np.where(np.isnan(known), 0.0, np.maximum(known, 1e-9))
    upper = shortest_path(weights, directed=False)
    few = len(known) <= _MOST_FOR_DETOURS
    detours = np.abs(known[:, None, :] - known[None, :, :]) if few else np.zeros((1, 1, 1))
    lower = np.nan_to_num(np.fmax.reduce(detours, axis=2, initial=0.0))
    return np.where(np.isfinite(upper), (upper + lower) / 2.0, np.nan)
