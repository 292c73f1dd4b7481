"""What is missing when no placement fits: how many bytes, and where, in one sentence."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np

from atoll.coordinator.planning.costs import Constraints, allowed_bytes
from atoll.coordinator.planning.network import Matrix
from atoll.coordinator.planning.prediction import Predictor
from atoll.protocol.errors import PlacementError
from atoll.protocol.ids import NodeIndex
from atoll.protocol.quantities import format_bytes

_Attempt: TypeAlias = tuple[int, tuple[tuple[int, int, int], ...]]


def refuse(predictor: Predictor, constraints: Constraints) -> PlacementError:
    """Why nothing fits. The attempt that is described misses the fewest bytes in all."""
    wanted, num_segments, num_peers = constraints.num_stages, predictor.segments.num_segments, len(predictor.peers)
    if wanted is not None and wanted > num_peers:
        peers = "1 peer" if num_peers == 1 else f"{num_peers} peers"
        fix = f"start {wanted - num_peers} more, or lower plan.stages"
        return PlacementError(f"plan.stages asks for {wanted} stages, but only {peers} joined; {fix}")
    if wanted is not None and wanted > num_segments:
        return PlacementError(
            f"plan.stages asks for {wanted} stages, but the model can be cut into {num_segments} at most; lower plan.stages",
            hopeless=True,
        )
    missing, parts, uncovered = _least_missing(predictor, constraints)
    if missing == 0:
        return PlacementError(
            "no placement satisfies the pins and the wish for trusted ends; remove one of them, or let more peers join"
        )
    fix = "let another peer join, raise --max-memory, or lower training.microbatch"
    if constraints.recompute is False:
        fix += ", or set plan.recompute to auto"
    return PlacementError(
        f"the model does not fit: {format_bytes(missing)} more memory needed ({'; '.join(parts)}); {fix}",
        missing,
        uncovered=uncovered,
    )


def _least_missing(
    predictor: Predictor, constraints: Constraints
) -> tuple[int, list[str], tuple[tuple[NodeIndex, NodeIndex], ...]]:
    """How many bytes the best attempt misses, which of its stages miss them, and the nodes that find no room with them. Peers
    with the most memory come first."""
    peers = sorted(predictor.peers, key=lambda peer: (-peer.memory_bytes, peer.name))[: constraints.num_stages]
    need = _least_bytes(predictor, constraints)
    last = predictor.segments.num_segments
    best: dict[int, _Attempt] = {0: (0, ())}
    for number, peer in enumerate(peers):
        allowed = allowed_bytes(peer, constraints)
        following = dict(best)
        for start, (missing, ranges) in best.items():
            for end in range(start + 1, last + 1):
                short = missing + max(0, math.ceil(need[start, end] - allowed))
                candidate = (short, (*ranges, (number, start, end)))
                following[end] = min(following.get(end, candidate), candidate)
        best = following
    missing, ranges = best[last]
    parts, uncovered = [], []
    positions = predictor.segments.positions
    for stage, (number, start, end) in enumerate(ranges):
        allowed, needed = allowed_bytes(peers[number], constraints), float(need[start, end])
        if needed > allowed:
            share = f"{format_bytes(allowed)} ({constraints.memory_share:.0%} of what it offers)"
            parts.append(f"stage {stage} needs {format_bytes(needed)} and {peers[number].name} can give {share}")
            covered = max((middle for middle in range(start + 1, end) if need[start, middle] <= allowed), default=start)
            uncovered.append((positions[covered], positions[end]))
    return missing, parts, tuple(uncovered)


def _least_bytes(predictor: Predictor, constraints: Constraints) -> Matrix:
    """The need of every range in the most frugal way that is allowed."""
    held = min(constraints.in_flight or 1, constraints.num_microbatches)
    need = predictor.memory.fixed + held * predictor.memory.microbatch
    ways = [0, 1] if constraints.recompute is None else [int(constraints.recompute)]
    return np.asarray(need[ways].min(axis=0), dtype=np.float64)
