"""Where to cut, for a given order of the peers: an exact dynamic programme, for many orders at once.

Theory. Let T be the time that the pipeline may spend on one microbatch once it is full. A stage is possible within T when
its computing and its line each take at most T, a link when it is occupied for at most T (that stages may share a machine's
processors comes in later, when layouts are compared). The *loop* of a stage is the time
from a microbatch's arrival there until its gradient has come back and is done with: its own computing, plus there and back
over the next link, plus the next stage's loop. At that pace the stage has loop / T microbatches in flight, so memory that
holds K of them allows a loop of K T. The programme goes from the last stage to the first and minimises the loop under these
limits; any peer of the order may be skipped. It is exact, for a longer loop downstream never helps a stage upstream.

A step of m microbatches then takes about loop + (m - 1) T: the first fills the pipeline, the others follow at its pace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from atoll.coordinator.planning.costs import CostTable
from atoll.coordinator.planning.layouts import Layout
from atoll.coordinator.planning.network import Matrix

Indices = npt.NDArray[np.intp]

UNHURRIED = 1e15
"""A pace in seconds that rules nothing out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PacedCosts:
    """The costs that are possible within ``limit_seconds`` a microbatch; the others are infinite."""

    limit_seconds: float
    compute: Matrix
    loop_limit: Matrix
    edge: Matrix
    recomputes: bool


def within(table: CostTable, limit_seconds: float) -> PacedCosts:
    """``table`` under a pace. A link takes the least lossy codec that keeps it."""
    limit = limit_seconds * (1.0 + 1e-9)
    possible = (table.compute <= limit) & (table.line <= limit)[None] & (table.held >= 1.0)
    # Computing anew is never faster: it is for stages that cannot hold all microbatches otherwise.
    possible[1] &= table.held[0] < table.num_microbatches
    edge = np.full(table.edge_seconds.shape[1:], np.inf)
    for seconds, period in zip(table.edge_seconds[::-1], table.edge_period[::-1], strict=True):
        edge = np.where(period <= limit, seconds, edge)
    return PacedCosts(
        limit_seconds=limit_seconds,
        compute=np.where(possible, table.compute, np.inf),
        loop_limit=np.where(table.held >= table.num_microbatches, np.inf, table.held * limit),
        edge=edge,
        recomputes=bool(possible[1].any()),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solutions:
    """The shortest ``loop`` for each order, infinite where nothing fits. ``layout(n)`` is how to reach it."""

    orders: Indices
    loop: Matrix
    _first: Indices
    _ends: Indices
    _nexts: Indices

    def layout(self, number: int) -> Layout:
        """The best layout of order ``number``, which must have a finite loop."""
        place, position = int(self._first[number]), 0
        last = self._nexts.shape[2] - 1
        peers, bounds, recompute = [], [0], []
        while True:
            code = int(self._ends[number, place, position])
            end, anew = code // 2, bool(code % 2)
            peers.append(int(self.orders[number, place]))
            recompute.append(anew)
            bounds.append(end)
            if end == last:
                return Layout(tuple(peers), tuple(bounds), tuple(recompute))
            place, position = int(self._nexts[number, place, end]), end


def solve(costs: PacedCosts, orders: Indices, num_stages: int | None = None) -> Solutions:
    """The best cuts for each row of ``orders`` (peer numbers), in exactly ``num_stages`` stages where that is given."""
    if num_stages is not None:
        return _solve_exactly(costs, orders, num_stages)
    num_orders, num_places = orders.shape
    num_positions = costs.edge.shape[2]
    loops = np.full((num_orders, num_places, num_positions), np.inf)
    ends = np.zeros((num_orders, num_places, num_positions), dtype=np.intp)
    nexts = np.zeros((num_orders, num_places, num_positions), dtype=np.intp)
    for place in range(num_places - 1, -1, -1):
        peer = orders[:, place]
        rest = np.full((num_orders, num_positions), np.inf)
        if place + 1 < num_places:
            onward = costs.edge[peer[:, None], orders[:, place + 1 :]] + loops[:, place + 1 :]
            choice = onward.argmin(axis=1)
            nexts[:, place] = choice + place + 1
            rest = np.take_along_axis(onward, choice[:, None], axis=1)[:, 0]
        rest[:, -1] = 0.0
        loops[:, place], ends[:, place] = _best_ends(costs, peer, rest)
    first = loops[:, :, 0].argmin(axis=1)
    loop = loops[np.arange(num_orders), first, 0]
    return Solutions(orders=orders, loop=loop, _first=first, _ends=ends, _nexts=nexts)


def _best_ends(costs: PacedCosts, peer: Indices, rest: Matrix) -> tuple[Matrix, Indices]:
    """For each first position the shortest loop of a stage on ``peer`` and its end; the end's code is odd where it
    recomputes."""
    loops = np.full(rest.shape, np.inf)
    codes = np.zeros(rest.shape, dtype=np.intp)
    for anew in range(2 if costs.recomputes else 1):
        total = costs.compute[anew][peer] + rest[:, None, :]
        total[total > costs.loop_limit[anew][peer]] = np.inf
        end = total.argmin(axis=2)
        loop = np.take_along_axis(total, end[:, :, None], axis=2)[:, :, 0]
        codes = np.where(loop < loops, 2 * end + anew, codes)
        loops = np.minimum(loop, loops)
    return loops, codes


def _solve_exactly(costs: PacedCosts, orders: Indices, num_stages: int) -> Solutions:
    """As ``solve`` with the stages still to come as a further index, unrolled into places: place ``d * P + q`` is peer
    ``q``."""
    num_orders, num_places = orders.shape
    num_positions = costs.edge.shape[2]
    shape = (num_orders, num_stages * num_places, num_positions)
    loops = np.full(shape, np.inf)
    ends = np.zeros(shape, dtype=np.intp)
    nexts = np.zeros(shape, dtype=np.intp)
    for depth in range(num_stages):
        for place in range(num_places - 1, -1, -1):
            peer = orders[:, place]
            rest = np.full((num_orders, num_positions), np.inf)
            if depth == 0:
                rest[:, -1] = 0.0
            elif place + 1 < num_places:
                later = slice((depth - 1) * num_places + place + 1, depth * num_places)
                onward = costs.edge[peer[:, None], orders[:, place + 1 :]] + loops[:, later]
                choice = onward.argmin(axis=1)
                nexts[:, depth * num_places + place] = choice + later.start
                rest = np.take_along_axis(onward, choice[:, None], axis=1)[:, 0]
                rest[:, -1] = np.inf
            index = depth * num_places + place
            loops[:, index], ends[:, index] = _best_ends(costs, peer, rest)
    start = (num_stages - 1) * num_places
    first = loops[:, start:, 0].argmin(axis=1) + start
    loop = loops[np.arange(num_orders), first, 0]
    return Solutions(orders=np.tile(orders, (1, num_stages)), loop=loop, _first=first, _ends=ends, _nexts=nexts)
