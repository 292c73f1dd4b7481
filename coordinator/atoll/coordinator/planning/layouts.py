"""Layouts: which peers hold which segments, and what the cost table says of them without a simulation.

A stage is held by its *leader* and, where that is worth it, by *helpers*: its replicas, each of which gets a part of the
microbatches. What is said here of a stage with replicas is for all of them together: they do a microbatch in the time in which
each does its part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.coordinator.planning.costs import CostTable


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """Stage ``s`` is positions ``bounds[s]`` to ``bounds[s + 1]`` on peer number ``peers[s]`` and on ``helpers[s]``,
    recomputing if ``recompute[s]``. ``helpers`` is empty where no stage has any."""

    peers: tuple[int, ...]
    bounds: tuple[int, ...]
    recompute: tuple[bool, ...]
    helpers: tuple[tuple[int, ...], ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.peers)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The replicas of each stage."""
        if not self.helpers:
            return tuple((peer,) for peer in self.peers)
        return tuple((peer, *others) for peer, others in zip(self.peers, self.helpers, strict=True))

    @property
    def seats(self) -> tuple[int, ...]:
        """All peers, stage by stage."""
        return tuple(peer for group in self.groups for peer in group) if self.helpers else self.peers

    @property
    def num_helpers(self) -> int:
        return sum(map(len, self.helpers))


def with_groups(groups: tuple[tuple[int, ...], ...], bounds: tuple[int, ...], recompute: tuple[bool, ...]) -> Layout:
    """The layout whose stages are held by ``groups``."""
    leaders, helpers = tuple(group[0] for group in groups), tuple(group[1:] for group in groups)
    return Layout(leaders, bounds, recompute, helpers if any(helpers) else ())


def speeds(table: CostTable, group: tuple[int, ...], first: int, end: int, anew: bool) -> tuple[float, ...]:
    """Microbatches of a stage that each replica gets through in a second, by its computing and its line."""
    return tuple(
        1.0 / max(table.compute.item(int(anew), peer, first, end), table.line.item(peer, first, end), 1e-12) for peer in group
    )


def layout_pace(table: CostTable, layout: Layout) -> float:
    """The least time a microbatch that ``layout`` can keep: its slowest stage, shared machine, line or link."""
    if layout.helpers:
        return _group_pace(table, layout)
    pace = 0.0
    machines: dict[int, float] = {}
    for stage, peer in enumerate(layout.peers):
        first, end = layout.bounds[stage], layout.bounds[stage + 1]
        compute = table.compute.item(int(layout.recompute[stage]), peer, first, end)
        pace = max(pace, compute, table.line.item(peer, first, end))
        if stage + 1 < layout.num_stages:
            pace = max(pace, float(table.edge_period[:, peer, layout.peers[stage + 1], end].min()))
        if table.crowd[peer] >= 0:
            machines[table.crowd[peer]] = machines.get(table.crowd[peer], 0.0) + compute * table.share[peer]
    return max([pace, *machines.values()])


def _group_pace(table: CostTable, layout: Layout) -> float:
    """The same where stages have replicas, each with a part of the microbatches."""
    pace = 0.0
    machines: dict[int, float] = {}
    parts = _parts(table, layout)
    groups = layout.groups
    for stage, group in enumerate(groups):
        first, end, anew = layout.bounds[stage], layout.bounds[stage + 1], int(layout.recompute[stage])
        for peer, part in zip(group, parts[stage], strict=True):
            compute = part * table.compute.item(anew, peer, first, end)
            pace = max(pace, compute, part * table.line.item(peer, first, end))
            if table.crowd[peer] >= 0:
                machines[table.crowd[peer]] = machines.get(table.crowd[peer], 0.0) + compute * table.share[peer]
            if stage + 1 < layout.num_stages:
                for other, its in zip(groups[stage + 1], parts[stage + 1], strict=True):
                    pace = max(pace, part * its * float(table.edge_period[:, peer, other, end].min()))
    return max([pace, *machines.values()])


def _parts(table: CostTable, layout: Layout) -> list[tuple[float, ...]]:
    """The part of the microbatches that each replica gets, stage by stage."""
    found = []
    for stage, group in enumerate(layout.groups):
        own = speeds(table, group, layout.bounds[stage], layout.bounds[stage + 1], layout.recompute[stage])
        found.append(tuple(speed / sum(own) for speed in own))
    return found


def seat_parts(table: CostTable, layout: Layout) -> tuple[float, ...]:
    """The part of the microbatches that each seat gets."""
    if not layout.helpers:
        return (1.0,) * layout.num_stages
    return tuple(part for stage in _parts(table, layout) for part in stage)


def layout_slowness(table: CostTable, layout: Layout) -> tuple[float, ...]:
    """How many times longer the works of each seat take while all seats of its machine compute."""
    seats = layout.seats
    wanted: dict[int, float] = {}
    for peer in seats:
        wanted[table.crowd[peer]] = wanted.get(table.crowd[peer], 0.0) + table.share[peer]
    return tuple(max(1.0, wanted[table.crowd[peer]]) for peer in seats)


def layout_excess(table: CostTable, layout: Layout) -> int:
    """How many seats found all cores of their machine taken by others."""
    shares: dict[int, list[float]] = {}
    for peer in layout.seats:
        if table.crowd[peer] >= 0:
            shares.setdefault(table.crowd[peer], []).append(table.share[peer])
    excess = 0
    for taken in shares.values():
        room = 1.0 + 1e-9
        for share in sorted(taken):
            room -= share
            excess += room < 0.0
    return excess


def layout_loops(
    table: CostTable, layout: Layout, limit_seconds: float, slowness: tuple[float, ...] | None = None
) -> tuple[float, ...]:
    """The loop of each seat when links keep the pace ``limit_seconds`` where they can; ``slowness`` is how many times longer
    each seat computes than the table says. The way on from a seat is the longest through any replica of the next stage."""
    loops: list[float] = []
    limit = limit_seconds * (1.0 + 1e-9)
    onward: tuple[float, ...] = ()
    later: tuple[int, ...] = ()  # of the replicas of the next stage, and who they are
    seat, groups = len(layout.seats), layout.groups
    for stage in range(layout.num_stages - 1, -1, -1):
        first, end, anew = layout.bounds[stage], layout.bounds[stage + 1], int(layout.recompute[stage])
        group, own = groups[stage], []
        seat -= len(group)
        for number, peer in enumerate(group):
            compute = table.compute.item(anew, peer, first, end)
            loop = compute if slowness is None else compute * slowness[seat + number]
            ways = (_way(table, peer, other, end, limit) + rest for other, rest in zip(later, onward, strict=True))
            own.append(loop + max(ways, default=0.0))
        onward, later = tuple(own), group
        loops[:0] = own
    return tuple(loops)


def _way(table: CostTable, peer: int, other: int, cut: int, limit: float) -> float:
    """There and back over a link with the least lossy codec that keeps the pace."""
    pair = (slice(None), peer, other, cut)
    seconds, periods = table.edge_seconds[pair], table.edge_period[pair]
    kept = np.flatnonzero(periods <= limit)
    return float(seconds[kept[0]] if kept.size else seconds.min())
