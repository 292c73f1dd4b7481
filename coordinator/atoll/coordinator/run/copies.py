"""Who keeps copies of whose part of a snapshot. Pure and deterministic.

Peers without a stage come first, for they have nothing else to do; then those on another machine than whoever has the names
already, for a machine is often lost as a whole; then whoever has been given the least so far, measured by how fast its owner
lets it receive. A peer whose disk would not hold it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.protocol.ids import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeper:
    """A peer that could keep copies. ``machine`` is empty where it shares none, ``disk_bytes`` 0 where it is not known,
    ``bytes_per_second`` None where its owner has set no limit."""

    peer: PeerId
    spare: bool
    machine: str = ""
    disk_bytes: int = 0
    bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """What one peer has of a snapshot."""

    peer: PeerId
    names: frozenset[str]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """``target`` is to fetch ``names`` from the disk of ``source``, and keep them."""

    source: PeerId
    target: PeerId
    names: tuple[str, ...]
    num_bytes: int = 0


DISK_RESERVE = 0.1
"""The part of a disk's free space that copies never take."""


def choose_copies(owned: Sequence[Owned], keepers: Sequence[Keeper], copies: int) -> tuple[Copy, ...]:
    """The copies to make so that each name of ``owned`` is with ``copies`` peers beside the first, as far as peers and disks
    go. What somebody has already counts."""
    holders = _holders(owned)
    machines = {keeper.peer: keeper.machine for keeper in keepers}
    given: dict[PeerId, int] = {}
    chosen: list[Copy] = []
    for _ in range(copies):
        for part in owned:
            lacking = frozenset(name for name in part.names if len(holders[name]) <= copies)
            if not lacking:
                continue
            size = part.num_bytes * len(lacking) // max(1, len(part.names))
            target = _best(lacking, size, keepers, holders, machines, given)
            if target is None:
                continue
            names = tuple(sorted(name for name in lacking if target not in holders[name]))
            chosen.append(Copy(source=part.peer, target=target, names=names, num_bytes=size))
            given[target] = given.get(target, 0) + size
            for name in names:
                holders[name].add(target)
    return tuple(chosen)


def _holders(owned: Sequence[Owned]) -> dict[str, set[PeerId]]:
    found: dict[str, set[PeerId]] = {}
    for part in owned:
        for name in part.names:
            found.setdefault(name, set()).add(part.peer)
    return found


def _best(
    names: frozenset[str],
    size: int,
    keepers: Sequence[Keeper],
    holders: Mapping[str, set[PeerId]],
    machines: Mapping[PeerId, str],
    given: Mapping[PeerId, int],
) -> PeerId | None:
    """Whoever should keep ``names``, which somebody has; None: nobody can."""
    have = {peer for name in names for peer in holders[name]}
    taken = {machines.get(peer, "") for peer in have} - {""}

    def load(keeper: Keeper) -> float:
        return (given.get(keeper.peer, 0) + size) / (keeper.bytes_per_second or 1e9)

    able = [
        keeper
        for keeper in keepers
        if any(keeper.peer not in holders[name] for name in names)
        and (not keeper.disk_bytes or given.get(keeper.peer, 0) + size <= (1.0 - DISK_RESERVE) * keeper.disk_bytes)
    ]
    best = min(able, key=lambda one: (not one.spare, one.machine in taken, load(one), one.peer), default=None)
    return best.peer if best is not None else None
