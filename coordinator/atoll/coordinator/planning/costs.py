"""Costs of every possible stage and link, as arrays: what the dynamic programme and the search look up.

Index ``[peer, i, j]`` is the stage from position ``i`` to position ``j`` on that peer, ``[source, target, k]`` the link
over a cut at position ``k``. What is impossible is infinite. Computing and memory are kept apart, for a fast peer may have
little memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from atoll.compression.policy import Rung
from atoll.coordinator.planning.network import Matrix, Network
from atoll.coordinator.planning.pipeline import Duplex
from atoll.coordinator.planning.processors import crowds_of
from atoll.coordinator.planning.segments import RAW, PeerOffer, Segments

ACCUMULATE_SHARE = 0.5
"""The part of a backward pass that makes the gradients of the weights, where nothing was measured: half, as for a matrix
product."""
PARAMETER_BYTES_PER_SECOND = 1e9
"""Parameter bytes that an optimizer updates in a second where nothing was measured: a guess; memory-bound, so much the same on
any processor."""
NORM_BYTES_PER_SECOND = 4e9
"""Bytes of gradients whose norms a processor works out in a second: a guess; as memory-bound as the optimizer, with less to
do."""
AVERAGING_COPIES = 2
"""Bytes for each byte of gradients that a replica needs to sum them with others: what is sent or received, and the sum."""
MOST_NORMS = 0.5
"""The part of a measured update that its norms can be at most: a guess, for only both together are measured."""


def _some_of(codecs: tuple[Rung, ...]) -> tuple[Rung, ...]:
    """The first, the last and one between."""
    return codecs if len(codecs) < 4 else (codecs[0], codecs[len(codecs) // 2], codecs[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What is asked of a plan; None leaves a choice to the planner.

    ``memory_share`` is how much of a peer's memory a plan may use; the rest is headroom. ``pins`` ties a segment to a peer.
    ``num_replicas`` is how many peers hold each stage, as far as there are peers; ``averaging`` is the codec of the gradients
    that replicas exchange.
    ``forward_codecs`` and ``backward_codecs`` are the codecs that links may use in each direction, the least lossy first.
    ``commit_seconds`` is what the coordinator takes between the last report of a step and its word to all.
    """

    num_microbatches: int
    num_stages: int | None = None
    num_replicas: int | None = 1
    in_flight: int | None = None
    recompute: bool | None = None
    memory_share: float = 0.9
    pins: tuple[tuple[int, str], ...] = ()
    trusted_ends: bool = False
    forward_codecs: tuple[Rung, ...] = (RAW,)
    backward_codecs: tuple[Rung, ...] = (RAW,)
    averaging: Rung = RAW
    duplex: Duplex = Duplex.FULL
    commit_seconds: float = 0.0

    @property
    def codec_levels(self) -> tuple[tuple[Rung, Rung], ...]:
        """Codecs there and back, from the least lossy of both to the most; some of them, for each is costed for every link."""
        forward, backward = _some_of(self.forward_codecs), _some_of(self.backward_codecs)
        count = max(len(forward), len(backward))
        return tuple((forward[min(level, len(forward) - 1)], backward[min(level, len(backward) - 1)]) for level in range(count))

    @property
    def strongest_ratios(self) -> tuple[float, float]:
        """The least part of the bytes that can cross, forward and backward."""
        return min(codec.ratio for codec in self.forward_codecs), min(codec.ratio for codec in self.backward_codecs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostTable:
    """``compute[r]`` and ``held[r]`` with recomputation (r = 1) and without: seconds a microbatch, and how many may be in
    flight.

    ``line`` is how long a stage's upload or download is busy with a microbatch, with the strongest codec.
    ``edge_seconds[c]`` is there and back over a link at codec level ``c``, ``edge_period[c]`` the time for which one microbatch
    occupies it. ``crowd[p]`` is the machine of peer ``p`` where its processors may be too few for all peers on it (-1 where
    not), ``share[p]`` the part of that machine's cores that the peer's threads take.
    """

    compute: Matrix
    held: Matrix
    line: Matrix
    edge_seconds: Matrix
    edge_period: Matrix
    crowd: tuple[int, ...]
    share: tuple[float, ...]
    num_microbatches: int

    @property
    def num_peers(self) -> int:
        return int(self.compute.shape[1])

    @property
    def num_positions(self) -> int:
        return int(self.compute.shape[2])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeerSeconds:
    """Sums over the segments before each position, ``[peer, position]``, for a microbatch; ``update`` and ``finish`` are once a
    step. ``backward`` is until the gradients of what is received are there, ``accumulate`` those of the weights after that;
    ``finish`` is for the norms of the gradients, before a step is committed, ``update`` what follows."""

    forward: Matrix
    backward: Matrix
    accumulate: Matrix
    update: Matrix
    finish: Matrix

    @property
    def all_works(self) -> Matrix:
        """Everything that is done for a microbatch."""
        return self.forward + self.backward + self.accumulate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTable:
    """``fixed[r, i, j]`` and ``microbatch[r, i, j]`` in bytes; infinite where ``j <= i``."""

    fixed: Matrix
    microbatch: Matrix


def peer_seconds(segments: Segments, peers: tuple[PeerOffer, ...]) -> PeerSeconds:
    """Computing time of each peer, measured or from its speed."""
    estimates = [np.asarray(values) for values in (segments.forward_flops, segments.backward_flops, segments.parameter_bytes)]
    norms = estimates[2] / NORM_BYTES_PER_SECOND
    rows = []
    for peer in peers:
        known = peer.measured
        if known is not None:
            # What is measured once a step is finishing and updating together.
            once = np.asarray(known.update)
            finish = np.concatenate([[0.0], np.cumsum(np.minimum(np.diff(norms), MOST_NORMS * np.diff(once)))])
            rows.append([*map(np.asarray, (known.forward, known.backward, known.accumulate)), once - finish, finish])
        else:
            forward, backward = (flops / max(peer.flops_per_second, 1.0) for flops in estimates[:2])
            update = estimates[2] / PARAMETER_BYTES_PER_SECOND
            rows.append([forward, (1.0 - ACCUMULATE_SHARE) * backward, ACCUMULATE_SHARE * backward, update, norms])
    forward, backward, accumulate, update, finish = (np.stack(each).astype(np.float64) for each in zip(*rows, strict=True))
    return PeerSeconds(forward=forward, backward=backward, accumulate=accumulate, update=update, finish=finish)


def memory_table(segments: Segments) -> MemoryTable:
    """The need of every range, without and with recomputation."""
    count = segments.num_segments + 1
    fixed = np.full((2, count, count), np.inf)
    microbatch = np.full((2, count, count), np.inf)
    for recompute in (False, True):
        for first in range(count):
            for end in range(first + 1, count):
                need = segments.memory(first, end, recompute)
                fixed[int(recompute), first, end] = need.fixed_bytes
                microbatch[int(recompute), first, end] = need.microbatch_bytes
    return MemoryTable(fixed=fixed, microbatch=microbatch)


def cost_table(
    segments: Segments, peers: tuple[PeerOffer, ...], network: Network, constraints: Constraints, memory: MemoryTable
) -> CostTable:
    """All costs of ``peers``, whose order is that of ``network``."""
    seconds = peer_seconds(segments, peers)
    compute = _compute(seconds, peers) + _forbidden(segments, peers, constraints)
    edge_seconds, edge_period = _edges(segments, network, constraints)
    crowds = crowds_of(peers)
    return CostTable(
        compute=compute,
        held=_held(memory, peers, constraints),
        line=_line(segments, network, constraints.strongest_ratios),
        edge_seconds=edge_seconds,
        edge_period=edge_period,
        crowd=tuple(crowd.machine for crowd in crowds),
        share=tuple(crowd.share for crowd in crowds),
        num_microbatches=constraints.num_microbatches,
    )


def _compute(seconds: PeerSeconds, peers: tuple[PeerOffer, ...]) -> Matrix:
    overhead = np.array([peer.overhead_seconds for peer in peers])[:, None, None]
    forward = seconds.forward[:, None, :] - seconds.forward[:, :, None] + overhead
    back = seconds.backward + seconds.accumulate
    backward = back[:, None, :] - back[:, :, None] + overhead
    empty = np.tril(np.ones(forward.shape[1:], dtype=np.bool_))
    plain = np.where(empty, np.inf, forward + backward)
    return np.stack([plain, np.where(empty, np.inf, plain + forward)])


def _forbidden(segments: Segments, peers: tuple[PeerOffer, ...], constraints: Constraints) -> Matrix:
    """Infinite where a pin or the wish for trusted ends rules a stage out, zero elsewhere."""
    count = segments.num_segments + 1
    forbidden = np.zeros((len(peers), count, count))
    for segment, owner in constraints.pins:
        others = np.array([peer.name != owner for peer in peers])
        forbidden[others, : segment + 1, segment + 1 :] = np.inf
    if constraints.trusted_ends:
        untrusted = np.array([not peer.trusted for peer in peers])
        forbidden[untrusted, 0, :] = np.inf
        forbidden[untrusted, :, count - 1] = np.inf
    return forbidden


def allowed_bytes(peer: PeerOffer, constraints: Constraints) -> int:
    """How much of the peer's memory a plan may use."""
    return int(peer.memory_bytes * constraints.memory_share)


def held_by_replicas(segments: Segments, memory: MemoryTable, peers: tuple[PeerOffer, ...], constraints: Constraints) -> Matrix:
    """How many microbatches a replica of a stage may have in flight, 0 where the stage does not fit or may have one peer only:
    what a microbatch writes into a buffer must be there for the next one."""
    size = np.asarray(segments.parameter_bytes)
    averaging = AVERAGING_COPIES * (size[None, :] - size[:, None])
    held = _held(replace(memory, fixed=memory.fixed + averaging), peers, constraints)
    for segment in segments.changing:
        held[:, :, : segment + 1, segment + 1 :] = 0.0
    return held


def _held(memory: MemoryTable, peers: tuple[PeerOffer, ...], constraints: Constraints) -> Matrix:
    """How many microbatches may be in flight, 0 where a stage does not fit or is not wanted."""
    allowed = np.array([allowed_bytes(peer, constraints) for peer in peers], dtype=np.float64)[None, :, None, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        room = allowed - memory.fixed[:, None]
        fits = np.floor(room / np.maximum(memory.microbatch[:, None], 1e-9))
    fits = np.where(np.isfinite(memory.fixed[:, None]) & (room >= 0.0), fits, 0.0)
    most = constraints.num_microbatches
    if constraints.in_flight is not None:
        wanted = min(constraints.in_flight, most)
        fits = np.where(fits >= wanted, float(wanted), 0.0)
    fits = np.clip(fits, 0.0, float(most))
    if constraints.recompute is not None:
        fits[int(not constraints.recompute)] = 0.0
    return np.asarray(fits, dtype=np.float64)


def _line(segments: Segments, network: Network, ratios: tuple[float, float]) -> Matrix:
    forward, backward = np.asarray(segments.forward_bytes) * ratios[0], np.asarray(segments.backward_bytes) * ratios[1]
    sent = backward[:, None] + forward[None, :]
    received = forward[:, None] + backward[None, :]
    return np.maximum(sent / network.upload[:, None, None], received / network.download[:, None, None])


def _edges(segments: Segments, network: Network, constraints: Constraints) -> tuple[Matrix, Matrix]:
    forward, backward = np.asarray(segments.forward_bytes), np.asarray(segments.backward_bytes)
    seconds, period = [], []
    for onward, homeward in constraints.codec_levels:
        there = onward.ratio * forward / network.rate[:, :, None]
        back = homeward.ratio * backward / network.rate.T[:, :, None]
        latency = (network.latency + network.latency.T)[:, :, None]
        seconds.append(there + back + latency + forward * onward.coding_seconds + backward * homeward.coding_seconds)
        slowest_coder = np.maximum(forward * onward.slower_coding_seconds, backward * homeward.slower_coding_seconds)
        match constraints.duplex:
            case Duplex.FULL:
                wire = np.maximum(there, back)
            case Duplex.HALF:
                wire = there + back
            case Duplex.SERIAL:
                wire = there + back + latency
        period.append(np.maximum(wire, slowest_coder))
    return np.stack(seconds), np.stack(period)
