"""Of very many peers, the ones that a plan could use: the search proper is only for those.

A plan at pace T needs peers whose line carries a microbatch within T, and of these so many that together they compute the
model within T and hold it. A peer's share of the model at T is bounded by both. Taking the peers with the largest shares
first gives the number of stages, hence the time to fill the pipeline; the pace with the shortest step decides. The same is
done inside each cluster of close peers, where links are better and the choice is smaller.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atoll.coordinator.planning.costs import Constraints, MemoryTable, allowed_bytes, peer_seconds
from atoll.coordinator.planning.cuts import Indices
from atoll.coordinator.planning.network import Matrix, Network
from atoll.coordinator.planning.order import clusters, pair_seconds
from atoll.coordinator.planning.segments import PeerOffer, Segments

SHORTLIST = 72
_CLUSTERS = 4
_PACES = 32
_GOOD_LINKS = 8
_USUALLY_HELD = 4


def shortlist(
    segments: Segments, peers: tuple[PeerOffer, ...], network: Network, constraints: Constraints, memory: MemoryTable
) -> tuple[int, ...]:
    """At most about ``SHORTLIST`` of ``peers``, as sorted indices; pinned peers and the best trusted ones are always among
    them."""
    shares = _Shares(segments, peers, network, constraints, memory)
    everyone = np.arange(len(peers))
    kept: list[int] = [index for index, peer in enumerate(peers) if peer.name in {owner for _, owner in constraints.pins}]
    if constraints.trusted_ends:
        trusted = [index for index in shares.ranked(everyone) if peers[index].trusted]
        kept.extend(trusted[:4])
    groups = [np.array(group, dtype=np.intp) for group in clusters(shares.pair_seconds)]
    groups = sorted(groups, key=lambda group: (shares.best_step(group)[0], group.tolist()))[:_CLUSTERS]
    rankings = [shares.ranked(everyone), *(shares.ranked(group) for group in groups)]
    return tuple(sorted(dict.fromkeys([*kept, *_in_turns(rankings, SHORTLIST)])))


def _in_turns(rankings: Sequence[Sequence[int]], count: int) -> list[int]:
    """The first ``count`` of several rankings, taken from each in turn, those of all peers twice as often."""
    taken: dict[int, None] = {}
    iterators = [iter(ranking) for ranking in (rankings[0], *rankings)]
    while iterators and len(taken) < count:
        for iterator in list(iterators):
            following = next((index for index in iterator if index not in taken), None)
            if following is None:
                iterators.remove(iterator)
            elif len(taken) < count:
                taken[following] = None
    return list(taken)


class _Shares:
    def __init__(
        self,
        segments: Segments,
        peers: tuple[PeerOffer, ...],
        network: Network,
        constraints: Constraints,
        memory: MemoryTable,
    ) -> None:
        onward, homeward = constraints.strongest_ratios
        forward = onward * float(np.median(segments.forward_bytes[1:-1] or (0.0,)))
        backward = homeward * float(np.median(segments.backward_bytes[1:-1] or (0.0,)))
        self._whole = np.maximum(peer_seconds(segments, peers).all_works[:, -1], 1e-12)
        self._num_microbatches = constraints.num_microbatches
        self._most_stages = segments.num_segments
        self.pair_seconds = pair_seconds(network, forward, backward)
        allowed = np.array([allowed_bytes(peer, constraints) for peer in peers], dtype=np.float64)
        held = min(_USUALLY_HELD, constraints.num_microbatches)
        need = np.min(memory.fixed[:, 0, -1] + memory.microbatch[:, 0, -1] * held)
        self._memory_share = allowed / max(float(need), 1.0)
        good = min(_GOOD_LINKS, len(peers) - 1)
        apart = self.pair_seconds + np.diag(np.full(len(peers), np.inf))
        self._hop = np.median(np.partition(apart, good - 1, axis=1)[:, :good], axis=1)
        # The largest rate is the infinite one to oneself.
        good_rate = np.sort(network.rate, axis=1)[:, -good - 1]
        line = (forward + backward) / np.minimum(network.upload, network.download)
        self._line = np.maximum(line, max(forward, backward) / good_rate)

    def best_step(self, group: Indices) -> tuple[float, float]:
        """About how long a step of the best plan inside ``group`` takes, and its pace; infinite when the group is too
        small."""
        fastest = 1.0 / float((1.0 / self._whole[group]).sum())
        slowest = float(self._whole[group].max()) + float(self._line[group].max())
        best = float("inf"), slowest
        for pace in np.geomspace(slowest, fastest, _PACES):
            share = np.sort(self._share(group, float(pace)))[::-1]
            enough = int(np.searchsorted(np.cumsum(share), 1.0)) + 1
            if enough > min(len(group), self._most_stages):
                continue
            hop = float(np.median(self._hop[group]))
            step = enough * (pace + hop) + (self._num_microbatches - 1) * float(pace)
            best = min(best, (step, float(pace)))
        return best

    def ranked(self, group: Indices) -> list[int]:
        """The group with the largest shares at its best pace first; near peers first among equals."""
        _, pace = self.best_step(group)
        share = self._share(group, pace)
        return [int(group[index]) for index in np.lexsort((group, self._hop[group], -share))]

    def _share(self, group: Indices, pace: float) -> Matrix:
        """The part of the model that each could take at ``pace``."""
        share = np.minimum(pace / self._whole[group], self._memory_share[group])
        return np.where(self._line[group] <= pace, share, 0.0)
